"""Live mode: loops of public bug reports of other projects, as their users write them."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler

from tests.zoo.scripts.live import Training
from tests.zoo.scripts.parts import EPOCHS, evaluate, rate
from tests.zoo.scripts.reports import Annealed, GradualWarmup, ModelEma
from tests.zoo.trace import Trace


def ema_counter(trace: Trace) -> None:
    """The average's counter is a plain attribute of a module."""
    t = Training(trace)
    average = ModelEma(t.model)
    t.begin(average=average)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, lambda: average.update(t.model))
        trace.note("evaluation", epoch, loss=evaluate(average.ema), updates=average.updates)
    t.end()


def annealed(trace: Trace) -> None:
    """A temperature in an attribute of the model, lowered each step."""
    t = Training(trace)
    t.model = Annealed()
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.1, momentum=0.9)
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.run.batches(t.loader):
            key = (epoch, t.sampler.position)
            with t.run.step() as step:
                t.optimizer.zero_grad()
                t.model.temperature *= 0.95
                (mse_loss(t.net(x), y) * t.run.loss_weight).backward()
                t.optimizer.step()
            if not step.aborted:
                trace.step(key, numbers, rate(t.optimizer), temperature=t.model.temperature)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def warm_up_around(trace: Trace) -> None:
    """The state of a scheduler holds another scheduler, and that the optimizer."""
    t = Training(trace)
    after = lr_scheduler.CosineAnnealingLR(t.optimizer, T_max=9)
    scheduler = GradualWarmup(t.optimizer, 2, after)
    t.begin(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, scheduler.step)
    t.end()
