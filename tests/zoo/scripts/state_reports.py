"""Restart mode: loops of public bug reports about what a script holds beside its model: generators
of random numbers, a second sampler, schedules of its own, a queue.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import malletrain
from tests.zoo.scripts.parts import BATCH, EPOCHS, SAMPLES, Numbered, evaluate, make_model, rate
from tests.zoo.scripts.plain import STEPS, Training
from tests.zoo.trace import Trace


def rebuilt_scheduler(trace: Trace) -> None:
    """The schedule is made anew from a counter after the restore (OneTrainer#1604)."""
    t = Training(trace, step=0)
    t.prepare()
    for group in t.optimizer.param_groups:
        group["initial_lr"] = 0.1
    scheduler = lr_scheduler.LambdaLR(
        t.optimizer, lambda step: 1 - step / (STEPS + 1), last_epoch=t.facts["step"] - 1
    )

    def after_step() -> None:
        scheduler.step()
        t.facts["step"] += 1

    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, after_step)
    t.end()


def drawn(trace: Trace) -> None:
    """Mixing by numpy, a scale by random, noise by torch, the same on all ranks; and an evaluation
    through a loader, which draws too (Megatron-Bridge#5257, pytorch#122697).
    """
    random.seed(5)
    np.random.seed(5)
    t = Training(trace)
    torch.manual_seed(5)
    test = DataLoader(Numbered(9, 4), batch_size=4)
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.loader:
            share = float(np.random.beta(0.4, 0.4))
            scale = random.choice([0.5, 1.0, 1.5])
            noise = float(torch.rand(()))
            t.optimizer.zero_grad()
            loss = mse_loss(t.net(x * scale + 0.1 * noise) * share, y)
            (loss * t.sampler.loss_weight).backward()
            t.optimizer.step()
            trace.step(
                (epoch, t.sampler.position),
                numbers,
                rate(t.optimizer),
                share=share,
                scale=scale,
                noise=noise,
            )
            t.sampler.advance()
            malletrain.report(len(x))
            t.snapshot.step()
        with torch.no_grad():
            losses = [float(mse_loss(t.model(x), y)) for x, y, _ in test]
        trace.note("evaluation", epoch, loss=sum(losses))
    t.end()


