"""Scripts of public reports about rates and states that are moved by each step or forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler

import malletrain
from tests.zoo.scripts import live, plain
from tests.zoo.scripts.parts import EPOCHS, evaluate, rate
from tests.zoo.trace import Trace


def _with_tensor_rate(t: Any) -> lr_scheduler.LRScheduler:
    t.optimizer = torch.optim.Adam(t.model.parameters(), lr=torch.tensor(0.05))
    return lr_scheduler.ExponentialLR(t.optimizer, gamma=0.9)


def tensor_rate(trace: Trace) -> None:
    """The rate is a tensor, which the schedule moves in place after each step."""
    t = plain.Training(trace)
    scheduler = _with_tensor_rate(t)
    t.prepare(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, scheduler.step)
    t.end()


def tensor_rate_live(trace: Trace) -> None:
    """The same in live mode."""
    t = live.Training(trace)
    scheduler = _with_tensor_rate(t)
    t.begin(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, scheduler.step)
    t.end()


def _cyclic(t: Any) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CyclicLR(
        t.optimizer, 0.01, 0.1, step_size_up=3, scale_fn=lambda cycle: 0.8**cycle
    )


def cyclic(trace: Trace) -> None:
    """CyclicLR with a function, which moves the momentum as well (pytorch#88684)."""
    t = plain.Training(trace)
    scheduler = _cyclic(t)
    t.prepare(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, scheduler.step)
        trace.note("momentum", epoch, value=float(t.optimizer.param_groups[0]["momentum"]))
    t.end()


def cyclic_live(trace: Trace) -> None:
    """The same in live mode."""
    t = live.Training(trace)
    scheduler = _cyclic(t)
    t.begin(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, scheduler.step)
        trace.note("momentum", epoch, value=float(t.optimizer.param_groups[0]["momentum"]))
    t.end()


def _normalize(model: Any) -> None:
    nn.utils.parametrizations.spectral_norm(model[0])


def spectral(trace: Trace) -> None:
    """Spectral normalization: each forward pass moves the vectors of its power iteration."""
    t = plain.Training(trace)
    _normalize(t.model)
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.1, momentum=0.9)
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        t.model.eval()
        trace.note("evaluation", epoch, loss=evaluate(t.model))
        t.model.train()
    t.model.eval()
    t.end()


def spectral_live(trace: Trace) -> None:
    """The same in live mode."""
    t = live.Training(trace)
    _normalize(t.model)
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.1, momentum=0.9)
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        t.model.eval()
        trace.note("evaluation", epoch, loss=evaluate(t.model))
        t.model.train()
    t.model.eval()
    t.end()


class _Overflowing(torch.autograd.Function):
    """Whose gradient is infinite where the sample 7 is in the batch."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None


def skipped_schedule(trace: Trace) -> None:
    """The schedule moves only if the scaler made the update (pytorch-lightning#5558)."""
    t = plain.Training(trace)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    scheduler = lr_scheduler.ExponentialLR(t.optimizer, gamma=0.9)
    t.prepare(scaler=scaler, scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.loader:
            t.optimizer.zero_grad()
            loss = mse_loss(t.net(x), y) * t.sampler.loss_weight
            factor = float("inf") if 7 in numbers.tolist() else 1.0
            scaler.scale(_Overflowing.apply(loss, factor)).backward()
            scaler.step(t.optimizer)
            before = scaler.get_scale()
            scaler.update()
            lr = rate(t.optimizer)
            if scaler.get_scale() >= before:
                scheduler.step()
            trace.step((epoch, t.sampler.position), numbers, lr, scale=scaler.get_scale())
            t.sampler.advance()
            malletrain.report(len(x))
            t.snapshot.step()
    t.end()
