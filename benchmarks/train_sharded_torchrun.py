"""The training of benchmarks/sharded.py as written without MalleTrain: FSDP2, AdamW, plain
torchrun, checkpoints by torch.distributed.checkpoint. All ranks save every
``--checkpoint-every-s``. When a file CHECKPOINT.end exists, they save once more and end: an
immediate reaction to a request to leave.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

# imported first, so that reads of this import do not count as reads of the state
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peers_training import Log
from benchmarks.sharded_training import (
    BATCH,
    LR,
    SAMPLES,
    Facts,
    arguments,
    build,
    fill,
    forget_peak,
    loss_of,
    memory,
    read_so_far,
    shard,
)


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint; its name is the number of its step."""
    whole = [path.parent for path in folder.glob("*/.metadata")]
    return max(whole, key=lambda path: int(path.name), default=None)


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the shards of every rank."""
    states, moments = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": moments}, checkpoint_id=folder / str(step))


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read the shards that every rank has in the present layout."""
    states, moments = get_state_dict(model, optimizer)
    dcp.load({"model": states, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=moments)


def main() -> None:
    args = arguments(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    facts, log = Facts(args.folder), Log(args.folder)
    forget_peak()
    before = memory("VmRSS")
    model = shard(build(args.width, args.layers), init_device_mesh("cpu", (world,)))
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    folder, end = Path(args.checkpoint), Path(args.checkpoint + ".end")
    began, read, busy = time.monotonic(), read_so_far(), time.process_time()
    snapshot, done = newest(folder), 0
    if snapshot:
        load(snapshot, model, optimizer)
        done = int(snapshot.name)
    else:
        fill(model)
    about: dict[str, Any] = {
        "rank": rank,
        "world": world,
        "seconds": time.monotonic() - began,
        "cpu": time.process_time() - busy,
        "moved": read_so_far() - read,
        "peak": memory("VmHWM") - before,
    }
    facts.write("restored" if snapshot else "begun", **about)
    saved = time.monotonic()
    # the loss, and from rank 0 whether to save and whether to end
    flags = torch.zeros(3)
    for step in range(done + 1, SAMPLES // BATCH + 1):
        samples = list(range((step - 1) * BATCH + rank, step * BATCH, world))
        log.draw(step, world, rank, samples)
        optimizer.zero_grad()
        loss = loss_of(model, samples) * (len(samples) * world / BATCH)
        loss.backward()
        time.sleep(args.step_s)
        optimizer.step()
        log.done(step, world, rank)
        leave = rank == 0 and end.exists()
        due = leave or (rank == 0 and time.monotonic() - saved > args.checkpoint_every_s)
        flags.copy_(torch.stack([loss.detach(), torch.tensor(due), torch.tensor(leave)]))
        dist.all_reduce(flags)
        if rank == 0:
            facts.write("loss", step=step, loss=flags[0].item() / world)
        if flags[1]:
            save(folder, step, model, optimizer)
            saved = time.monotonic()
        if flags[2]:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
