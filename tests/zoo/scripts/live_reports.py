"""Live mode: loops of public bug reports of other projects, as their users write them."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import malletrain
from malletrain import elastic
from tests.zoo.scripts.live import Training
from tests.zoo.scripts.parts import BATCH, EPOCHS, SAMPLES, Numbered, evaluate, rate
from tests.zoo.scripts.reports import Annealed, GradualWarmup, ModelEma
from tests.zoo.scripts.state_reports import Contrast, ScheduleFree
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


def drawn(trace: Trace) -> None:
    """Mixing by numpy, a scale by random, noise by torch (Megatron-Bridge#5257)."""
    random.seed(5)
    np.random.seed(5)
    t = Training(trace)
    torch.manual_seed(5)
    test = DataLoader(Numbered(9, 4), batch_size=4)
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.run.batches(t.loader):
            key = (epoch, t.sampler.position)
            with t.run.step() as step:
                share = float(np.random.beta(0.4, 0.4))
                scale = random.choice([0.5, 1.0, 1.5])
                noise = float(torch.rand(()))
                t.optimizer.zero_grad()
                loss = mse_loss(t.net(x * scale + 0.1 * noise) * share, y)
                (loss * t.run.loss_weight).backward()
                t.optimizer.step()
            if not step.aborted:
                trace.step(key, numbers, rate(t.optimizer), share=share, scale=scale, noise=noise)
        with torch.no_grad():
            losses = [float(mse_loss(t.model(x), y)) for x, y, _ in test]
        trace.note("evaluation", epoch, loss=sum(losses))
    t.end()


def schedule_free(trace: Trace) -> None:
    """An optimizer with a mode for training and one for evaluation (schedule_free#22, #48)."""
    t = Training(trace)
    t.optimizer = ScheduleFree(t.model.parameters())
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS):
        t.optimizer.train()
        t.train_epoch(epoch)
        t.optimizer.eval()
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def contrast(trace: Trace) -> None:
    """MoCo, batches of one size (moco#99)."""
    t = Training(trace)
    t.sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH, drop_last=True)
    t.loader = DataLoader(Numbered(), batch_sampler=t.sampler)
    t.model = Contrast()
    t.optimizer = torch.optim.SGD(t.model.query.parameters(), lr=0.1, momentum=0.9)
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS):
        for x, _, numbers in t.run.batches(t.loader):
            key = (epoch, t.sampler.position)
            with t.run.step() as step:
                t.optimizer.zero_grad()
                loss = t.net(x)
                trace.point("forward")
                (loss * t.run.loss_weight).backward()
                t.optimizer.step()
                lr = rate(t.optimizer)
            if not step.aborted:
                trace.step(key, numbers, lr, place=int(t.model.place))
    t.run.save()
    trace.finish(t.model)


def optimizers_in_list(trace: Trace) -> None:
    """Two optimizers and their schedulers in lists, as with Muon (speculators#1066); each has a
    name of its own in the run.
    """
    t = Training(trace)
    layers = list(t.model.parameters())
    optimizers = [
        torch.optim.SGD([p for p in layers if p.ndim == 2], lr=0.1, momentum=0.95, nesterov=True),
        torch.optim.AdamW([p for p in layers if p.ndim < 2], lr=0.05),
    ]
    schedulers = [lr_scheduler.StepLR(o, 2, 0.7) for o in optimizers]
    run = elastic.Run(
        snapshot="run.pt",
        snapshot_every_s=trace.save_every_s,
        model=t.model,
        sampler=t.sampler,
        **{f"optimizer{i}": one for i, one in enumerate(optimizers)},
        **{f"scheduler{i}": one for i, one in enumerate(schedulers)},
    )
    net = run.ddp(t.model)
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in run.batches(t.loader):
            key = (epoch, t.sampler.position)
            with run.step() as step:
                t.model.zero_grad()
                (mse_loss(net(x), y) * run.loss_weight).backward()
                lr, other = rate(optimizers[0]), rate(optimizers[1])
                for o, s in zip(optimizers, schedulers, strict=True):
                    o.step()
                    s.step()
            if not step.aborted:
                trace.step(key, numbers, lr, other=other)
    run.save()
    trace.finish(t.model)
