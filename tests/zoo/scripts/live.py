"""Live mode: trainings with malletrain.elastic, as people write them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import malletrain
from malletrain import elastic
from tests.zoo.scripts.parts import (
    BATCH,
    EPOCHS,
    SAMPLES,
    Numbered,
    append,
    evaluate,
    make_model,
    rate,
)
from tests.zoo.trace import Trace


class Training:
    """The trainer class of a small project: a step, an end."""

    def __init__(self, trace: Trace, **facts: Any) -> None:
        self.trace = trace
        self.model = make_model()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.1, momentum=0.9
        )
        self.sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH)
        self.loader = DataLoader(Numbered(), batch_sampler=self.sampler)
        self.facts = {"best": 1e9, "bad": 0, **facts}

    def begin(self, **more: Any) -> None:
        """Join the run, and wrap the model."""
        self.run = elastic.Run(
            snapshot="run.pt",
            snapshot_every_s=self.trace.save_every_s,
            model=self.model,
            optimizer=self.optimizer,
            sampler=self.sampler,
            facts=self.facts,
            **more,
        )
        self.net = self.run.ddp(self.model)

    def train_epoch(self, epoch: int, in_step: Callable[[], None] = lambda: None) -> None:
        """The steps that are left of an epoch."""
        for x, y, numbers in self.run.batches(self.loader):
            self.train_batch(epoch, x, y, numbers, in_step)
        self.trace.point(f"tail of {epoch}")

    def train_batch(
        self,
        epoch: int,
        x: Any,
        y: Any,
        numbers: Any,
        in_step: Callable[[], None] = lambda: None,
    ) -> None:
        """One step."""
        key = (epoch, self.sampler.position)
        with self.run.step() as step:
            self.optimizer.zero_grad()
            loss = mse_loss(self.net(x), y) * self.run.loss_weight
            loss.backward()
            self.optimizer.step()
            lr = rate(self.optimizer)
            in_step()
        if not step.aborted:
            self.trace.step(key, numbers, lr)

    def end(self) -> None:
        """Save, write the results."""
        self.run.save()
        self.trace.point("saved")
        if self.run.rank == 0:
            append("result.txt", f"{evaluate(self.model):.6f}")
            self.trace.note("results", "end")
        self.trace.point("written")
        self.trace.finish(self.model)


def epoch_scheduler(trace: Trace) -> None:
    """StepLR on all ranks and an evaluation by rank 0, once an epoch."""
    t = Training(trace)
    scheduler = lr_scheduler.StepLR(t.optimizer, step_size=1, gamma=0.5)
    t.begin(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        scheduler.step()
        trace.note("scheduler", epoch, lr=rate(t.optimizer))
        if t.run.rank == 0:
            append("log.csv", f"{epoch},{evaluate(t.model):.8f}")
            trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def warm_up(trace: Trace) -> None:
    """A warm-up by step, the scheduler within the step."""
    t = Training(trace)
    scheduler = lr_scheduler.LambdaLR(t.optimizer, lambda step: min(1.0, (step + 1) / 6))
    t.begin(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, scheduler.step)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def one_cycle(trace: Trace) -> None:
    """OneCycleLR over all steps."""
    t = Training(trace)
    scheduler = lr_scheduler.OneCycleLR(t.optimizer, max_lr=0.2, total_steps=EPOCHS * 4 + 1)
    t.begin(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, scheduler.step)
    t.end()


def plateau(trace: Trace) -> None:
    """ReduceLROnPlateau by an evaluation that every rank makes."""
    t = Training(trace)
    scheduler = lr_scheduler.ReduceLROnPlateau(t.optimizer, factor=0.5, patience=0, threshold=0.5)
    t.begin(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        scheduler.step(evaluate(t.model))
        trace.note("plateau", epoch, lr=rate(t.optimizer))
    t.end()


def evaluation_together(trace: Trace) -> None:
    """Each rank evaluates its part: a collective of the script after each epoch."""
    t = Training(trace)
    t.begin()
    test = Numbered(9, 4)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        part = slice(t.run.rank, None, t.run.world_size)
        with torch.no_grad():
            errors = (t.model(test.inputs[part]) - test.targets[part]) ** 2
        totals = torch.tensor([float(errors.sum()), float(len(errors))], dtype=torch.float64)
        if t.run.world_size > 1:
            dist.all_reduce(totals)
        trace.note("evaluation", epoch, loss=float(totals[0] / totals[1]))
    t.end()


def ema(trace: Trace) -> None:
    """An exponential moving average of the weights."""
    t = Training(trace)
    average = torch.optim.swa_utils.AveragedModel(
        t.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    t.begin(average=average)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, lambda: average.update_parameters(t.model))
        trace.note("evaluation", epoch, loss=evaluate(average))
    t.end()


def swa(trace: Trace) -> None:
    """Stochastic weight averaging: the average moves once an epoch."""
    t = Training(trace)
    average = torch.optim.swa_utils.AveragedModel(t.model)
    t.begin(average=average)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        average.update_parameters(t.model)
        trace.note("average", epoch, models=int(average.n_averaged), loss=evaluate(average))
    t.end()


def grad_scaler(trace: Trace) -> None:
    """A GradScaler whose scale grows every three steps, and clipping."""
    t = Training(trace)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    t.begin(scaler=scaler)
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.run.batches(t.loader):
            key = (epoch, t.sampler.position)
            with t.run.step() as step:
                t.optimizer.zero_grad()
                scaler.scale(mse_loss(t.net(x), y) * t.run.loss_weight).backward()
                scaler.unscale_(t.optimizer)
                nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
                scaler.step(t.optimizer)
                scaler.update()
                scale = scaler.get_scale()
            if not step.aborted:
                trace.step(key, numbers, rate(t.optimizer), scale=scale)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def accumulation(trace: Trace) -> None:
    """Two micro-batches a step; 22 samples in batches of 4 leave a tail in the last step."""
    t = Training(trace)
    t.sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=4)
    t.loader = DataLoader(Numbered(), batch_sampler=t.sampler)
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS):
        for batches in t.run.batches(t.loader, accumulate=2):
            key, samples = (epoch, t.sampler.position), []
            with t.run.step() as step:
                t.optimizer.zero_grad()
                for x, y, numbers in step.micro(batches):
                    (mse_loss(t.net(x), y) * t.run.loss_weight).backward()
                    samples += numbers.tolist()
                t.optimizer.step()
            if not step.aborted:
                trace.step(key, samples, rate(t.optimizer))
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def slow_ranks(trace: Trace) -> None:
    """All ranks but rank 0 are slow in the last step of an epoch and in the code after it, where
    each rank evaluates.
    """
    t = Training(trace)
    t.begin()

    def in_step() -> None:
        if t.run.rank and t.sampler.position + 2 * BATCH > SAMPLES:
            time.sleep(0.2)

    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, in_step)
        if t.run.rank:
            time.sleep(0.2)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def sam(trace: Trace) -> None:
    """Sharpness-aware minimization: two passes a step, the first at moved weights."""
    t = Training(trace)
    t.begin()
    parameters = list(t.model.parameters())
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.run.batches(t.loader):
            key = (epoch, t.sampler.position)
            with t.run.step() as step:
                t.optimizer.zero_grad()
                (mse_loss(t.net(x), y) * t.run.loss_weight).backward()
                with torch.no_grad():
                    moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in parameters]
                    for parameter, move in zip(parameters, moves, strict=True):
                        parameter.add_(move)
                t.optimizer.zero_grad()
                trace.point("climbed")
                (mse_loss(t.net(x), y) * t.run.loss_weight).backward()
                with torch.no_grad():
                    for parameter, move in zip(parameters, moves, strict=True):
                        parameter.sub_(move)
                t.optimizer.step()
            if not step.aborted:
                trace.step(key, numbers, rate(t.optimizer))
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def closure(trace: Trace) -> None:
    """``optimizer.step(closure)``, torch's own idiom, with SGD."""
    t = Training(trace)
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.run.batches(t.loader):
            key = (epoch, t.sampler.position)
            with t.run.step() as step:

                def loss_of(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                    t.optimizer.zero_grad()
                    loss = mse_loss(t.net(x), y) * t.run.loss_weight
                    loss.backward()
                    return loss

                t.optimizer.step(loss_of)
            if not step.aborted:
                trace.step(key, numbers, rate(t.optimizer))
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def gan(trace: Trace) -> None:
    """Two networks with an optimizer each, updated in turn within a step."""
    generator, critic = make_model(1), nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1)).double()
    moves = torch.optim.Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.9))
    judges = torch.optim.RMSprop(critic.parameters(), lr=0.01)
    sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH)
    loader = DataLoader(Numbered(), batch_sampler=sampler)
    run = elastic.Run(
        snapshot="gan.pt",
        snapshot_every_s=trace.save_every_s,
        generator=generator,
        critic=critic,
        moves=moves,
        judges=judges,
        sampler=sampler,
    )
    for epoch in sampler.epochs(EPOCHS):
        for x, y, numbers in run.batches(loader):
            key = (epoch, sampler.position)
            with run.step() as step:
                judges.zero_grad()
                wrong = critic(generator(x).detach()).mean() - critic(y).mean()
                (wrong * run.loss_weight).backward()
                run.average_gradients(critic)
                judges.step()
                moves.zero_grad()
                (-critic(generator(x)).mean() * run.loss_weight).backward()
                run.average_gradients(generator)
                moves.step()
            if not step.aborted:
                trace.step(key, numbers, rate(moves))
        trace.note("images", epoch, value=evaluate(generator))
    run.save()
    trace.finish(generator, critic)


def frozen(trace: Trace) -> None:
    """The first layer is frozen from epoch 1."""
    t = Training(trace)
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS):
        if epoch >= 1:
            t.model[0].requires_grad_(False)
        t.train_epoch(epoch)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()
