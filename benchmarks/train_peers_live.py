"""The training of benchmarks/peers.py for MalleTrain's live mode."""

from __future__ import annotations

import math
import time

from torch.utils.data import DataLoader

import malletrain.elastic as elastic
from benchmarks.peers_training import BATCH, SAMPLES, Log, arguments, loss_of, network
from malletrain import ElasticSampler


def main() -> None:
    args = arguments(__doc__)
    model, optimizer = network(args.mb)
    sampler = ElasticSampler(
        SAMPLES, global_batch_size=BATCH, shuffle=False, max_world_size=args.max_ranks
    )
    loader: DataLoader[int] = DataLoader(
        range(SAMPLES),
        batch_sampler=sampler,
        collate_fn=list,
    )
    run = elastic.Run(
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        snapshot=args.checkpoint if math.isfinite(args.checkpoint_every_s) else None,
        snapshot_every_s=args.checkpoint_every_s,
        warmup=lambda: loss_of(model, [0]).backward(),
    )
    net = run.ddp(model)
    log = Log(args.folder)
    for _ in sampler.epochs(1):
        for samples in run.batches(loader):
            with run.step() as step:
                number = run.steps_done + 1
                log.draw(number, step.world_size, step.rank, samples)
                optimizer.zero_grad()
                loss_of(net, samples).backward()
                time.sleep(args.step_s)
                optimizer.step()
            if not step.aborted:
                log.done(number, step.world_size, step.rank)


if __name__ == "__main__":
    main()
