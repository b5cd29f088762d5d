"""Restart mode: ordinary DDP trainings: schedules, evaluations, loops, saves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import malletrain
from tests.zoo.scripts.parts import (
    BATCH,
    EPOCHS,
    SAMPLES,
    Numbered,
    append,
    evaluate,
    evaluate_together,
    make_model,
    rate,
    results_file,
)
from tests.zoo.trace import Trace

STEPS = EPOCHS * 4


class Training:
    """The trainer class of a small project: a step, a save, an end."""

    def __init__(self, trace: Trace, **facts: Any) -> None:
        dist.init_process_group("gloo")
        self.trace = trace
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH)
        self.loader = DataLoader(Numbered(), batch_sampler=self.sampler)
        self.facts = {"best": 1e9, "bad": 0, **facts}
        self.main = dist.get_rank() == 0

    def prepare(self, **more: Any) -> None:
        """Restore, and wrap the model."""
        self.snapshot = malletrain.Snapshot(
            "run.pt",
            every_s=self.trace.save_every_s,
            model=self.model,
            optimizer=self.optimizer,
            sampler=self.sampler,
            facts=self.facts,
            **more,
        )
        self.snapshot.restore()
        self.net = DistributedDataParallel(self.model)

    def train_epoch(self, epoch: int, after_step: Callable[[], None] = lambda: None) -> None:
        """The steps that are left of an epoch."""
        for x, y, numbers in self.loader:
            self.train_batch(epoch, x, y, numbers, after_step)
        self.trace.point(f"tail of {epoch}")

    def train_batch(
        self,
        epoch: int,
        x: Any,
        y: Any,
        numbers: Any,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        """One step."""
        self.optimizer.zero_grad()
        loss = mse_loss(self.net(x), y) * self.sampler.loss_weight
        loss.backward()
        self.optimizer.step()
        self.trace.step((epoch, self.sampler.position), numbers, rate(self.optimizer))
        after_step()
        self.sampler.advance()
        malletrain.report(len(x))
        self.snapshot.step()

    def end(self) -> None:
        """Save, write the results, leave."""
        self.snapshot.save()
        self.trace.point("saved")
        if self.main:
            append("result.txt", f"{evaluate(self.model):.6f}")
            self.trace.note("results", "end")
        dist.destroy_process_group()
        self.trace.point("group destroyed")
        self.trace.finish(self.model)


def epoch_scheduler(trace: Trace) -> None:
    """StepLR and an evaluation by rank 0, once an epoch."""
    t = Training(trace)
    scheduler = lr_scheduler.StepLR(t.optimizer, step_size=1, gamma=0.5)
    t.prepare(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        scheduler.step()
        trace.note("scheduler", epoch, lr=rate(t.optimizer))
        if t.main:
            append("log.csv", f"{epoch},{evaluate(t.model):.8f}")
            trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def evaluation_together(trace: Trace) -> None:
    """An evaluation in which each rank takes a part: collectives of the script after an epoch."""
    t = Training(trace)
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        loss = evaluate_together(t.model)
        trace.note("evaluation", epoch, loss=loss)
        dist.barrier()
    t.end()


def warm_up(trace: Trace) -> None:
    """A warm-up by step."""
    t = Training(trace)
    scheduler = lr_scheduler.LambdaLR(t.optimizer, lambda step: min(1.0, (step + 1) / 6))
    t.prepare(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, after_step=scheduler.step)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def one_cycle(trace: Trace) -> None:
    """OneCycleLR over all steps, which moves the momentum as well."""
    t = Training(trace)
    scheduler = lr_scheduler.OneCycleLR(t.optimizer, max_lr=0.2, total_steps=STEPS + 1)
    t.prepare(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, after_step=scheduler.step)
    trace.note("momentum", "end", value=float(t.optimizer.param_groups[0]["momentum"]))
    t.end()


def plateau(trace: Trace) -> None:
    """ReduceLROnPlateau by an evaluation that rank 0 makes and broadcasts."""
    t = Training(trace)
    scheduler = lr_scheduler.ReduceLROnPlateau(t.optimizer, factor=0.5, patience=0, threshold=0.5)
    t.prepare(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        value = torch.tensor(evaluate(t.model) if t.main else 0.0, dtype=torch.float64)
        dist.broadcast(value, src=0)
        scheduler.step(value.item())
        trace.note("plateau", epoch, lr=rate(t.optimizer), bad=scheduler.num_bad_epochs)
    t.end()


def chained(trace: Trace) -> None:
    """A warm-up by step, then a schedule by epoch: SequentialLR and a second scheduler."""
    t = Training(trace)
    steps = lr_scheduler.SequentialLR(
        t.optimizer,
        [
            lr_scheduler.LinearLR(t.optimizer, 0.1, total_iters=3),
            lr_scheduler.CosineAnnealingLR(t.optimizer, T_max=9),
        ],
        milestones=[3],
    )
    t.prepare(scheduler=steps)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, after_step=steps.step)
        trace.note("epoch", epoch, lr=rate(t.optimizer))
    t.end()


def counted_range(trace: Trace) -> None:
    """``range(sampler.epoch, n)`` instead of ``sampler.epochs(n)``."""
    t = Training(trace)
    scheduler = lr_scheduler.ExponentialLR(t.optimizer, gamma=0.7)
    t.prepare(scheduler=scheduler)
    for epoch in range(t.sampler.epoch, EPOCHS):
        t.train_epoch(epoch)
        scheduler.step()
        trace.note("scheduler", epoch, lr=rate(t.optimizer))
    t.end()


def while_loop(trace: Trace) -> None:
    """``while sampler.epoch < n``, with the evaluation at the end of the loop's body."""
    t = Training(trace)
    t.prepare()
    while t.sampler.epoch < EPOCHS:
        epoch = t.sampler.epoch
        t.train_epoch(epoch)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def saved_before_scheduler(trace: Trace) -> None:
    """An explicit save after each epoch, before its scheduler and evaluation."""
    t = Training(trace)
    scheduler = lr_scheduler.StepLR(t.optimizer, step_size=1, gamma=0.5)
    t.prepare(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        t.snapshot.save()
        trace.point(f"save of {epoch}")
        scheduler.step()
        trace.note("scheduler", epoch, lr=rate(t.optimizer))
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def saved_after_scheduler(trace: Trace) -> None:
    """An explicit save as the last line of each epoch."""
    t = Training(trace)
    scheduler = lr_scheduler.StepLR(t.optimizer, step_size=1, gamma=0.5)
    t.prepare(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        scheduler.step()
        trace.note("scheduler", epoch, lr=rate(t.optimizer))
        t.snapshot.save()
        trace.point(f"save of {epoch}")
    t.end()


def early_stopping(trace: Trace) -> None:
    """Patience in a dict of the snapshot; the loop breaks when it is used up."""
    t = Training(trace)
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS + 3):
        t.train_epoch(epoch)
        loss = evaluate_together(t.model)
        if loss < t.facts["best"] - 0.1:
            t.facts.update(best=loss, bad=0)
        else:
            t.facts["bad"] += 1
        trace.note("patience", epoch, loss=loss, bad=t.facts["bad"])
        if t.facts["bad"] >= 2:
            break
    t.end()


def best_model(trace: Trace) -> None:
    """The best weights in a file of their own, loaded at the end."""
    t = Training(trace)
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        loss = evaluate(t.model)
        if loss < t.facts["best"]:
            t.facts["best"] = loss
            if t.main:
                torch.save(t.model.state_dict(), "best.pt")
                trace.note("best", epoch, loss=loss)
        dist.barrier()
    t.snapshot.save()
    t.model.load_state_dict(torch.load("best.pt"))
    t.end()


def evaluation_in_epoch(trace: Trace) -> None:
    """An evaluation every three steps of the run, counted in a dict of the snapshot."""
    t = Training(trace, step=0)
    t.prepare()

    def after_step() -> None:
        t.facts["step"] += 1
        if t.facts["step"] % 3 == 0:
            trace.note("evaluation", t.facts["step"], loss=evaluate(t.model))

    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, after_step)
    t.end()


