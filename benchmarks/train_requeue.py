"""The training of benchmarks/requeue.py for Slurm alone: plain DDP over the tasks of a job, and a
checkpoint when the job is to leave.

The tasks agree at the end of each step whether one of them was signalled. Then the first one saves,
and all end; the batch script requeues the job.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

SIGNALS: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _: SIGNALS.append(number))  # before torch is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from benchmarks.requeue_training import (  # noqa: E402
    BATCH,
    SAMPLES,
    Digits,
    StepLog,
    arguments,
    network,
)
from malletrain import ElasticSampler  # noqa: E402


def is_leaving(world: int) -> bool:
    """Whether a task of the job was signalled. All tasks get the same answer."""
    if world == 1:
        return bool(SIGNALS)
    signalled = torch.tensor(len(SIGNALS))
    dist.all_reduce(signalled)
    return bool(signalled)


def save(path: Path, **objects: Any) -> None:
    """Write a checkpoint in place of the former one."""
    new = path.with_suffix(".new")
    torch.save({name: each.state_dict() for name, each in objects.items()}, new)
    os.replace(new, path)


def main() -> None:
    args = arguments(__doc__)
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    attempt = f"{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', 0)}"
    model, optimizer = network()
    sampler = ElasticSampler(
        SAMPLES,
        batch_size=BATCH,
        shuffle=False,
        rank=rank,
        world_size=world,
        max_world_size=world,
    )
    saved = {"model": model, "optimizer": optimizer, "sampler": sampler}
    path = args.checkpoints / f"{args.training}.pt"
    if path.exists():
        for name, state in torch.load(path, weights_only=True).items():
            saved[name].load_state_dict(state)
    net: torch.nn.Module = model
    if world > 1:
        store = (args.checkpoints / f"store-{attempt}").as_uri()
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        net = DistributedDataParallel(model)
    digits, log = Digits(args.folder), StepLog(args.folder, args.training, args.step_s)
    saved_at = time.monotonic()
    for _ in sampler.epochs(1):
        for samples in sampler:
            log.begin(sampler.position)
            optimizer.zero_grad()
            digits.loss(net, samples).backward()
            log.wait_for_accelerator()
            optimizer.step()
            sampler.advance()
            log.end(world)
            leaving = is_leaving(world)
            due = time.monotonic() >= saved_at + args.checkpoint_every_s
            if rank == 0 and (leaving or due):
                save(path, **saved)
                saved_at = time.monotonic()
            if leaving:
                return


if __name__ == "__main__":
    main()
