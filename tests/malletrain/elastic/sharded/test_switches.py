"""What a script freezes, trains again or puts into evaluation mode while it trains stays so in the
modules of later groups, and is so at who joins them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import malletrain.elastic as elastic
from tests.malletrain.elastic.conductor import conducted
from tests.malletrain.elastic.gates import wait_at_gate
from tests.malletrain.elastic.scripts import data
from tests.malletrain.elastic.sharded import scripts
from tests.malletrain.elastic.sharded.test_live import that_count
from tests.malletrain.elastic.test_run import change_at, records
from tests.torch_versions import trains_shards

OPTIONS: dict[str, Any] = {"samples": 240, "gates": [8], "holds": (2, 12)}
THAWS, EVALUATES = 3, 5
"""After so many steps, and never again: a joiner comes too late for it."""


class Gate(torch.nn.Module):
    """Makes a difference between training and evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Doubled in training."""
        return x * 2 if self.training else x


class Switched(scripts.Net):
    """Begins with a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number a sample."""
        return self.gate(super().forward(x))


def switch(model: Any, done: int) -> None:
    """What the script does before its step after ``done``."""
    if done == THAWS:
        model.first.requires_grad_(True)
    if done == EVALUATES:
        model.gate.eval()


def train(folder: str, replicate_every: int) -> None:
    sampler = scripts.sampler_of(OPTIONS)
    run = elastic.Run(
        build=Switched,
        parallelize=scripts.parallelize,
        optimizer=scripts.optimizer_of,
        sampler=sampler,
        snapshot=f"{folder}/run.pt",
        snapshot_every_s=3600.0,
        replicate_every=replicate_every,
    )
    loader = DataLoader(data(OPTIONS["samples"]), batch_sampler=sampler)
    log = os.open(f"{folder}/steps-{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for _ in sampler.epochs(1):
        for x, y, _numbers in run.batches(loader):
            switch(run.model.module, run.steps_done)
            with run.step() as step:
                run.optimizer.zero_grad()
                loss = scripts.loss_of(run.model(x), y) * run.loss_weight
                loss.backward()
                scripts.hold(run, OPTIONS)
                run.optimizer.step()
            if step.aborted:
                continue
            record = {
                "step": run.steps_done - 1,
                "loss": loss.item(),
                "rank": step.rank,
                "size": step.world_size,
                "generation": step.generation,
            }
            os.write(log, json.dumps(record).encode() + b"\n")
            if run.steps_done in OPTIONS["gates"]:
                wait_at_gate(Path(folder, "go"), run)


def alone() -> list[float]:
    """The losses of an undisturbed run."""
    model, losses = Switched(), []
    optimizer = scripts.optimizer_of(model)
    sampler = scripts.sampler_of(OPTIONS, rank=0, world_size=1)
    for _ in sampler.epochs(1):
        for x, y, _numbers in DataLoader(data(OPTIONS["samples"]), batch_sampler=sampler):
            switch(model, len(losses))
            optimizer.zero_grad()
            loss = scripts.loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            sampler.advance()
    return losses


@trains_shards
def test_they_are_carried_over_growth_and_a_loss(tmp_path):
    with conducted(tmp_path, train, str(tmp_path), 3) as c:
        members, new = c.start(2), c.start(1)
        c.round(members)
        change_at(c, tmp_path, 8)
        c.round([*members, *new], wait=False)
        c.until(c.all_checked_in, "all have checked in")
        (tmp_path / "go").touch()
        c.run()
        change_at(c, tmp_path, 12)
        c.round(c.lose(members[1]))
        c.finish()
    by_step: dict[int, list[dict[str, Any]]] = {}
    for record in that_count(tmp_path):
        by_step.setdefault(record["step"], []).append(record)
    expected = alone()
    assert sorted(by_step) == list(range(len(expected)))
    whole = {step: ranks for step, ranks in by_step.items() if len(ranks) == ranks[0]["size"]}
    assert len(whole) >= len(expected) - 1  # The killed worker may not have recorded its last step.
    for step, ranks in whole.items():
        mean = sum(record["loss"] for record in ranks) / len(ranks)
        assert mean == pytest.approx(expected[step], rel=1e-5)
    assert {r["size"] for r in records(tmp_path)} == {2, 3}
