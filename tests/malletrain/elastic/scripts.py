"""The code of the workers of these tests: small trainings that record their steps. Module-level, so
that a fork can find them.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import malletrain.elastic as elastic
from malletrain import ElasticSampler
from malletrain.elastic import group, membership
from tests.malletrain.elastic.gates import wait_at_gate

# A worker that stands still for a while is neither lost nor beyond help.
group.CONNECT_TIMEOUT_S, membership.LAST_RESORT_S = 60.0, 120.0


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 8, generator=generator)
    return TensorDataset(x, (x.sum(1, keepdim=True) > 0).float(), torch.arange(samples))


def model_of(kind: str) -> torch.nn.Module:
    torch.manual_seed(1)
    middle = {
        "dropout": torch.nn.Dropout(0.1),
        "norm": torch.nn.BatchNorm1d(16),
        "tanh": torch.nn.Tanh(),
    }[kind]
    return torch.nn.Sequential(torch.nn.Linear(8, 16), middle, torch.nn.Linear(16, 1))


def train(folder: str, options: dict[str, Any]) -> None:
    """Epochs over numbered samples. Every committed step is a line of JSON in the worker's own
    file. ``gates``: before these steps it waits for a file ``go-STEP``.
    """
    set_ = data(options.get("samples", 400))
    model = model_of(options.get("kind", "tanh"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
    sampler = ElasticSampler(len(set_), global_batch_size=options.get("batch", 16), seed=5)
    snapshot = options.get("snapshot")
    run = elastic.Run(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        sampler=sampler,
        snapshot=snapshot and os.path.join(folder, snapshot),
        snapshot_every_s=options.get("every_s", 3600.0),
    )
    net = run.ddp(model)
    loader = DataLoader(set_, batch_sampler=sampler)
    log = os.open(
        os.path.join(folder, f"steps-{os.getpid()}"), os.O_WRONLY | os.O_APPEND | os.O_CREAT
    )
    losses = torch.nn.functional.binary_cross_entropy_with_logits
    for epoch in sampler.epochs(options.get("epochs", 1)):
        for taken in run.batches(loader, accumulate=options.get("accumulate", 1)):
            batches = [taken] if options.get("accumulate", 1) == 1 else taken
            with run.step() as step:
                optimizer.zero_grad()
                total, seen = 0.0, []
                for x, y, numbers in step.micro(batches):
                    loss = losses(net(x), y) * run.loss_weight
                    loss.backward()
                    total += float(loss.detach())
                    seen += numbers.tolist()
                optimizer.step()
                scheduler.step()
                time.sleep(options.get("sleep", 0.0))
            if step.aborted:
                continue
            record = {
                "step": run.steps_done - 1,
                "epoch": epoch,
                "seen": seen,
                "loss": total,
                "rank": step.rank,
                "size": step.world_size,
                "generation": step.generation,
            }
            if options.get("digest"):
                record["digest"] = run.digest()
            os.write(log, json.dumps(record).encode() + b"\n")
            if run.steps_done in options.get("gates", ()):
                wait_at_gate(Path(folder, f"go-{run.steps_done}"), run)
            if Path(folder, "stop").exists():
                run.request_stop()
    run.save()


def differing(folder: str, width: int) -> None:
    model = torch.nn.Linear(4, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = elastic.Run(model=model, optimizer=optimizer)
    net = run.ddp(model)
    for _ in run.steps(100000):
        with run.step(samples=1):
            optimizer.zero_grad()
            net(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            time.sleep(0.01)


class Stubborn:
    """State that no other process can be given."""

    def state_dict(self) -> dict[str, Any]:
        return {"function": lambda: None}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def unsendable(folder: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = elastic.Run(model=model, optimizer=optimizer, odd=Stubborn())
    for _ in run.steps(100000):
        with run.step(samples=1):
            time.sleep(0.01)


def behind(folder: str) -> None:
    """Rank 1 gives up step 10 after the gradients were exchanged, as if the connection had broken
    right then.
    """
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = elastic.Run(model=model, optimizer=optimizer)
    net = run.ddp(model)
    received = 0
    for number in run.steps(30):
        with run.step(samples=1):
            optimizer.zero_grad()
            net(torch.full((1, 4), float(number))).sum().backward()
            if number == 10 and run.rank == 1 and run.generation == 1:
                received = 1
                raise RuntimeError("gloo: Connection closed by peer")
            optimizer.step()
    updates = float(optimizer.state[model.weight]["step"])
    result = {
        "digest": run.digest(),
        "steps": run.steps_done,
        "updates": updates,
        "received": received,
    }
    Path(folder, f"end-{os.getpid()}").write_text(json.dumps(result))


def between(folder: str) -> None:
    """Two networks, whose gradients are exchanged together; in step 10 the peer is lost between
    their two updates.
    """
    torch.manual_seed(0)
    nets = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]
    run = elastic.Run(one=nets[0], two=nets[1], first=optimizers[0], second=optimizers[1])
    for number in run.steps(30):
        with run.step(samples=1) as step:
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad()
                net(torch.full((1, 4), float(number))).sum().backward()
            for net in nets:
                run.average_gradients(net)
            optimizers[0].step()
            if number == 10 and step.world_size > 1:
                Path(folder, f"between-{step.rank}").touch()
                while not run.membership.group.broken:
                    time.sleep(0.001)
            optimizers[1].step()
    updates = [
        float(optimizer.state[net.weight]["step"])
        for net, optimizer in zip(nets, optimizers, strict=True)
    ]
    Path(folder, "end").write_text(json.dumps({"steps": run.steps_done, "updates": updates}))


def precise(folder: str) -> None:
    """bf16 autocast, a GradScaler in the state, a compiled model, several modules, and the learning
    rate by the linear rule.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    compiled = torch.compile(model, backend="eager")
    head = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    sampler = ElasticSampler(100000, batch_size=4)
    run = elastic.Run(
        model=compiled,
        head=head,
        optimizer=optimizer,
        scaler=scaler,
        sampler=sampler,
        extra={"seen": 0},
    )
    net, top = run.ddp(compiled), run.ddp(head)
    rates: list[float] = []
    run.on_change(elastic.lr_linear(optimizer, base_batch=4))
    run.on_change(lambda run: rates.append(optimizer.param_groups[0]["lr"]))
    loader = DataLoader(data(100000), batch_sampler=sampler)
    for _ in sampler.epochs(1):
        for x, y, _numbers in run.batches(loader):
            with run.step():
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = torch.nn.functional.mse_loss(top(net(x)).float(), y) * run.loss_weight
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                time.sleep(0.005)
            if Path(folder, "stop").exists():
                run.request_stop()
    parameters = torch.cat(
        [p.detach().reshape(-1) for p in (*model.parameters(), *head.parameters())]
    )
    result = {
        "rates": rates,
        "sum": float(parameters.double().sum()),
        "scale": scaler.get_scale(),
        "steps": run.steps_done,
    }
    Path(folder, f"end-{os.getpid()}").write_text(json.dumps(result))


def compiled(folder: str) -> None:
    """A model compiled by inductor, before this process says that it is ready."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    faster = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(4, 8)
    run = elastic.Run(model=faster, optimizer=optimizer, warmup=lambda: faster(x).sum().backward())
    net = run.ddp(faster)
    for _ in run.steps(1 << 30):
        with run.step(samples=4):
            optimizer.zero_grad()
            (net(x) ** 2).mean().backward()
            optimizer.step()
            time.sleep(0.005)
        if Path(folder, "stop").exists():
            run.request_stop()
    Path(folder, f"end-{os.getpid()}").write_text(
        json.dumps({"digest": run.digest(), "steps": run.steps_done, "size": run.world_size})
    )
