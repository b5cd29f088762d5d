"""Live mode: loops, stops and saves of trainings with malletrain.elastic."""

from __future__ import annotations

import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from tests.zoo.scripts.live import Training
from tests.zoo.scripts.parts import BATCH, EPOCHS, Numbered, evaluate, rate, results_file
from tests.zoo.trace import Trace


def early_stopping(trace: Trace) -> None:
    """Patience in a dict of the run; all ranks stop after the same epoch."""
    t = Training(trace)
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS + 3):
        t.train_epoch(epoch)
        loss = evaluate(t.model)
        if loss < t.facts["best"] - 0.1:
            t.facts.update(best=loss, bad=0)
        else:
            t.facts["bad"] += 1
        trace.note("patience", epoch, loss=loss, bad=t.facts["bad"])
        if t.facts["bad"] >= 2:
            break
    t.end()


def early_stopping_first(trace: Trace) -> None:
    """Early stopping, decided by the run's dict before an epoch begins."""
    t = Training(trace)
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS + 3):
        if t.facts["bad"] >= 2:
            break
        t.train_epoch(epoch)
        loss = evaluate(t.model)
        if loss < t.facts["best"] - 0.1:
            t.facts.update(best=loss, bad=0)
        else:
            t.facts["bad"] += 1
        trace.note("patience", epoch, loss=loss, bad=t.facts["bad"])
    t.end()


def best_model(trace: Trace) -> None:
    """The best weights in a file of their own."""
    t = Training(trace)
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        loss = evaluate(t.model)
        if loss < t.facts["best"]:
            t.facts["best"] = loss
            if t.run.rank == 0:
                torch.save(t.model.state_dict(), "best.pt")
                trace.note("best", epoch, loss=loss)
    t.end()


def compiled(trace: Trace) -> None:
    """A compiled model, warmed up before the process says that it is ready."""
    t = Training(trace)
    faster = torch.compile(t.model, backend="eager")
    x = torch.ones(2, 4, dtype=torch.float64)
    t.begin(warmup=lambda: faster(x).sum().backward())
    t.net = t.run.ddp(faster)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def persistent_workers(trace: Trace) -> None:
    """A loader with workers that stay."""
    t = Training(trace)
    t.loader = DataLoader(
        Numbered(),
        batch_sampler=t.sampler,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def counted_range(trace: Trace) -> None:
    """``range(sampler.epoch, n)`` instead of ``sampler.epochs(n)``."""
    t = Training(trace)
    scheduler = lr_scheduler.ExponentialLR(t.optimizer, gamma=0.7)
    t.begin(scheduler=scheduler)
    for epoch in range(t.sampler.epoch, EPOCHS):
        t.train_epoch(epoch)
        scheduler.step()
        trace.note("scheduler", epoch, lr=rate(t.optimizer))
    t.end()


def while_loop(trace: Trace) -> None:
    """``while sampler.epoch < n``, with the evaluation at the end of the loop's body."""
    t = Training(trace)
    t.begin()
    while t.sampler.epoch < EPOCHS:
        epoch = t.sampler.epoch
        t.train_epoch(epoch)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def saved_each_epoch(trace: Trace) -> None:
    """``run.save()`` after each epoch, before its scheduler."""
    t = Training(trace)
    scheduler = lr_scheduler.StepLR(t.optimizer, step_size=1, gamma=0.5)
    t.begin(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        t.run.save()
        scheduler.step()
        trace.note("scheduler", epoch, lr=rate(t.optimizer))
    t.end()


def group_added(trace: Trace) -> None:
    """The last layer is trained from the beginning, the first one joins in epoch 1."""
    t = Training(trace)
    t.optimizer = torch.optim.Adam(t.model[2].parameters(), lr=0.05)
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS):
        if epoch >= 1 and len(t.optimizer.param_groups) == 1:
            t.optimizer.add_param_group({"params": list(t.model[0].parameters()), "lr": 0.05})
        t.train_epoch(epoch)
        trace.note("groups", epoch, count=len(t.optimizer.param_groups))
    t.end()


def kept_open(trace: Trace) -> None:
    """A row an epoch, in a file that is open from beginning to end and never flushed."""
    t = Training(trace)
    t.begin()
    with results_file("log.csv") as log:
        for epoch in t.sampler.epochs(EPOCHS):
            t.train_epoch(epoch)
            if t.run.rank == 0:
                log.write(f"{epoch},{evaluate(t.model):.8f}\n")
                trace.note("row", epoch)
    t.end()


def cut_short(trace: Trace) -> None:
    """``max_steps_per_epoch``: each epoch is left after three of its four steps."""
    t = Training(trace)
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.run.batches(t.loader):
            t.train_batch(epoch, x, y, numbers)
            if t.sampler.position >= 3 * BATCH:
                break
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def largest_step(trace: Trace) -> None:
    """``max_steps``: both loops end after step 7, in the middle of an epoch."""
    t = Training(trace)
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.run.batches(t.loader):
            t.train_batch(epoch, x, y, numbers)
            if t.run.steps_done >= 7:
                break
        if t.run.steps_done >= 7:
            break
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def batch_ramp(trace: Trace) -> None:
    """The global batch grows from epoch to epoch."""
    t = Training(trace)
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS):
        t.sampler.set_global_batch_size(BATCH + 2 * epoch)
        t.train_epoch(epoch)
        trace.note("evaluation", epoch, loss=evaluate(t.model), batch=t.sampler.global_batch_size)
    t.end()


def batch_in_epoch(trace: Trace) -> None:
    """The global batch changes within an epoch, by the run's count of steps: in a step and between
    two steps.
    """
    t = Training(trace)
    t.begin()

    def in_step() -> None:
        if t.run.steps_done == 1:
            t.sampler.set_global_batch_size(4)

    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.run.batches(t.loader):
            t.train_batch(epoch, x, y, numbers, in_step)
            if t.run.steps_done >= 7:
                t.sampler.set_global_batch_size(9)
        trace.note("evaluation", epoch, loss=evaluate(t.model), batch=t.sampler.global_batch_size)
    t.end()
