"""A data cache under a real daemon: nodes come and go, every sample is trained on exactly once, and
``malletrain show`` says where the samples came from.
"""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from tests.integration.embedded import gone, site

SAMPLES, EPOCHS, BATCH = 240, 5, 12
FAST_EPOCHS = 2
"""In the others each step takes seconds until the job may go on: more than a test waits."""

DATA = f"""
import os, sys, time, torch, malletrain
from malletrain.datacache import cache as module
from malletrain.datacache import reader
reader.ANSWER_S = 3600.0
module.REPORT_INTERVAL_S = 0.1
torch.set_num_threads(1)

class Data:
    def __len__(self):
        return {SAMPLES}
    def __getitem__(self, index):
        return torch.full((50,), float(index)), index

sampler = malletrain.ElasticSampler({SAMPLES}, global_batch_size={BATCH}, seed=5)
data = malletrain.DataCache(Data(), name="numbers", sampler=sampler)
assert data.cached
loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
model = torch.nn.Linear(50, 1)

def train(batch):
    values, numbers = batch
    assert torch.equal(values[:, 0], numbers.float()), "bytes of another sample"
    time.sleep(0.02)
    for _ in range(400 if sampler.epoch >= {FAST_EPOCHS} else 0):  # it must not end by itself
        if not os.path.exists("go"):
            time.sleep(0.02)
    return [f"{{sampler.epoch}} {{number}}\\n" for number in numbers.tolist()]

def note(lines):
    name = f"trained-{{os.getpid()}}-{{os.environ['MALLETRAIN_NODE']}}-{{os.environ['WORLD_SIZE']}}"
    with open(name, "a") as file:
        file.write("".join(lines))
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
        lines = train(batch)
        dist.barrier()
        note(lines)
        malletrain.report(len(lines))
        sampler.advance()
        snapshot.step()
"""
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
            lines = train(batch)
            optimizer.zero_grad()
            net(batch[0]).sum().backward()
            optimizer.step()
        note(lines)
"""
)


def trained(work) -> Counter[str]:
    """(epoch, sample) as text → how often it was trained on."""
    counts: Counter[str] = Counter()
    for path in work.glob("trained-*"):
        counts.update(path.read_text().split("\n")[:-1])
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("restart", marks=pytest.mark.thorough), "live"])
def test_samples_stay_in_memory_while_nodes_come_and_go(tmp_path, mode):
    pytest.importorskip("torch")
    with site(tmp_path / "site", nodes=3) as embedded:
        script = embedded.script("train.py", RESTART if mode == "restart" else LIVE)
        job = embedded.submit(
            script, nodes=(1, 3), mode=mode, profile=False, env={"MALLETRAIN_DATA_MEMORY": "64M"}
        )

        def trains_on_all():
            assert embedded.job(job).state != "failed", embedded.show(job).failure
            return any(path.name.endswith("-3") for path in embedded.work.glob("trained-*"))

        embedded.until(trains_on_all, "it trains on three nodes")
        agent = embedded.agents()[embedded.job(job).nodes[-1]]
        agent.send_signal(signal.SIGTERM)
        embedded.until(lambda: gone(agent), "the agent has gone")
        embedded.until(
            lambda: any(view.memory_bytes > 0 for view in embedded.show(job).data),
            "samples are in memory, and the counts are known",
        )
        (embedded.work / "go").touch()
        done = embedded.until_state(job, "completed", "failed")
        assert done.state == "completed", embedded.show(job).failure
        every = {f"{epoch} {n}" for epoch in range(EPOCHS) for n in range(SAMPLES)}
        counts = trained(embedded.work)
        assert set(counts) == every
        # A round that ends in its first step, before a worker has said that it saves on request,
        # makes that step again.
        repeated_steps = len(embedded.events("drain-without-snapshot", job))
        assert counts.total() <= EPOCHS * SAMPLES + repeated_steps * BATCH
        (view,) = embedded.show(job).data
        assert (view.name, view.samples, view.coverage) == ("numbers", SAMPLES, 1.0)
        reads = view.node_hits + view.peer_hits + view.source_reads
        # A worker that is stopped for a rescale has not reported its newest reads.
        assert reads > 0.8 * EPOCHS * SAMPLES
        assert 0 < view.source_reads < reads
        assert view.peer_hits > 0
