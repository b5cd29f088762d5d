"""Scripts with a defect each, that a driver must report; in restart mode unless they say so."""

from __future__ import annotations

import torch.distributed as dist
from torch.optim import lr_scheduler

import malletrain
from malletrain import elastic
from tests.zoo.scripts.parts import EPOCHS, evaluate, rate
from tests.zoo.scripts.plain import Training
from tests.zoo.trace import Trace


def _epochs(t: Training) -> None:
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        t.trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def optimizer_lost(trace: Trace) -> None:
    """A snapshot without the optimizer, which has momentum."""
    t = Training(trace)
    t.prepare()
    t.snapshot = malletrain.Snapshot(
        "less.pt", every_s=trace.save_every_s, model=t.model, sampler=t.sampler
    )
    t.snapshot.restore()
    _epochs(t)


def samples_repeated(trace: Trace) -> None:
    """The sampler is not in the snapshot: the run begins its data anew."""
    t = Training(trace)
    t.prepare()
    t.snapshot = malletrain.Snapshot(
        "less.pt", every_s=trace.save_every_s, model=t.model, optimizer=t.optimizer
    )
    t.snapshot.restore()
    _epochs(t)


def rate_by_counter(trace: Trace) -> None:
    """The learning rate follows a variable of the script."""
    t = Training(trace)
    t.prepare()
    step = 0

    def after_step() -> None:
        nonlocal step
        step += 1
        t.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)

    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, after_step)
    t.end()


def tail_skipped(trace: Trace) -> None:
    """The code after an epoch runs only where the process has done the epoch's first step."""
    t = Training(trace)
    scheduler = lr_scheduler.StepLR(t.optimizer, step_size=1, gamma=0.5)
    t.prepare(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        whole = t.sampler.position == 0
        t.train_epoch(epoch)
        if whole:
            scheduler.step()
            trace.note("scheduler", epoch, lr=rate(t.optimizer))
    t.end()


def tail_twice(trace: Trace) -> None:
    """A process that begins with a restored state evaluates the epoch before once more."""
    t = Training(trace)
    t.prepare()
    if t.sampler.epoch:
        trace.note("evaluation", t.sampler.epoch - 1, loss=evaluate(t.model))
    _epochs(t)


def evaluation_missing_on_one_rank(trace: Trace) -> None:
    """Every rank evaluates, but one that has joined in the middle of an epoch."""
    t = Training(trace)
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        joined = t.sampler.position > 0 and dist.get_rank() > 0
        t.train_epoch(epoch)
        if not joined:
            trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def refused_live(trace: Trace) -> None:
    """Live mode: the run is given no state."""
    elastic.Run(snapshot="run.pt")
    trace.point("never")
