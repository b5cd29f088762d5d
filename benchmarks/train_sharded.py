"""The training of benchmarks/sharded.py in restart mode: FSDP2, AdamW, malletrain.Snapshot."""

from __future__ import annotations

import time
from typing import Any

import torch

# imported first, so that reads of this import do not count as reads of the state
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
from torch.distributed.device_mesh import init_device_mesh

import malletrain
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
    sampler = malletrain.ElasticSampler(
        SAMPLES, global_batch_size=BATCH, shuffle=False, max_world_size=args.max_ranks
    )
    options: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler}
    if args.memory:
        options |= {"memory": True, "replicate_every": args.replicate_every}
    snapshot = malletrain.Snapshot(args.checkpoint, every_s=args.checkpoint_every_s, **options)
    began, read, busy = time.monotonic(), read_so_far(), time.process_time()
    restored = snapshot.restore()
    if not restored:
        fill(model)
    facts.write(
        "restored" if restored else "begun",
        rank=rank,
        world=world,
        seconds=time.monotonic() - began,
        cpu=time.process_time() - busy,
        moved=read_so_far() - read,
        peak=memory("VmHWM") - before,
    )
    total = torch.zeros(())
    for _ in sampler.epochs(1):
        for samples in sampler:
            step = sampler.position // BATCH + 1
            log.draw(step, world, rank, samples)
            optimizer.zero_grad()
            loss = loss_of(model, samples) * sampler.loss_weight
            loss.backward()
            time.sleep(args.step_s)
            optimizer.step()
            log.done(step, world, rank)
            total.copy_(loss.detach())
            dist.all_reduce(total)
            if rank == 0:
                facts.write("loss", step=step, loss=total.item() / world)
            sampler.advance()
            malletrain.report(len(samples))
            snapshot.step()


if __name__ == "__main__":
    main()
