"""Restart mode: optimizers, several models, and what else follows the weights."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import malletrain
from tests.zoo.scripts.parts import BATCH, EPOCHS, SAMPLES, Numbered, evaluate, make_model, rate
from tests.zoo.scripts.plain import Training
from tests.zoo.trace import Trace


def ema(trace: Trace) -> None:
    """An exponential moving average of the weights, evaluated after each epoch."""
    t = Training(trace)
    average = torch.optim.swa_utils.AveragedModel(
        t.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    t.prepare(average=average)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, after_step=lambda: average.update_parameters(t.model))
        trace.note("evaluation", epoch, loss=evaluate(average))
    t.end()


def swa(trace: Trace) -> None:
    """Stochastic weight averaging: the average moves once an epoch."""
    t = Training(trace)
    average = torch.optim.swa_utils.AveragedModel(t.model)
    t.prepare(average=average)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        if epoch >= 1:
            average.update_parameters(t.model)
        trace.note("average", epoch, models=int(average.n_averaged), loss=evaluate(average))
    t.end()


def grad_scaler(trace: Trace) -> None:
    """A GradScaler whose scale grows every three steps, and clipping."""
    t = Training(trace)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    t.prepare(scaler=scaler)
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.loader:
            t.optimizer.zero_grad()
            loss = mse_loss(t.net(x), y) * t.sampler.loss_weight
            scaler.scale(loss).backward()
            scaler.unscale_(t.optimizer)
            nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
            scaler.step(t.optimizer)
            scaler.update()
            trace.step(
                (epoch, t.sampler.position), numbers, rate(t.optimizer), scale=scaler.get_scale()
            )
            t.sampler.advance()
            malletrain.report(len(x))
            t.snapshot.step()
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def accumulation(trace: Trace) -> None:
    """Two micro-batches a step; 22 samples in batches of 4 leave a tail in the last step."""
    t = Training(trace)
    t.sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=4)
    t.loader = DataLoader(Numbered(), batch_sampler=t.sampler)
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        taken, samples, total = 0, [], len(t.loader)
        for number, (x, y, numbers) in enumerate(t.loader):
            if not taken:
                t.optimizer.zero_grad()
                count = min(2, total - number)
            (mse_loss(t.net(x), y) * t.sampler.loss_weight / count).backward()
            taken, samples = taken + 1, samples + numbers.tolist()
            if taken < count:
                continue
            t.optimizer.step()
            trace.step((epoch, t.sampler.position), samples, rate(t.optimizer))
            t.sampler.advance(batches=taken)
            malletrain.report(len(samples))
            t.snapshot.step()
            taken, samples = 0, []
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def lbfgs(trace: Trace) -> None:
    """LBFGS, whose closure is called several times a step."""
    t = Training(trace)
    t.optimizer = torch.optim.LBFGS(t.model.parameters(), lr=0.1, max_iter=3)
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.loader:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                t.optimizer.zero_grad()
                loss = mse_loss(t.net(x), y) * t.sampler.loss_weight
                loss.backward()
                whole = loss.detach().clone()  # LBFGS decides by it: the same on all ranks
                dist.all_reduce(whole)
                return whole / dist.get_world_size()

            t.optimizer.step(closure)
            trace.step((epoch, t.sampler.position), numbers, rate(t.optimizer))
            t.sampler.advance()
            malletrain.report(len(x))
            t.snapshot.step()
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def sam(trace: Trace) -> None:
    """Sharpness-aware minimization: two passes a step, the first at moved weights."""
    t = Training(trace)
    t.prepare()
    parameters = list(t.model.parameters())
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.loader:
            t.optimizer.zero_grad()
            (mse_loss(t.net(x), y) * t.sampler.loss_weight).backward()
            with torch.no_grad():
                moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in parameters]
                for parameter, move in zip(parameters, moves, strict=True):
                    parameter.add_(move)
            t.optimizer.zero_grad()
            trace.point("climbed")
            (mse_loss(t.net(x), y) * t.sampler.loss_weight).backward()
            with torch.no_grad():
                for parameter, move in zip(parameters, moves, strict=True):
                    parameter.sub_(move)
            t.optimizer.step()
            trace.step((epoch, t.sampler.position), numbers, rate(t.optimizer))
            t.sampler.advance()
            t.snapshot.step()
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def gan(trace: Trace) -> None:
    """Two networks with an optimizer each, updated in turn."""
    dist.init_process_group("gloo")
    generator, critic = make_model(1), nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1)).double()
    moves = torch.optim.Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.9))
    judges = torch.optim.RMSprop(critic.parameters(), lr=0.01)
    sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH)
    loader = DataLoader(Numbered(), batch_sampler=sampler)
    snapshot = malletrain.Snapshot(
        "gan.pt",
        every_s=trace.save_every_s,
        generator=generator,
        critic=critic,
        moves=moves,
        judges=judges,
        sampler=sampler,
    )
    snapshot.restore()
    make, judge = DistributedDataParallel(generator), DistributedDataParallel(critic)
    for epoch in sampler.epochs(EPOCHS):
        for x, y, numbers in loader:
            judges.zero_grad()
            wrong = judge(make(x).detach()).mean() - judge(y).mean()
            (wrong * sampler.loss_weight).backward()
            judges.step()
            moves.zero_grad()
            (-critic(make(x)).mean() * sampler.loss_weight).backward()
            moves.step()
            trace.step((epoch, sampler.position), numbers, rate(moves))
            sampler.advance()
            malletrain.report(len(x))
            snapshot.step()
        trace.note("images", epoch, value=evaluate(generator))
    snapshot.save()
    dist.destroy_process_group()
    trace.finish(generator, critic)


def group_added(trace: Trace) -> None:
    """The last layer is trained from the beginning, the first one joins in epoch 1."""
    t = Training(trace)
    t.optimizer = torch.optim.Adam(t.model[2].parameters(), lr=0.05)
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        if epoch >= 1 and len(t.optimizer.param_groups) == 1:
            t.optimizer.add_param_group({"params": list(t.model[0].parameters()), "lr": 0.01})
        t.train_epoch(epoch)
        trace.note("groups", epoch, count=len(t.optimizer.param_groups))
    t.end()


def frozen(trace: Trace) -> None:
    """The first layer is frozen from epoch 1."""
    t = Training(trace)
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        if epoch >= 1:
            t.model[0].requires_grad_(False)
            t.net = DistributedDataParallel(t.model)
        t.train_epoch(epoch)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def compiled(trace: Trace) -> None:
    """torch.compile around the model, DDP around that."""
    t = Training(trace)
    t.prepare()
    t.net = DistributedDataParallel(torch.compile(t.model, backend="eager"))
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def teacher(trace: Trace) -> None:
    """A target network that takes the weights of the model after each epoch."""
    t = Training(trace)
    target = copy.deepcopy(t.model)
    t.prepare(target=target)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        target.load_state_dict(t.model.state_dict())
        trace.note("target", epoch, loss=evaluate(target))
    t.end()
