"""The training of benchmarks/requeue.py for MalleTrain's restart mode."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import malletrain
from benchmarks.requeue_training import BATCH, SAMPLES, Digits, StepLog, arguments, network


def main() -> None:
    args = arguments(__doc__)
    dist.init_process_group("gloo")
    model, optimizer = network()
    net = DistributedDataParallel(model)
    sampler = malletrain.ElasticSampler(
        SAMPLES, batch_size=BATCH, shuffle=False, max_world_size=args.max_ranks
    )
    snapshot = malletrain.Snapshot(
        args.checkpoints / f"{args.training}",
        every_s=args.checkpoint_every_s,
        model=model,
        optimizer=optimizer,
        sampler=sampler,
    )
    snapshot.restore()
    digits, log = Digits(args.folder), StepLog(args.folder, args.training, args.step_s)
    world = dist.get_world_size()
    for _ in sampler.epochs(1):
        for samples in sampler:
            log.begin(sampler.position)
            optimizer.zero_grad()
            digits.loss(net, samples).backward()
            log.wait_for_accelerator()
            optimizer.step()
            sampler.advance()
            log.end(world)
            malletrain.report(len(samples))
            snapshot.step()


if __name__ == "__main__":
    main()
