"""Live mode: models of which not every parameter is trained in every step, and optimizers with
several groups.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import malletrain
from tests.zoo.scripts.live import Training
from tests.zoo.scripts.parts import EPOCHS, SAMPLES, Numbered, append, evaluate, make_model, rate
from tests.zoo.trace import Trace


class TwoHeads(nn.Module):
    """A body, and two heads of which a forward pass uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model(1)[:2]
        self.heads = nn.ModuleList([make_model(2)[2], make_model(3)[2]])
        self.head = 0
        """Number of the head that is used; -1: both."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the head, or the sum of both."""
        body = self.body(x)
        heads = self.heads if self.head < 0 else [self.heads[self.head]]
        return torch.stack([head(body) for head in heads]).sum(0)


class Checkpointed(nn.Module):
    """A model that computes its first layers again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        layers = make_model(1)
        self.body, self.head = layers[:2], layers[2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layers do."""
        body: torch.Tensor = checkpoint(self.body, x, use_reentrant=False)
        return torch.as_tensor(self.head(body))


def _of(trace: Trace, model: nn.Module, **facts: object) -> Training:
    """A training of another model."""
    t = Training(trace, **facts)
    t.model = model  # type: ignore[assignment]
    t.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return t


def unfrozen(trace: Trace) -> None:
    """The first layer is frozen when the model is wrapped, and is trained from epoch 1."""
    t = Training(trace)
    t.model[0].requires_grad_(False)
    t.begin()
    t.net = t.run.ddp(t.model, find_unused_parameters=True)
    for epoch in t.sampler.epochs(EPOCHS):
        if epoch >= 1:
            t.model[0].requires_grad_(True)
        t.train_epoch(epoch)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def heads_in_turn(trace: Trace) -> None:
    """Each step trains one of two heads."""
    model = TwoHeads()
    t = _of(trace, model)
    t.begin()
    t.net = t.run.ddp(model, find_unused_parameters=True)
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.run.batches(t.loader):
            key = (epoch, t.sampler.position)
            with t.run.step() as step:
                model.head = t.run.steps_done % 2
                t.optimizer.zero_grad()
                (mse_loss(t.net(x), y) * t.run.loss_weight).backward()
                t.optimizer.step()
            if not step.aborted:
                trace.step(key, numbers, rate(t.optimizer))
        trace.note("evaluation", epoch, loss=evaluate(model))
    t.end()


def heads_by_micro_batch(trace: Trace) -> None:
    """Gradient accumulation whose first micro-batch trains another head than the last one."""
    model = TwoHeads()
    t = _of(trace, model)
    t.sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=4)
    t.loader = DataLoader(Numbered(), batch_sampler=t.sampler)
    t.begin()
    t.net = t.run.ddp(model, find_unused_parameters=True)
    for epoch in t.sampler.epochs(EPOCHS):
        for batches in t.run.batches(t.loader, accumulate=2):
            key, samples = (epoch, t.sampler.position), []
            with t.run.step() as step:
                t.optimizer.zero_grad()
                for number, (x, y, numbers) in enumerate(step.micro(batches)):
                    model.head = number
                    (mse_loss(t.net(x), y) * t.run.loss_weight).backward()
                    samples += numbers.tolist()
                t.optimizer.step()
            if not step.aborted:
                trace.step(key, samples, rate(t.optimizer))
        trace.note("evaluation", epoch, loss=evaluate(model))
    t.end()


def static_graph(trace: Trace) -> None:
    """A graph that does not change, and activations that are computed again."""
    model = Checkpointed()
    t = _of(trace, model)
    t.begin()
    t.net = t.run.ddp(model, static_graph=True)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        trace.note("evaluation", epoch, loss=evaluate(model))
    t.end()


def groups(trace: Trace) -> None:
    """Two groups with rates of their own, OneCycleLR with momentum over both."""
    t = Training(trace)
    body, head = t.model[0], t.model[2]
    t.optimizer = torch.optim.AdamW(
        [
            {"params": body.parameters(), "lr": 0.01, "weight_decay": 0.1},
            {"params": head.parameters(), "lr": 0.05},
        ]
    )
    scheduler = lr_scheduler.OneCycleLR(
        t.optimizer, max_lr=[0.02, 0.1], total_steps=EPOCHS * 4 + 1, cycle_momentum=True
    )
    t.begin(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, scheduler.step)
        rates = [float(group["lr"]) for group in t.optimizer.param_groups]
        betas = [float(group["betas"][0]) for group in t.optimizer.param_groups]
        trace.note("groups", epoch, rates=rates, betas=betas)
    t.end()


def warm_restarts(trace: Trace) -> None:
    """CosineAnnealingWarmRestarts, which is given the fraction of the epoch."""
    t = Training(trace)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(t.optimizer, T_0=1, T_mult=2)
    t.begin(scheduler=scheduler)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, lambda: scheduler.step(t.run.steps_done / 4))
        trace.note("scheduler", epoch, lr=rate(t.optimizer))
    t.end()


def overflow(trace: Trace) -> None:
    """The gradients of sample 7 overflow on the one rank that has it: no rank makes that update."""
    t = Training(trace)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    t.begin(scaler=scaler)
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.run.batches(t.loader):
            key = (epoch, t.sampler.position)
            with t.run.step() as step:
                t.optimizer.zero_grad()
                loss = mse_loss(t.net(x), y) * t.run.loss_weight
                if 7 in numbers.tolist():
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.step(t.optimizer)
                scaler.update()
                scale = scaler.get_scale()
            if not step.aborted:
                trace.step(key, numbers, rate(t.optimizer), scale=scale)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def averages_swapped_in(trace: Trace) -> None:
    """The averaged weights take the model's place in each evaluation, and the best are saved."""
    t = Training(trace)
    average = torch.optim.swa_utils.AveragedModel(
        t.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    t.begin(average=average)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, lambda: average.update_parameters(t.model))
        trained = {name: value.clone() for name, value in t.model.state_dict().items()}
        t.model.load_state_dict(average.module.state_dict())
        loss = evaluate(t.model)
        trace.note("evaluation", epoch, loss=loss)
        if loss < t.facts["best"]:
            t.facts["best"] = loss
            if t.run.rank == 0:
                append("best.txt", f"{epoch} {loss:.6f}")
                trace.note("best", epoch, loss=loss)
        t.model.load_state_dict(trained)
    t.end()
