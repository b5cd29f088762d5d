"""Restart mode: loops of public bug reports of other projects, as their users write them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import malletrain
from tests.zoo.scripts.parts import BATCH, EPOCHS, SAMPLES, Numbered, evaluate, make_model, rate
from tests.zoo.scripts.plain import Training
from tests.zoo.trace import Trace


def accumulation_by_length(trace: Trace) -> None:
    """A step every second batch and at ``len(loader)`` (transformers#22082)."""
    t = Training(trace)
    t.sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=4)
    t.loader = DataLoader(Numbered(), batch_sampler=t.sampler)
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        samples: list[int] = []
        taken = 0
        for i, (x, y, numbers) in enumerate(t.loader):
            (mse_loss(t.net(x), y) * t.sampler.loss_weight / 4).backward()
            samples, taken = samples + numbers.tolist(), taken + 1
            if (i + 1) % 4 == 0 or (i + 1) == len(t.loader):
                t.optimizer.step()
                t.optimizer.zero_grad()
                trace.step((epoch, t.sampler.position), samples, rate(t.optimizer))
                t.sampler.advance(batches=taken)
                malletrain.report(len(samples))
                t.snapshot.step()
                samples, taken = [], 0
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


class ModelEma(nn.Module):
    """An average whose decay warms up by a plain counter (yolov5#292, lightly-train#892)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.ema = copy.deepcopy(model).eval()
        self.updates = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = 0.9 * (1 - 2.718 ** (-self.updates / 5))
        for average, value in zip(self.ema.parameters(), model.parameters(), strict=True):
            average.mul_(decay).add_(value, alpha=1 - decay)


def ema_counter(trace: Trace) -> None:
    """The average's counter is a plain attribute of a module."""
    t = Training(trace)
    average = ModelEma(t.model)
    t.prepare(average=average)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, after_step=lambda: average.update(t.model))
        trace.note("evaluation", epoch, loss=evaluate(average.ema), updates=average.updates)
    t.end()


class GradualWarmup(lr_scheduler.LRScheduler):
    """A warm-up around another scheduler (pytorch-gradual-warmup-lr#27)."""

    def __init__(self, optimizer: Any, total: int, after: Any) -> None:
        self.total, self.after_scheduler, self.finished = total, after, False
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch > self.total:
            if not self.finished:
                self.after_scheduler.base_lrs = list(self.base_lrs)
                self.finished = True
            return self.after_scheduler.get_last_lr()
        return [base * (self.last_epoch + 1) / (self.total + 1) for base in self.base_lrs]

    def step(self, epoch: Any = None) -> None:
        if self.finished:
            self.after_scheduler.step()
            self._last_lr = self.after_scheduler.get_last_lr()
        else:
            super().step()


def warm_up_around(trace: Trace) -> None:
    """The state of a scheduler holds another scheduler, and that the optimizer."""
    t = Training(trace)
    after = lr_scheduler.CosineAnnealingLR(t.optimizer, T_max=9)
    scheduler = GradualWarmup(t.optimizer, 2, after)
    t.prepare(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, after_step=scheduler.step)
    t.end()


class UpdateScheduler:
    """Like timm's: no torch scheduler, told the number of updates, its state is its dict."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.updates = 0

    def step_update(self) -> None:
        self.updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * 0.9**self.updates

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def timm_like(trace: Trace) -> None:
    """A scheduler of timm's kind."""
    t = Training(trace)
    scheduler = UpdateScheduler(t.optimizer)
    t.prepare(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, after_step=scheduler.step_update)
    t.end()


def folds(trace: Trace) -> None:
    """Cross-validation in one script, a snapshot a fold."""
    dist.init_process_group("gloo")
    for fold in range(3):
        model = make_model(fold)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH, seed=fold)
        loader = DataLoader(Numbered(seed=fold), batch_sampler=sampler)
        snapshot = malletrain.Snapshot(
            f"fold{fold}.pt",
            every_s=trace.save_every_s,
            model=model,
            optimizer=optimizer,
            sampler=sampler,
        )
        snapshot.restore()
        net = DistributedDataParallel(model)
        for epoch in sampler.epochs(1):
            for x, y, numbers in loader:
                optimizer.zero_grad()
                (mse_loss(net(x), y) * sampler.loss_weight).backward()
                optimizer.step()
                trace.step((fold, epoch, sampler.position), numbers, rate(optimizer))
                sampler.advance()
                malletrain.report(len(x))
                snapshot.step()
        snapshot.save()
        trace.point(f"fold {fold}")
    dist.destroy_process_group()
    trace.finish(model)


class Annealed(nn.Module):
    """A model with a temperature that the loop lowers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        self.temperature = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x) / self.temperature
        return made


def annealed(trace: Trace) -> None:
    """A temperature in an attribute of the model, lowered each epoch."""
    t = Training(trace)
    t.model = Annealed()
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.1, momentum=0.9)
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        t.model.temperature *= 0.7
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def swa_with_update_bn(trace: Trace) -> None:
    """AveragedModel, and ``update_bn`` over all samples on each rank. The model is trained with its
    normalisation in eval mode, as in fine-tuning: batches of a rank have statistics of their own.
    """
    from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

    t = Training(trace)
    normalisation = nn.BatchNorm1d(5)
    t.model = nn.Sequential(nn.Linear(4, 5), normalisation, nn.Tanh(), nn.Linear(5, 1)).double()
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.1)
    average = AveragedModel(t.model)
    scheduler = SWALR(t.optimizer, swa_lr=0.02, anneal_epochs=2)
    t.prepare(average=average, scheduler=scheduler)
    normalisation.eval()
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        average.update_parameters(t.model)
        scheduler.step()
    update_bn(((x,) for x, *_ in DataLoader(Numbered(), batch_size=8)), average)
    t.end()
    trace.note("average", "end", mean=average.module[1].running_mean.tolist())
