"""The training of benchmarks/requeue.py on the tasks of a Slurm job: plain DDP, one process per
task. The caller decides what happens when the job has to leave.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.requeue_training import BATCH, SAMPLES, Digits, StepLog, network
from malletrain import ElasticSampler


def task() -> tuple[int, int]:
    """Return the number of this task of the job, and the number of tasks."""
    return int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])


def exact_sampler(rank: int, world: int) -> ElasticSampler:
    """Return the sampler of a job whose number of tasks never changes."""
    return ElasticSampler(
        SAMPLES,
        batch_size=BATCH,
        shuffle=False,
        rank=rank,
        world_size=world,
        max_world_size=world,
    )


class SlurmTraining:
    """A training that continues from its checkpoint, if there is one.

    Args:
        args: the arguments of the script.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank, self.world = task()
        model, self._optimizer = network()
        self._sampler = exact_sampler(self.rank, self.world)
        self._saved: dict[str, Any] = {
            "model": model,
            "optimizer": self._optimizer,
            "sampler": self._sampler,
        }
        self._path = args.checkpoints / f"{args.training}.pt"
        if self._path.exists():
            for name, state in torch.load(self._path, weights_only=True).items():
                self._saved[name].load_state_dict(state)
        self._net: torch.nn.Module = model
        if self.world > 1:
            attempt = (os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0"))
            store = (args.checkpoints / f"store-{'-'.join(attempt)}").as_uri()
            dist.init_process_group(
                "gloo", init_method=store, rank=self.rank, world_size=self.world
            )
            self._net = DistributedDataParallel(model)
        self._digits = Digits(args.folder)
        self._log = StepLog(args.folder, args.training, args.step_s)
        self._every_s, self._saved_at = args.checkpoint_every_s, time.monotonic()

    def steps(self) -> Iterator[None]:
        """Yield after each step."""
        for _ in self._sampler.epochs(1):
            for samples in self._sampler:
                self._log.begin(self._sampler.position)
                self._optimizer.zero_grad()
                self._digits.loss(self._net, samples).backward()
                self._log.wait_for_accelerator()
                self._optimizer.step()
                self._sampler.advance()
                self._log.end(self.world)
                yield

    def state(self) -> dict[str, Any]:
        """Return the state between two steps."""
        return {name: each.state_dict() for name, each in self._saved.items()}

    def is_checkpoint_due(self) -> bool:
        """Whether a new checkpoint is due."""
        return time.monotonic() >= self._saved_at + self._every_s

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint by a new one, if this is the first task."""
        if self.rank == 0:
            new = self._path.with_suffix(".new")
            torch.save(state, new)
            os.replace(new, self._path)
        self._saved_at = time.monotonic()
