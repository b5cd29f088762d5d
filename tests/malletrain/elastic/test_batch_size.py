"""A global batch that changes in live mode: all ranks change it at the same step, processes that
join get the new size, and ranks that set different sizes are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from malletrain import ElasticSampler, elastic
from tests.malletrain.elastic.conductor import conducted
from tests.waiting import until

SAMPLES = 24


def make(**arguments: Any) -> tuple[elastic.Run, DataLoader[Any], torch.optim.Optimizer, Any]:
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = ElasticSampler(SAMPLES, **{"global_batch_size": 4, **arguments})
    run = elastic.Run(model=model, optimizer=optimizer, sampler=sampler)
    data = TensorDataset(torch.arange(float(SAMPLES)).reshape(-1, 1))
    return run, DataLoader(data, batch_sampler=sampler), optimizer, run.ddp(model)


def step(run: elastic.Run, net: Any, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    (net(x).square().mean() * run.loss_weight).backward()
    optimizer.step()


def differing(folder: str) -> None:
    """Each rank sets a size of its own after the second step."""
    run, loader, optimizer, net = make(max_world_size=2)
    for _ in run.sampler.epochs(1):
        for (x,) in run.batches(loader):
            with run.step():
                step(run, net, optimizer, x)
            Path(folder, f"done-{run.rank}").write_text(str(run.steps_done))
            if run.steps_done == 2:
                run.sampler.set_global_batch_size(5 + run.rank)


def test_ranks_that_set_different_sizes_are_refused_at_the_next_step(tmp_path):
    with conducted(tmp_path, differing, str(tmp_path)) as c:
        c.round(c.start(2))
        c.until(lambda: not any(w.alive for w in c.workers), "all have given up")
        outputs = c.outputs()
    assert "The ranks set different global batch sizes (rank 0: 5), so that they train" in outputs
    assert "The ranks set different global batch sizes (rank 1: 6), so that they train" in outputs
    assert [(tmp_path / f"done-{rank}").read_text() for rank in range(2)] == ["2", "2"]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("inside", [True, False])
def test_the_next_step_has_the_new_size(accumulate, inside):
    run, loader, optimizer, net = make()
    sizes, seen = [], []
    for _ in run.sampler.epochs(2):
        for batches in run.batches(loader, accumulate):
            with run.step() as current:
                optimizer.zero_grad()
                for (x,) in current.micro(batches if accumulate > 1 else [batches]):
                    (net(x).square().mean() * run.loss_weight).backward()
                    sizes.append(len(x))
                    seen += x.flatten().int().tolist()
                optimizer.step()
                if inside and run.steps_done == 0:
                    run.sampler.set_global_batch_size(3)
                    assert run.global_batch == 4
            if not inside and run.steps_done == 1:
                run.sampler.set_global_batch_size(3)
            assert run.global_batch == 3
    first = accumulate * 4
    rest = [3] * ((SAMPLES - first) // 3)
    rest += [(SAMPLES - first) % 3] if (SAMPLES - first) % 3 else []
    assert sizes == [4] * accumulate + rest + [3] * (SAMPLES // 3)
    assert sorted(seen[:SAMPLES]) == sorted(seen[SAMPLES:]) == list(range(SAMPLES))


def test_with_drop_last_the_size_changes_with_the_epoch():
    run, loader, optimizer, net = make(drop_last=True)
    sizes = []
    for epoch in run.sampler.epochs(2):
        for (x,) in run.batches(loader):
            with run.step():
                step(run, net, optimizer, x)
            sizes.append((epoch, len(x)))
            if run.steps_done == 1:
                run.sampler.set_global_batch_size(10)
    assert sizes == [(0, 4)] * 6 + [(1, 10)] * 2


def test_a_size_that_a_discarded_step_has_set_is_withdrawn():
    run, loader, _, _ = make()
    sampler, training = run.sampler, run._training  # noqa: SLF001
    (x,) = next(iter(loader))
    training.begin_step(1)
    run._steps.planned = sampler.upcoming(1)  # noqa: SLF001
    sampler.set_global_batch_size(3)
    assert (sampler.requested_batch_size, sampler.global_batch_size) == (3, 4)
    assert training.discard(len(x))
    assert sampler.requested_batch_size == 4


def growing(folder: str) -> None:
    """The size changes at the third step; a process joins at the sixth."""
    run, loader, optimizer, net = make(max_world_size=3)
    for epoch in run.sampler.epochs(4):
        for (x,) in run.batches(loader):
            with run.step():
                step(run, net, optimizer, x)
            line = [epoch, run.world_size, run.global_batch, x.flatten().int().tolist()]
            with Path(folder, f"seen-{run.rank}-{run.generation}").open("a") as file:
                file.write(json.dumps(line) + "\n")
            if run.steps_done == 3:
                run.sampler.set_global_batch_size(3)
            if run.steps_done == 6 and run.world_size == 2:
                Path(folder, "sixth").touch()
                until(lambda: run.membership.ready_to_go, "the third process is ready")


def test_a_process_that_joins_gets_the_new_size(tmp_path):
    with conducted(tmp_path, growing, str(tmp_path)) as c:
        members = c.start(2)
        c.round(members)
        c.until(lambda: (tmp_path / "sixth").exists(), "six steps are done")
        c.round([*members, *c.start(1)], wait=False)
        c.finish()
    lines = [
        json.loads(line)
        for path in tmp_path.glob("seen-*")
        for line in path.read_text().splitlines()
    ]
    assert {size for _, world, size, _ in lines if world == 3} == {3}
    for epoch in range(4):
        numbers = [n for e, _, _, part in lines if e == epoch for n in part]
        assert sorted(numbers) == list(range(SAMPLES))
