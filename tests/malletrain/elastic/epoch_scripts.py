"""The code of the workers of test_epoch_end.py: a live training with code after the steps of each
epoch, as people write it.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import malletrain.elastic as elastic
from malletrain import ElasticSampler
from malletrain.elastic import membership
from tests.malletrain.elastic.gates import wait_at_gate
from tests.malletrain.elastic.scripts import data
from tests.waiting import NEVER_S

STEPS, EPOCHS, BATCH = 4, 3, 16
LOOKS = 3
"""At the evaluation, by who looks for a hang."""


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.005)


def train(folder: str, options: dict[str, Any]) -> None:
    """Three epochs of four steps, a scheduler that makes a step an epoch, and an evaluation over
    all ranks. ``gates``: before the step of that number it waits for a file ``go-NUMBER``. With
    ``evaluates_until`` the evaluation of epoch 0 waits for that file on rank 0. With
    ``lost_before_row`` rank 0 of the first round is killed before it notes the evaluation of that
    epoch.
    """
    membership.LAST_RESORT_S = options.get("last_resort_s", membership.LAST_RESORT_S)
    set_ = data(STEPS * BATCH)
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    sampler = ElasticSampler(len(set_), global_batch_size=BATCH, seed=5)
    run = elastic.Run(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    net = run.ddp(model)
    loader = DataLoader(set_, batch_sampler=sampler)
    log = Path(folder, f"events-{os.getpid()}")

    def note(**record: Any) -> None:
        with log.open("a") as file:
            file.write(json.dumps({**record, "rank": run.rank, "size": run.world_size}) + "\n")

    in_collective = membership._in_collective  # noqa: SLF001 (each look at it is noted)
    looks = itertools.count(1)

    def noted_look(thread: int) -> bool:
        if next(looks) == LOOKS:  # what follows is not limited: the machine may be slow
            membership.LAST_RESORT_S = NEVER_S
        note(kind="watched")
        return in_collective(thread)

    membership._in_collective = noted_look  # noqa: SLF001
    for epoch in sampler.epochs(EPOCHS):
        for x, y, numbers in run.batches(loader):
            number = run.steps_done
            if number in options.get("gates", ()):
                note(kind="gate", number=number)
                wait_at_gate(Path(folder, f"go-{number}"), run)
            with run.step() as step:
                optimizer.zero_grad()
                (((net(x) - y) ** 2).mean() * run.loss_weight).backward()
                optimizer.step()
            if not step.aborted:
                note(
                    kind="step",
                    epoch=epoch,
                    rate=optimizer.param_groups[0]["lr"],
                    samples=numbers.tolist(),
                )
        note(kind="evaluates", epoch=epoch)
        if epoch == 0 and run.rank == 0 and "evaluates_until" in options:
            _wait_for(Path(folder, options["evaluates_until"]))
        # As many float64 values as the library's own exchange of a step has: a sum of both would
        # be wrong without a word.
        ranks = torch.ones(9, dtype=torch.float64)
        if run.world_size > 1 and not options.get("alone"):
            dist.all_reduce(ranks)
        if (epoch, run.rank, run.generation) == (options.get("lost_before_row"), 0, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        note(kind="evaluated", epoch=epoch, sums=ranks.tolist())
        scheduler.step()
    note(
        kind="end",
        weights=model.weight.detach().flatten().tolist(),
        rate=optimizer.param_groups[0]["lr"],
    )


COLLECTIVES: dict[str, Callable[[], Any]] = {
    "allreduce as large as the exchange of a step": lambda: dist.all_reduce(
        torch.ones(12, dtype=torch.float64)
    ),
    "allreduce of a model": lambda: dist.all_reduce(torch.ones(5000)),
    "broadcast": lambda: dist.broadcast(torch.ones(3), 0),
    "barrier": dist.barrier,
    "all_gather_object": lambda: dist.all_gather_object([None] * dist.get_world_size(), "mine"),
}


def own_collective(folder: str, options: dict[str, Any]) -> None:
    """A training whose script calls a collective at its top. A process that joins calls it alone.
    The steps exchange no gradients.
    """
    run = elastic.Run(model=torch.nn.Linear(8, 1))
    if run.world_size > 1:
        COLLECTIVES[options["collective"]]()
    for _ in run.steps(1 << 30):
        with run.step(samples=1):
            time.sleep(0.005)
        Path(folder, "trains").touch()
