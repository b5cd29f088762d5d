"""The training of benchmarks/sharded.py in live mode: FSDP2 by ``build`` and ``parallelize``."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

# imported first, so that reads of this import do not count as reads of the state
import torch._dynamo
import torch.distributed.checkpoint.state_dict
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import malletrain.elastic as elastic
from benchmarks.peers_training import Log
from benchmarks.sharded_training import (
    BATCH,
    LR,
    SAMPLES,
    Decoder,
    Facts,
    arguments,
    fill,
    forget_peak,
    loss_of,
    memory,
    shard,
)
from malletrain import ElasticSampler


def made(width: int, layers: int) -> Decoder:
    """Return the model with its initial values."""
    model = Decoder(width, layers)
    if not any(parameter.is_meta for parameter in model.parameters()):
        fill(model)
    return model


def shard_bytes(run: elastic.Run) -> int:
    """Return the bytes of this rank's shards of the model and the optimizer."""
    states = run.optimizer.state_dict()["state"].values()
    tensors = [*run.model.parameters(), *(t for state in states for t in state.values())]
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local)


def main() -> None:
    args = arguments(__doc__)
    torch.set_num_threads(1)
    sampler = ElasticSampler(
        SAMPLES, global_batch_size=BATCH, shuffle=False, max_world_size=args.max_ranks
    )
    loader: DataLoader[int] = DataLoader(
        range(SAMPLES),
        batch_sampler=sampler,
        collate_fn=list,
    )
    before = memory("VmRSS")
    options: dict[str, Any] = {
        "build": partial(made, args.width, args.layers),
        "parallelize": shard,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=LR),
        "sampler": sampler,
        "snapshot": args.checkpoint,
        "snapshot_every_s": args.checkpoint_every_s,
    }
    if args.replicate_every:
        options["replicate_every"] = args.replicate_every
    run = elastic.Run(**options)
    facts, log = Facts(args.folder), Log(args.folder)
    # Memory beside the shards at the beginning of a change belongs to the training.
    rest = before
    generation, ended, usual = 0, 0.0, 0.0

    @run.on_change
    def tell(run: elastic.Run) -> None:
        facts.write(
            "restored",
            rank=run.rank,
            world=run.world_size,
            seconds=sum(run.change_parts.values()),
            parts=run.change_parts,
            moved=run.change_bytes,
            peak=memory("VmHWM") - rest,
        )

    for _ in sampler.epochs(1):
        for samples in run.batches(loader):
            began = time.thread_time()
            with run.step() as step:
                number = run.steps_done + 1
                log.draw(number, step.world_size, step.rank, samples)
                loss = loss_of(run.model, samples) * run.loss_weight
                loss.backward()
                time.sleep(args.step_s)
                run.optimizer.step()
                run.optimizer.zero_grad()
            if not step.aborted:
                log.done(number, step.world_size, step.rank)
                part = {"world": step.world_size, "rank": step.rank, "loss": loss.item()}
                facts.write("part of loss", step=number, **part)
            del loss
            now = time.thread_time()
            if generation not in (0, step.generation):
                change = {"world": step.world_size, "rank": step.rank, "cpu": now - ended - usual}
                facts.write("changed", **change)
            generation, ended, usual = step.generation, now, now - began
            # From here on it is the peak of a change, if one follows.
            forget_peak()
            rest = memory("VmRSS") - shard_bytes(run)


if __name__ == "__main__":
    main()
