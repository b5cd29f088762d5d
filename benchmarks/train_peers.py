"""The training of benchmarks/peers.py for torchrun and MalleTrain's restart mode: plain DDP with a
checkpoint file.
"""

from __future__ import annotations

import time

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import malletrain
from benchmarks.peers_training import BATCH, SAMPLES, Log, arguments, loss_of, network


def main() -> None:
    args = arguments(__doc__)
    dist.init_process_group("gloo")
    model, optimizer = network(args.mb)
    net = DistributedDataParallel(model)
    sampler = malletrain.ElasticSampler(
        SAMPLES, global_batch_size=BATCH, shuffle=False, max_world_size=args.max_ranks
    )
    snapshot = malletrain.Snapshot(
        args.checkpoint,
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        every_s=args.checkpoint_every_s,
    )
    snapshot.restore()
    log = Log(args.folder)
    rank, world = dist.get_rank(), dist.get_world_size()
    for _ in sampler.epochs(1):
        for samples in sampler:
            step = sampler.position // BATCH + 1
            log.draw(step, world, rank, samples)
            optimizer.zero_grad()
            loss_of(net, samples).backward()
            time.sleep(args.step_s)
            optimizer.step()
            log.done(step, world, rank)
            sampler.advance()
            malletrain.report(len(samples))
            snapshot.step()


if __name__ == "__main__":
    main()
