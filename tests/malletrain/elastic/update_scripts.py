"""The code of the workers of test_updates.py: steps that pass through the group more than once, or
change the model before the optimizer does.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import malletrain.elastic as elastic
from malletrain import ElasticSampler
from tests.malletrain.elastic.sharded import scripts as sharded

SAMPLES, BATCH, EPOCHS = 48, 12, 3


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def optimizer_of(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "lbfgs":
        return torch.optim.LBFGS(
            model.parameters(), lr=0.2, max_iter=4, line_search_fn="strong_wolfe"
        )
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(folder: str, options: dict[str, Any]) -> None:
    """``kind``: ``lbfgs`` and ``sgd`` call optimizer.step(closure), ``sam`` makes two passes a
    step, the second at other weights, ``noise`` draws from torch's generator, ``twice`` two
    updates at rates that a scheduler changes between them, ``overflow`` has gradients that
    overflow in each fifth step. With ``dies_at`` rank 1 is killed in
    that pass of that step.
    With ``dies_after`` it is killed when it has made that step, before the step ends; the other
    rank notices that in the same place.
    ``notices``: that pass raises an error on the other rank when it knows of the loss.
    """
    kind, dies_at = options["kind"], options.get("dies_at")
    set_ = data()
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)
    ).double()
    optimizer = optimizer_of(kind, model)
    sampler = ElasticSampler(len(set_), global_batch_size=BATCH, seed=5)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    ended = {"updates": 0}
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    run = elastic.Run(
        model=model, optimizer=optimizer, rates=rates, ended=ended, sampler=sampler, scaler=scaler
    )
    net = run.ddp(model)
    passes = 0

    def loss_of(x: torch.Tensor, y: torch.Tensor, overflows: bool = False) -> torch.Tensor:
        nonlocal passes
        if dies_at == [run.steps_done, passes] and run.generation == 1:
            if run.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            while options.get("notices") and not run.membership.group.broken:
                time.sleep(0.001)
            if options.get("notices"):
                raise RuntimeError("gloo: Connection closed by peer")
        passes += 1
        optimizer.zero_grad()
        noise = float(torch.rand(())) if kind == "noise" else 0.0
        loss = ((net(x + noise) - y) ** 2).mean() * run.loss_weight
        if kind == "overflow":
            loss = scaler.scale(loss * (math.inf if overflows else 1.0))
        loss.backward()
        return loss

    for _ in sampler.epochs(EPOCHS):
        for x, y in run.batches(DataLoader(set_, batch_sampler=sampler)):
            passes = 0
            with run.step():
                if kind == "sam":
                    loss_of(x, y)
                    with torch.no_grad():
                        climbs = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in net.parameters()]
                        for p, climb in zip(model.parameters(), climbs, strict=True):
                            (p.data if options.get("by_data") else p).add_(climb)
                    loss_of(x, y)
                    with torch.no_grad():
                        for p, climb in zip(model.parameters(), climbs, strict=True):
                            (p.data if options.get("by_data") else p).sub_(climb)
                    optimizer.step()
                elif kind == "twice":
                    for _pass in range(2):
                        loss_of(x, y)
                        optimizer.step()
                        rates.step()
                        ended["updates"] += 1
                elif kind == "overflow":
                    loss_of(x, y, run.steps_done % 5 == 0)
                    scaler.step(optimizer)
                    scaler.update()
                    rates.step()
                    ended["updates"] += 1
                    if options.get("dies_after") == run.steps_done and run.generation == 1:
                        if run.rank == 1:
                            os.kill(os.getpid(), signal.SIGKILL)
                        while not run.membership.group.broken:
                            time.sleep(0.001)
                else:
                    optimizer.step(lambda x=x, y=y: loss_of(x, y))
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    weights += [optimizer.param_groups[0]["lr"], ended["updates"], scaler.get_scale()]
    result = {"weights": weights, "size": run.world_size, "steps": run.steps_done}
    Path(folder, f"end-{os.getpid()}").write_text(json.dumps(result))


def updates_twice_sharded(folder: str) -> None:
    """A sharded model with two updates in a step; the file ``refused`` gets the error."""
    run = elastic.Run(
        build=sharded.Net, parallelize=sharded.parallelize, optimizer=sharded.optimizer_of
    )
    x, y, _ = sharded.data(4)[:]
    try:
        with run.step():
            for _pass in range(2):
                run.optimizer.zero_grad()
                sharded.loss_of(run.model(x), y).backward()
                run.optimizer.step()
    except elastic.ElasticError as error:
        Path(folder, "refused").write_text(str(error))


def scheduler_replaced(folder: str) -> None:
    """A new scheduler in place of the one passed to the run; ``refused`` gets the error."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run = elastic.Run(model=model, optimizer=optimizer, scheduler=scheduler)
    net = run.ddp(model)
    try:
        for number in run.steps(6):
            if number == 3:
                scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            with run.step(samples=1):
                optimizer.zero_grad()
                net(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                scheduler.step()
    except elastic.ElasticError as error:
        Path(folder, "refused").write_text(f"{run.steps_done}: {error}")
