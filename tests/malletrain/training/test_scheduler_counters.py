"""Counters that scripts pass to their schedulers, over a restart in the middle of an epoch."""

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from malletrain import ElasticSampler, Snapshot, SnapshotError
from tests.malletrain.training.worker_side import as_plain_script

STEPS = 5
"""Of an epoch."""


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


class OfUpdates:
    """A scheduler by timm's interface."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step_update(self, num_updates, metric=None):
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 * (1 + math.cos(math.pi * num_updates / (3 * STEPS)))

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def warm_restarts(optimizer):
    return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3)


def train(path, make, after, steps):
    """Make ``steps`` updates, and save; ``after`` each, what calls the scheduler."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = make(optimizer)
    sampler = ElasticSampler(STEPS, global_batch_size=1, rank=0, world_size=1)
    objects = {"optimizer": optimizer, "sampler": sampler, "scheduler": scheduler}
    snapshot = Snapshot(path, model=model, every_s=math.inf, **objects)
    snapshot.restore()
    for epoch in sampler.epochs(3):
        for i, _ in enumerate(sampler):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            after(scheduler, epoch, i, sampler)
            sampler.advance()
            snapshot.step()
            steps -= 1
            if not steps:
                snapshot.save()
                return


@pytest.mark.parametrize(
    ("make", "after", "call"),
    [
        (warm_restarts, lambda s, epoch, i, _: s.step(epoch + i / STEPS), r"step\(1.4\)"),
        (OfUpdates, lambda s, epoch, i, _: s.step_update(epoch * STEPS + i + 1),
         r"step_update\(8\)"),
        (OfUpdates, lambda s, epoch, i, _: s.step_update(num_updates=epoch * STEPS + i),
         r"step_update\(7\)"),
    ],
    ids=["torch", "timm", "named"],
)  # fmt: skip
def test_a_counter_that_goes_back_is_refused(tmp_path, make, after, call):
    path = tmp_path / "run.pt"
    train(path, make, after, STEPS + 3)
    with pytest.raises(SnapshotError, match=rf"'scheduler' has gone back.*{call}.*position"):
        train(path, make, after, 1)


@pytest.mark.parametrize(
    ("make", "after"),
    [
        (warm_restarts, lambda s, epoch, i, at: s.step(epoch + at.position / at.num_samples)),
        (warm_restarts, lambda s, epoch, i, at: s.step()),
        (warm_restarts, lambda s, epoch, i, at: s.step(i)),
        (lr_scheduler.ReduceLROnPlateau, lambda s, epoch, i, at: s.step(1.0 / (1 + i))),
    ],
    ids=["of the sampler", "without", "of an epoch", "a metric"],
)
def test_other_calls_are_not_refused(tmp_path, make, after):
    path = tmp_path / "run.pt"
    train(path, make, after, STEPS + 3)
    train(path, make, after, 4)


def test_a_call_before_the_loop_is_not_checked(tmp_path):
    path = tmp_path / "run.pt"

    def after(scheduler, epoch, i, sampler):
        scheduler.step(epoch + sampler.position / sampler.num_samples)

    def make(optimizer):
        class Begun(lr_scheduler.CosineAnnealingWarmRestarts):
            def load_state_dict(self, state):
                super().load_state_dict(state)
                self.step(1)

        return Begun(optimizer, T_0=3)

    train(path, make, after, STEPS + 3)
    train(path, make, after, 1)
