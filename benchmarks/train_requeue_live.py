"""The training of benchmarks/requeue.py for MalleTrain's live mode."""

from __future__ import annotations

from torch.utils.data import DataLoader

import malletrain.elastic as elastic
from benchmarks.requeue_training import BATCH, SAMPLES, Digits, StepLog, arguments, network
from malletrain import ElasticSampler


def main() -> None:
    args = arguments(__doc__)
    model, optimizer = network()
    sampler = ElasticSampler(
        SAMPLES, batch_size=BATCH, shuffle=False, max_world_size=args.max_ranks
    )
    loader: DataLoader[int] = DataLoader(
        range(SAMPLES),
        batch_sampler=sampler,
        collate_fn=list,
    )
    digits = Digits(args.folder)
    run = elastic.Run(
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        snapshot=args.checkpoints / f"{args.training}",
        snapshot_every_s=args.checkpoint_every_s,
        warmup=lambda: digits.loss(model, [0]).backward(),
    )
    net = run.ddp(model)
    log = StepLog(args.folder, args.training, args.step_s)
    for _ in sampler.epochs(1):
        for samples in run.batches(loader):
            log.begin(sampler.position)
            with run.step() as step:
                optimizer.zero_grad()
                digits.loss(net, samples).backward()
                log.wait_for_accelerator()
                optimizer.step()
            log.end(step.world_size, aborted=step.aborted)


if __name__ == "__main__":
    main()
