"""An ImportanceSampler under a real daemon: nodes come and go, and every draw is trained on exactly
once, with the scores that an undisturbed training has.
"""

from __future__ import annotations

import itertools
import signal
from collections import Counter, defaultdict

import pytest

from tests.integration.embedded import gone, site

SAMPLES, EPOCHS, BATCH = 240, 3, 12

DATA = f"""
import os, time, torch, malletrain
torch.set_num_threads(1)
sampler = malletrain.ImportanceSampler({SAMPLES}, global_batch_size={BATCH}, seed=5)
data = torch.utils.data.TensorDataset(torch.arange({SAMPLES}))
loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
model = torch.nn.Linear(1, 1)

def train(batch):
    time.sleep(0.0 if os.path.exists("left") else 0.3)  # what a step takes
    lines = [f"{{sampler.epoch}} {{number}}\\n" for number in batch[0].tolist()]
    return lines, batch[0] % 17 + 0.1 * sampler.epoch

def note(lines):
    with open(f"trained-{{os.environ['MALLETRAIN_GENERATION']}}-{{os.getpid()}}", "a") as file:
        file.write("".join(lines))
"""
END = """
if int(os.environ["RANK"]) == 0:
    torch.save(sampler.state_dict()["importance"]["levels"], "levels.pt")
"""
RESTART = (
    DATA
    + f"""
import torch.distributed as dist
dist.init_process_group("gloo")
snapshot = malletrain.Snapshot("snapshot.pt", every_s=1e9, model=model, sampler=sampler)
snapshot.restore()
for epoch in sampler.epochs({EPOCHS}):
    for batch in loader:
        lines, losses = train(batch)
        sampler.score(losses)  # a collective: all ranks have made the step
        note(lines)
        malletrain.report(len(lines))
        sampler.advance()
        snapshot.step()
"""
    + END
)
LIVE = (
    DATA
    + f"""
from malletrain import elastic
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
run = elastic.Run(model=model, optimizer=optimizer, sampler=sampler)
net = run.ddp(model)
for epoch in sampler.epochs({EPOCHS}):
    for batch in run.batches(loader):
        with run.step():
            lines, losses = train(batch)
            sampler.score(losses)
            optimizer.zero_grad()
            net(batch[0].float()[:, None]).sum().backward()
            optimizer.step()
        note(lines)
"""
    + END
)


def undisturbed():
    """(epoch, sample) as text → number of its draws; and the levels at the end."""
    import torch

    from malletrain import ImportanceSampler

    sampler = ImportanceSampler(
        SAMPLES, global_batch_size=BATCH, seed=5, rank=0, world_size=1, max_world_size=3
    )
    counts: Counter[str] = Counter()
    while (epoch := sampler.epoch) < EPOCHS:
        for numbers in sampler:
            counts.update(f"{epoch} {number}" for number in numbers)
            sampler.advance(losses=torch.tensor(numbers) % 17 + 0.1 * epoch)
    return counts, sampler.state_dict()["importance"]["levels"]


def draws_by_round(work):
    """The draws of each round: (epoch, sample) as text → how often it was trained on."""
    by_round: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path in work.glob("trained-*"):
        by_round[path.name.split("-")[1]].update(path.read_text().split("\n")[:-1])
    return list(by_round.values())


def rounds_that_count(rounds, unsaved):
    """Return every choice of the rounds whose work may be in the job's state. Each of ``unsaved``
    changes came before rank 0 had said that it saves on request: all that its round did is lost and
    made again, if rank 0 did not save for a later change.
    """
    least = max(0, len(rounds) - unsaved)
    return [
        chosen
        for count in range(len(rounds), least - 1, -1)
        for chosen in itertools.combinations(rounds, count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["restart", pytest.param("live", marks=pytest.mark.thorough)])
def test_each_draw_is_trained_on_once_while_nodes_come_and_go(tmp_path, mode):
    torch = pytest.importorskip("torch")
    with site(tmp_path / "site", nodes=3, light=mode == "restart") as embedded:
        script = embedded.script("train.py", RESTART if mode == "restart" else LIVE)
        job = embedded.submit(script, nodes=(2, 3), mode=mode, profile=False)

        def trains():
            assert embedded.job(job).state != "failed", embedded.show(job).failure
            parts = (path.read_text() for path in embedded.work.glob("trained-*"))
            return any(part.count("\n") > BATCH // 2 for part in parts)

        embedded.until(trains, "a rank of two or three has made two steps")
        agent = embedded.agents()[embedded.job(job).nodes[-1]]
        agent.send_signal(signal.SIGTERM)
        embedded.until(lambda: gone(agent), "the agent has gone")
        (embedded.work / "left").touch()
        done = embedded.until_state(job, "completed", "failed")
        assert done.state == "completed", embedded.show(job).failure
        expected, levels = undisturbed()
        saved = [
            sum(rounds, Counter())
            for rounds in rounds_that_count(
                draws_by_round(embedded.work),
                len(embedded.events("drain-without-snapshot", job)),
            )
        ]
        assert expected in saved, [counts - expected for counts in saved]
        assert torch.equal(torch.load(embedded.work / "levels.pt"), levels)
