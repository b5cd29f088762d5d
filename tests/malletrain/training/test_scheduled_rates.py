"""A learning rate that a state of the script's own making does not have is told
(torchtitan#4598).
"""

from __future__ import annotations

import copy
import math

import pytest
import torch

import malletrain
from malletrain.protocol.worker_channel import OwnerNotice
from tests.malletrain.training.worker_side import as_worker


class Container:
    """Around an optimizer; its state is made anew at each call, or only at the first one."""

    def __init__(self, optimizer, is_cached):
        self.optimizer, self.is_cached, self.cached = optimizer, is_cached, None

    def state_dict(self):
        if not self.is_cached or self.cached is None:
            self.cached = copy.deepcopy(self.optimizer.state_dict())
        return self.cached

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)


def script(path, is_cached):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    container = Container(optimizer, is_cached)
    snapshot = malletrain.Snapshot(
        path, every_s=float("inf"), model=model, optimizer=container, scheduler=scheduler
    )
    return snapshot, container, scheduler


@pytest.mark.parametrize("is_cached", [True, False])
def test_another_rate_after_a_restore_is_told(monkeypatch, tmp_path, is_cached):
    with as_worker(monkeypatch) as agent:
        snapshot, container, scheduler = script(tmp_path / "x.pt", is_cached)
        snapshot.restore()
        container.state_dict()
        container.optimizer.step()
        scheduler.step()
        snapshot.step()
        assert snapshot.save()
        again, container, _ = script(tmp_path / "x.pt", is_cached)
        assert again.restore()
        sentences = [notice.sentence for notice in agent.received(OwnerNotice)]
    rate = container.optimizer.param_groups[0]["lr"]
    assert rate == (0.1 if is_cached else 0.05)
    matching = [s for s in sentences if "was 0.05 when the" in s and "is 0.1 after" in s]
    assert len(matching) == len(sentences) == is_cached


class Own:
    """A schedule of the script's own that sets its rates when it is loaded."""

    def __init__(self, optimizer, load):
        self.optimizer, self.load, self.steps = optimizer, load, 0

    def step(self):
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]
        self.load(self)


def run_twice(path, log, make, times=2):
    """Return the notices in the log of a script that runs several times, with seven steps each."""
    for _ in range(times):
        model = torch.nn.Linear(1, 1)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, lr=0.3)
        other = make(optimizer)
        snapshot = malletrain.Snapshot(path, model=model, optimizer=optimizer, other=other)
        restored = snapshot.restore()
        for _ in range(7):
            optimizer.step()
            other.step()
            snapshot.step()
        assert snapshot.save()
    assert restored
    return [line for line in log.readouterr().err.splitlines() if "The learning rate of" in line]


def test_a_rate_that_is_computed_in_another_way_is_the_same(capsys, tmp_path):
    def load(schedule):
        for group in schedule.optimizer.param_groups:
            group["lr"] = math.nextafter(group["lr"], 1)

    assert not run_twice(tmp_path / "x.pt", capsys, lambda o: Own(o, load))


def test_the_group_that_differs_is_told_once_in_a_job(capsys, tmp_path):
    """Each restart would bring other numbers."""

    def load(schedule):
        schedule.optimizer.param_groups[1]["lr"] = 0.125 / schedule.steps

    (sentence,) = run_twice(tmp_path / "x.pt", capsys, lambda o: Own(o, load), times=4)
    assert "optimizer in 'other' (parameter group 1) was 0.095" in sentence
    assert "and is 0.017" in sentence


class Odd(Own):
    """Its optimizer cannot be read."""

    optimizer = property(lambda self: 1 / 0)

    def __init__(self):
        self.steps = 0

    def step(self):
        self.steps += 1

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_an_object_whose_optimizer_cannot_be_read_is_saved(capsys, tmp_path):
    assert not run_twice(tmp_path / "x.pt", capsys, lambda _: Odd())