def two_loaders(trace: Trace) -> None:
    """Labelled samples go round beside the unlabelled ones (unsupervised-data-augmentation#3)."""
    t = Training(trace)
    few = malletrain.ElasticSampler(14, global_batch_size=BATCH, seed=5)
    labelled = DataLoader(Numbered(14, 9), batch_sampler=few)
    t.prepare(few=few)
    turn = iter(labelled)
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.loader:
            try:
                more_x, more_y, more = next(turn)
            except StopIteration:
                turn = iter(labelled)
                more_x, more_y, more = next(turn)
            t.optimizer.zero_grad()
            loss = mse_loss(t.net(x), y) * t.sampler.loss_weight
            loss.backward()
            (mse_loss(t.net(more_x), more_y) * few.loss_weight).backward()
            t.optimizer.step()
            samples = numbers.tolist() + (100 + more).tolist()
            trace.step((epoch, t.sampler.position), samples, rate(t.optimizer))
            few.advance()
            t.sampler.advance()
            malletrain.report(len(x))
            t.snapshot.step()
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule, as in facebookresearch/schedule_free."""

    def __init__(self, params: Any, lr: float = 0.3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            if group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])
                group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["beta"])
                group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("Optimizer was not in train mode when step is called.")
            group["k"] += 1
            part = 1 / group["k"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                p.lerp_(state["z"], part)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - part) - 1))
                state["z"].sub_(p.grad, alpha=group["lr"])


def schedule_free(trace: Trace) -> None:
    """An optimizer with a mode for training and one for evaluation (schedule_free#22, #48)."""
    t = Training(trace)
    t.optimizer = ScheduleFree(t.model.parameters())
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        t.optimizer.train()
        t.train_epoch(epoch)
        t.optimizer.eval()
        trace.note("evaluation", epoch, loss=evaluate(t.model))
        t.snapshot.save()
    t.end()


class Contrast(nn.Module):
    """A queue of keys of all ranks, and an encoder that follows (moco#99)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = make_model(1), make_model(1)
        for p in self.key.parameters():
            p.requires_grad = False
        generator = torch.Generator().manual_seed(8)
        self.register_buffer("queue", torch.randn(12, 1, generator=generator, dtype=torch.float64))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.query(x)
        with torch.no_grad():
            for k, q in zip(self.key.parameters(), self.query.parameters(), strict=True):
                k.mul_(0.7).add_(q, alpha=0.3)
            keys = self.key(x * 1.1)
            if dist.is_initialized():
                parts = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, keys)
            else:
                parts = [keys]
        loss = (made - keys) ** 2 - 0.1 * ((made - self.queue.clone().T) ** 2).tanh().mean(
            1, keepdim=True
        )
        with torch.no_grad():
            together = torch.cat(parts)
            place = int(self.place)
            self.queue[place : place + len(together)] = together
            self.place[0] = (place + len(together)) % 12
        return loss.mean()


def contrast(trace: Trace) -> None:
    """MoCo, batches of one size."""
    dist.init_process_group("gloo")
    model = Contrast()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1, momentum=0.9)
    sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH, drop_last=True)
    loader = DataLoader(Numbered(), batch_sampler=sampler)
    snapshot = malletrain.Snapshot(
        "run.pt", every_s=trace.save_every_s, model=model, optimizer=optimizer, sampler=sampler
    )
    snapshot.restore()
    net = DistributedDataParallel(model)
    for epoch in sampler.epochs(EPOCHS):
        for x, _, numbers in loader:
            optimizer.zero_grad()
            loss = net(x)
            trace.point("forward")
            (loss * sampler.loss_weight).backward()
            optimizer.step()
            trace.step((epoch, sampler.position), numbers, rate(optimizer), place=int(model.place))
            sampler.advance()
            malletrain.report(len(x))
            snapshot.step()
    snapshot.save()
    dist.destroy_process_group()
    trace.finish(model)


def optimizers_in_list(trace: Trace) -> None:
    """Two optimizers and their schedulers in lists, as with Muon (speculators#1066); each has a
    name of its own in the snapshot.
    """
    t = Training(trace)
    layers = list(t.model.parameters())
    optimizers = [
        torch.optim.SGD([p for p in layers if p.ndim == 2], lr=0.1, momentum=0.95, nesterov=True),
        torch.optim.AdamW([p for p in layers if p.ndim < 2], lr=0.05),
    ]
    schedulers = [lr_scheduler.StepLR(o, 2, 0.7) for o in optimizers]
    snapshot = malletrain.Snapshot(
        "run.pt",
        every_s=trace.save_every_s,
        model=t.model,
        sampler=t.sampler,
        **{f"optimizer{i}": one for i, one in enumerate(optimizers)},
        **{f"scheduler{i}": one for i, one in enumerate(schedulers)},
    )
    snapshot.restore()
    net = DistributedDataParallel(t.model)
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.loader:
            t.model.zero_grad()
            (mse_loss(net(x), y) * t.sampler.loss_weight).backward()
            lr, other = rate(optimizers[0]), rate(optimizers[1])
            for o, s in zip(optimizers, schedulers, strict=True):
                o.step()
                s.step()
            trace.step((epoch, t.sampler.position), numbers, lr, other=other)
            t.sampler.advance()
            malletrain.report(len(x))
            snapshot.step()
    snapshot.save()
    trace.finish(t.model)


def move_center(center: torch.Tensor, out: torch.Tensor) -> None:
    """Move ``center`` in place towards the mean of the outputs of all ranks."""
    sums = torch.cat([out.detach().sum(0), out.new_tensor([len(out)])])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
    center.mul_(0.9).add_(sums[:1] / sums[1], alpha=0.1)


def centered(trace: Trace) -> None:
    """A center that the script has as a variable, too (dino#188, vissl#436)."""
    t = Training(trace)
    center = torch.zeros(1, dtype=torch.float64)
    t.facts["center"] = center
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.loader:
            t.optimizer.zero_grad()
            out = t.net(x)
            (mse_loss(out - center, y) * t.sampler.loss_weight).backward()
            t.optimizer.step()
            move_center(center, out)
            key = (epoch, t.sampler.position)
            trace.step(key, numbers, rate(t.optimizer), center=float(center))
            t.sampler.advance()
            malletrain.report(len(x))
            t.snapshot.step()
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()
