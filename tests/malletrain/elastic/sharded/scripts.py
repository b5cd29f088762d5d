"""The code of the workers of these tests: a small sharded training that records its steps."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import malletrain.elastic as elastic
from malletrain import ElasticSampler
from malletrain.elastic.errors import Interrupted
from malletrain.elastic.group import Group
from malletrain.elastic.sharded import copies, moving, sharing
from tests.malletrain.elastic.gates import wait_at_gate
from tests.malletrain.elastic.scripts import data

RATE = 0.01


class Net(torch.nn.Module):
    """Sizes that no number of ranks divides, one row fewer than there are ranks, and a buffer that
    no state dict has.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = torch.nn.Linear(8, 13), torch.nn.Linear(13, 1)
        self.register_buffer("scale", torch.full((13,), 1.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number a sample."""
        return self.last(torch.tanh(self.first(x)) * self.scale)


def parallelize(model: Net, mesh: Any) -> None:
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=RATE)


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)


def loss_of(answers: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(answers, y)


def sampler_of(options: dict[str, Any], **more: Any) -> ElasticSampler:
    return ElasticSampler(options["samples"], global_batch_size=12, seed=5, **more)


def alone(options: dict[str, Any]) -> list[float]:
    """The losses of an undisturbed run of one process that knows nothing of all this."""
    set_, model = data(options["samples"]), Net()
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    sampler = sampler_of(options, rank=0, world_size=1)
    losses = []
    for _ in sampler.epochs(1):
        for x, y, _numbers in DataLoader(set_, batch_sampler=sampler):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            sampler.advance()
    return losses


def train(folder: str, options: dict[str, Any], fault: str = "", joins: bool = False) -> None:
    """An epoch. Every step that counts is a line of JSON in the worker's own file. ``gates``:
    before these steps it waits for a file ``go-STEP``. ``crawl``: 20 ms so many times a step until
    there is a file ``go``. ``holds``: (generation, step) in which it waits for the loss of a peer.
    ``late``: (rank, step) to which the word
    does not come that all have their gradients. ``behind``: (rank, step) that does not make the
    update after so many in the first round, and waits for the loss of a peer. ``asks``: for a hash
    before the loop, too, and rank 0 alone saves after it. ``fault``: where a process dies at the
    next change, with ``joins`` as a joiner.
    """
    if fault and joins:
        die_at(fault)
    set_ = data(options["samples"])
    sampler = sampler_of(options)
    center = torch.zeros(1)
    facts: dict[str, Any] = {"seen": 0, "center": center}
    run = elastic.Run(
        build=Net,
        parallelize=parallelize,
        optimizer=optimizer_of,
        scheduler=scheduler_of,
        sampler=sampler,
        facts=facts,
        snapshot=options.get("snapshot") and f"{folder}/run.pt",
        snapshot_every_s=3600.0,
        **options.get("run", {}),
    )
    early = [run.save()] if options.get("snapshot") else []
    if "asks" in options:
        try:
            run.digest()
        except elastic.ElasticError as error:
            early.append(str(error))
    if "late" in options:
        miss_the_word(*options["late"])
    model, optimizer = run.model, run.optimizer
    if "behind" in options:
        stay_behind(run, *options["behind"])
    first, began = next(model.parameters()), run.generation
    loader = DataLoader(set_, batch_sampler=sampler)
    log = os.open(f"{folder}/steps-{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for _ in sampler.epochs(1):
        for x, y, numbers in run.batches(loader):
            with run.step() as step:
                optimizer.zero_grad()
                loss = loss_of(model(x), y) * run.loss_weight
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                hold(run, options)
                if options.get("slow"):
                    time.sleep(options["slow"])
                for _ in range(options.get("crawl", 0)):
                    if not Path(folder, "go").exists():
                        time.sleep(0.02)
                optimizer.step()
                run.scheduler.step()
                facts["seen"] += step.global_samples
            if step.aborted:
                continue
            record = {
                "step": run.steps_done - 1,
                "epoch": 0,
                "seen": numbers.tolist(),
                "loss": loss.item(),
                "rank": step.rank,
                "size": step.world_size,
                "generation": step.generation,
                "moved": run.change_bytes,
                "facts": facts["seen"],
            }
            os.write(log, json.dumps(record).encode() + b"\n")
            center.fill_(run.steps_done)
            if fault and not joins and run.steps_done in options["gates"]:
                die_at(fault)
            if run.steps_done in options.get("gates", ()):
                wait_at_gate(Path(folder, f"go-{run.steps_done}"), run)
            if Path(folder, "stop").exists():
                run.request_stop()
    center.fill_(run.steps_done)  # another rank may have finished the last step for this one
    end = {
        "digest": run.digest(),
        "has_center": facts["center"] is center,
        "steps": run.steps_done,
        "facts": facts["seen"],
        "early": early,
        "old_bytes": first.to_local().untyped_storage().nbytes() if run.generation > began else 0,
    }
    Path(folder, f"end-{os.getpid()}").write_text(json.dumps(end))
    if "asks" in options and run.rank == 0:  # where all should
        run.save()


def hold(run: elastic.Run, options: dict[str, Any]) -> None:
    """Wait for the loss of a peer in the step that ``options["holds"]`` names, (generation, step),
    so that the training does not end before the loss.
    """
    if (run.generation, run.steps_done) == options.get("holds"):
        while not run.membership.group.broken:
            time.sleep(0.005)


def stay_behind(run: elastic.Run, rank: int, done: int) -> None:
    """Let ``rank`` learn of the loss of a peer just before the update after ``done`` steps, which
    the other ranks have made.
    """

    def hear(*_: Any) -> None:
        if (run.generation, run.rank, run.steps_done) == (1, rank, done):
            while not run.membership.group.broken:
                time.sleep(0.005)
            raise Interrupted("A peer is lost.")

    run.optimizer.register_step_pre_hook(hear)


def miss_the_word(rank: int, step: int) -> None:
    """Have ``rank`` lose its peers at the moment at which all ranks have agreed on ``step``."""
    agree, agreements = Group.agree, []

    def interrupted(group: Group) -> None:
        agree(group)
        agreements.append(group)
        if group.place.rank == rank and len(agreements) == step:
            group.broken = True
            raise Interrupted("A peer is lost.")

    Group.agree = interrupted  # type: ignore[method-assign]


FAULTS = {
    "when leavers hand over": (sharing, "hand_over"),
    "before pieces move": (moving, "carry_out"),
    "before all have theirs": (Group, "agree"),
    "before copies are renewed": (copies, "exchange"),
}
"""Points of a change, in their order, and what is called there."""


def die_at(point: str) -> None:
    """Have this process killed when it comes to ``point``."""
    home, name = FAULTS[point]
    setattr(home, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
