"""Scripts of public bug reports that do something at the beginning of each epoch, in both modes. A
run that resumes in the middle of an epoch begins with that code again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler

from tests.zoo.scripts import live, plain
from tests.zoo.scripts.parts import EPOCHS, SAMPLES, evaluate, make_model, rate
from tests.zoo.scripts.reports import Annealed
from tests.zoo.trace import Trace

_Training = plain.Training | live.Training


def _begin(t: _Training, **more: Any) -> None:
    if isinstance(t, live.Training):
        t.begin(**more)
    else:
        t.prepare(**more)


def _scheduled_first(trace: Trace, make: Callable[..., _Training]) -> None:
    """The scheduler makes its step first, as before torch 1.1 (slime#1547, fairchem#146)."""
    t = make(trace)
    scheduler = lr_scheduler.StepLR(t.optimizer, step_size=1, gamma=0.5)
    _begin(t, scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        if epoch:
            scheduler.step()
        t.train_epoch(epoch)
        trace.note("scheduler", epoch, lr=rate(t.optimizer), steps=scheduler.last_epoch)
    t.end()


def _decayed_first(trace: Trace, make: Callable[..., _Training]) -> None:
    """The rate and a temperature of the model are multiplied with a factor."""
    t = make(trace)
    t.model = Annealed()  # type: ignore[assignment]
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.1, momentum=0.9)
    _begin(t)
    for epoch in t.sampler.epochs(EPOCHS):
        t.optimizer.param_groups[0]["lr"] *= 0.8
        t.model.temperature *= 0.7
        t.train_epoch(epoch)
        trace.note("epoch", epoch, lr=rate(t.optimizer), temperature=t.model.temperature)
    t.end()


def _epoch_sums(trace: Trace, make: Callable[..., _Training]) -> None:
    """What is added up over an epoch is set to 0 first (ace#1233)."""
    t = make(trace, norm=0.0, steps=0)
    _begin(t)

    def after_step() -> None:
        t.facts["norm"] += float(sum(p.detach().norm() for p in t.model.parameters()))
        t.facts["steps"] += 1

    for epoch in t.sampler.epochs(EPOCHS):
        t.facts.update(norm=0.0, steps=0)
        t.train_epoch(epoch, after_step)
        trace.note("mean", epoch, norm=t.facts["norm"] / t.facts["steps"], steps=t.facts["steps"])
    t.end()


def _teacher_first(trace: Trace, make: Callable[..., _Training]) -> None:
    """The teacher of an epoch has the weights with which the epoch begins (da-sac#13)."""
    t = make(trace)
    teacher = make_model(2)
    _begin(t, teacher=teacher)
    for epoch in t.sampler.epochs(EPOCHS):
        teacher.load_state_dict(t.model.state_dict())
        t.train_epoch(epoch)
        trace.note("teacher", epoch, loss=evaluate(teacher))
    t.end()


def _drawn_first(trace: Trace, make: Callable[..., _Training]) -> None:
    """The labels of an epoch get noise that is drawn first (speculators#1027)."""
    np.random.seed(3)
    t = make(trace)
    torch.manual_seed(3)
    clean = t.loader.dataset.targets.clone()
    _begin(t)
    for epoch in t.sampler.epochs(EPOCHS):
        noise = torch.as_tensor(np.random.normal(size=(SAMPLES, 1))) + torch.rand(1).double()
        t.loader.dataset.targets = clean + 0.1 * noise
        t.train_epoch(epoch)
        trace.note("noise", epoch, first=float(noise[0, 0]), after=float(torch.rand(1)))
    t.end()


def scheduled_first(trace: Trace) -> None:
    """In restart mode."""
    _scheduled_first(trace, plain.Training)


def decayed_first(trace: Trace) -> None:
    """In restart mode."""
    _decayed_first(trace, plain.Training)


def epoch_sums(trace: Trace) -> None:
    """In restart mode."""
    _epoch_sums(trace, plain.Training)


def teacher_first(trace: Trace) -> None:
    """In restart mode."""
    _teacher_first(trace, plain.Training)


def drawn_first(trace: Trace) -> None:
    """In restart mode."""
    _drawn_first(trace, plain.Training)


def scheduled_first_live(trace: Trace) -> None:
    """In live mode."""
    _scheduled_first(trace, live.Training)


def decayed_first_live(trace: Trace) -> None:
    """In live mode."""
    _decayed_first(trace, live.Training)


def epoch_sums_live(trace: Trace) -> None:
    """In live mode."""
    _epoch_sums(trace, live.Training)


def teacher_first_live(trace: Trace) -> None:
    """In live mode."""
    _teacher_first(trace, live.Training)


def drawn_first_live(trace: Trace) -> None:
    """In live mode."""
    _drawn_first(trace, live.Training)
