"""Scripts of public reports about schedulers of the script's own making."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.scripts import live, plain
from tests.zoo.scripts.parts import EPOCHS
from tests.zoo.trace import Trace


class ParamScheduler:
    """Moves rate and decay, and loads its state by steps from where it is (Megatron-LM#7468,
    Automodel#3882).
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.most, self.num_steps = optimizer, 0.3, 0
        self.step(0)

    def step(self, increment: int = 1) -> None:
        """Set the options of all groups."""
        self.num_steps += increment
        done = min(1.0, self.num_steps / plain.STEPS)
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.1 * (1 - 0.9 * done), done * self.most

    def state_dict(self) -> dict[str, Any]:
        """Return its number of steps."""
        return {"num_steps": self.num_steps, "most": self.most}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make as many steps."""
        self.step(state["num_steps"])
        self.most = state["most"]


def param_scheduler(trace: Trace) -> None:
    """A schedule of the rate and of the decay by a class of its own."""
    t = plain.Training(trace)
    scheduler = ParamScheduler(t.optimizer)
    t.prepare(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, scheduler.step)
        decay = t.optimizer.param_groups[0]["weight_decay"]
        trace.note("decay", epoch, value=decay, steps=scheduler.num_steps)
    t.end()


def param_scheduler_live(trace: Trace) -> None:
    """The same in live mode."""
    t = live.Training(trace)
    scheduler = ParamScheduler(t.optimizer)
    t.begin(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, scheduler.step)
        decay = t.optimizer.param_groups[0]["weight_decay"]
        trace.note("decay", epoch, value=decay, steps=scheduler.num_steps)
    t.end()