def limited_before_step(trace: Trace) -> None:
    """The same limit, as the first line of the loop; all ranks evaluate."""
    t = Training(trace)
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.loader:
            if t.sampler.position >= 3 * BATCH:
                break
            t.train_batch(epoch, x, y, numbers)
        trace.note("evaluation", epoch, loss=evaluate_together(t.model))
    t.end()


def cut_short(trace: Trace) -> None:
    """``max_steps_per_epoch``: each epoch is left after three of its four steps."""
    t = Training(trace)
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.loader:
            t.train_batch(epoch, x, y, numbers)
            if t.sampler.position >= 3 * BATCH:
                break
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def cut_short_saved(trace: Trace) -> None:
    """The same, with an explicit save before the evaluation, and workers of the loader."""
    t = Training(trace)
    t.loader = DataLoader(
        Numbered(), batch_sampler=t.sampler, num_workers=1, multiprocessing_context="fork"
    )
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.loader:
            t.train_batch(epoch, x, y, numbers)
            if t.sampler.position >= 3 * BATCH:
                break
        t.snapshot.save()
        trace.point(f"save of {epoch}")
        trace.note("evaluation", epoch, loss=evaluate_together(t.model))
    t.end()


def largest_step(trace: Trace) -> None:
    """``max_steps``: both loops end after step 7, in the middle of an epoch."""
    t = Training(trace, step=0)
    t.prepare()

    def after_step() -> None:
        t.facts["step"] += 1

    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.loader:
            t.train_batch(epoch, x, y, numbers, after_step)
            if t.facts["step"] >= 7:
                break
        if t.facts["step"] >= 7:
            break
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def scheduled_after_snapshot(trace: Trace) -> None:
    """The scheduler steps, and rank 0 writes a row, after ``snapshot.step()``."""
    t = Training(trace, step=0)
    scheduler = lr_scheduler.LambdaLR(t.optimizer, lambda step: 1 / (1 + step))
    t.prepare(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.loader:
            t.train_batch(epoch, x, y, numbers)
            scheduler.step()
            t.facts["step"] += 1
            if t.main:
                append("steps.csv", f"{t.facts['step']},{rate(t.optimizer):.6f}")
                trace.note("row", t.facts["step"])
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def kept_open(trace: Trace) -> None:
    """A row a step, in a file that is open from beginning to end and never flushed."""
    t = Training(trace)
    t.prepare()
    with results_file("log.csv") as log:

        def write() -> None:
            if t.main:
                log.write(f"{t.sampler.epoch},{t.sampler.position}\n")

        for epoch in t.sampler.epochs(EPOCHS):
            t.train_epoch(epoch, write)
    t.end()


def rows_of_all_ranks(trace: Trace) -> None:
    """Each rank writes the numbers of its samples to a file that is open from beginning to end; at
    the end rank 0 collects them.
    """
    t = Training(trace)
    t.prepare()
    Path("rows").mkdir(exist_ok=True)
    with open(f"rows/{dist.get_rank()}.csv", "a") as log:
        for epoch in t.sampler.epochs(EPOCHS):
            for x, y, numbers in t.loader:
                log.writelines(f"{epoch},{number}\n" for number in numbers.tolist())
                t.train_batch(epoch, x, y, numbers)
            log.write(f"end of {epoch}\n" if t.main else "")
    dist.barrier()
    if t.main:
        lines = [line for file in Path("rows").iterdir() for line in file.read_text().splitlines()]
        append("rows.txt", "\n".join(sorted(lines)))
    t.end()


def slow_ranks(trace: Trace) -> None:
    """All ranks but rank 0 are slow in the last step of an epoch, after its collective, and in the
    code after it, where each rank evaluates a part.
    """
    t = Training(trace)
    t.prepare()

    def after_step() -> None:
        if not t.main and t.sampler.position + 2 * BATCH > SAMPLES:
            time.sleep(0.2)

    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, after_step)
        if not t.main:
            time.sleep(0.2)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def batch_ramp(trace: Trace) -> None:
    """The global batch grows from epoch to epoch."""
    t = Training(trace)
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        t.sampler.set_global_batch_size(BATCH + 2 * epoch)
        t.train_epoch(epoch)
        trace.note("evaluation", epoch, loss=evaluate(t.model), batch=t.sampler.global_batch_size)
    t.end()


def batch_of_next_epoch(trace: Trace) -> None:
    """The global batch of the next epoch is set in a step of the second epoch."""
    t = Training(trace)
    t.prepare()

    def after_step() -> None:
        if (t.sampler.epoch, t.sampler.position) == (1, BATCH):
            t.sampler.set_global_batch_size(9)

    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, after_step)
        trace.note("evaluation", epoch, loss=evaluate(t.model), batch=t.sampler.global_batch_size)
    t.end()
