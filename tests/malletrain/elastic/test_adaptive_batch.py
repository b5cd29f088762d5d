"""AdaptiveBatch in live mode: the batch grows within an epoch, a process that joins has the noise
of the others, and a lost peer's step leaves no trace in it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from malletrain import AdaptiveBatch, ElasticSampler, elastic
from tests.malletrain.elastic.conductor import conducted
from tests.waiting import until

SAMPLES, WIDTH, CHANGE_AT = 2000, 10, 12


def changes(run: elastic.Run) -> bool:
    return run.membership.ready_to_go or run.membership.group.broken


def train(folder: str) -> None:
    """The gradient is noise only. Waits for a change of the group after some steps."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    numbered = TensorDataset(inputs - inputs.mean(0), torch.arange(SAMPLES))
    torch.manual_seed(1)
    model = torch.nn.Linear(WIDTH, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model.bias.requires_grad_(False)
    sampler = ElasticSampler(SAMPLES, global_batch_size=8, max_world_size=3)
    adaptive = AdaptiveBatch(sampler, optimizer, most=64)
    run = elastic.Run(model=model, optimizer=optimizer, sampler=sampler, adaptive=adaptive)
    net, seen, sizes = run.ddp(model), [], []
    for _ in sampler.epochs(1):
        for x, numbers in run.batches(DataLoader(numbered, batch_sampler=sampler)):
            with run.step() as step:
                optimizer.zero_grad()
                (net(x).mean() * run.loss_weight).backward()
                optimizer.step()
            if not step.aborted:
                seen += numbers.tolist()
                sizes.append(step.global_samples)
            if run.steps_done == CHANGE_AT and run.generation == 1:
                Path(folder, f"waits-{run.rank}").touch()
                until(lambda: changes(run), "the group changes")
    facts = {
        "seen": seen,
        "sizes": sizes,
        "size": sampler.global_batch_size,
        "state": adaptive.state_dict(),
        "digest": run.digest(),
        "steps": run.steps_done,
    }
    Path(folder, f"end-{run.rank}").write_text(json.dumps(facts))


def waits(folder: Path, ranks: int) -> bool:
    return all((folder / f"waits-{rank}").exists() for rank in range(ranks))


@pytest.mark.parametrize("change", ["join", "loss"])
def test_the_batch_grows_and_all_ranks_have_the_same_noise(tmp_path, change):
    with conducted(tmp_path, train, str(tmp_path)) as c:
        members = c.start(2)
        c.round(members)
        c.until(lambda: waits(tmp_path, 2), "both wait for the change")
        members = [*members, *c.start(1)] if change == "join" else c.lose(members[1])
        c.round(members, wait=False)
        c.finish()
    ends = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("end-*"))]
    assert len(ends) == (3 if change == "join" else 1)
    for end in ends:
        assert end["size"] == 64
        assert (end["state"], end["digest"]) == (ends[0]["state"], ends[0]["digest"])
    sizes = ends[0]["sizes"]
    assert sizes[:-1] == sorted(sizes[:-1])
    assert set(sizes[:-1]) == {8, 16, 32, 64}
    if change == "join":
        seen = [number for end in ends for number in end["seen"]]
        assert sorted(seen) == list(range(SAMPLES))
