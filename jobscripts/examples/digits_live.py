"""The same training as digits.py in live mode: nodes come and go without a process being started
again.

    malletrain submit --live --nodes 1:4 digits_live.py --snapshot
    torchrun --nproc-per-node 2 digits_live.py
    python digits_live.py

The network, the data and the result are those of digits.py, whose helpers it uses; what differs
from a plain DDP script is marked with "live". Under torchrun or plain python the same lines do what
DistributedDataParallel would.
"""

from __future__ import annotations

import time

import torch
from digits import accuracy, arguments, load_digits
from torch import nn
from torch.utils.data import DataLoader

import malletrain
import malletrain.elastic as elastic


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)  # the workers of a demo share a few cores
    torch.manual_seed(args.seed)
    train, test = load_digits()
    model = nn.Sequential(
        nn.Linear(64, args.hidden),
        nn.ReLU(),
        nn.Linear(args.hidden, args.hidden),
        nn.ReLU(),
        nn.Linear(args.hidden, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sampler = malletrain.ElasticSampler(
        len(train), global_batch_size=args.batch_size, seed=args.seed
    )
    loader = DataLoader(train, batch_sampler=sampler)
    run = elastic.Run(  # live: the state of the run, instead of init_process_group()
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        snapshot=args.snapshot,
        snapshot_every_s=args.snapshot_every,
    )
    net = run.ddp(model)  # live: instead of DistributedDataParallel(model)
    run.on_change(
        lambda run: print(f"training as rank {run.rank} of {run.world_size}", flush=True)
    )  # live

    for epoch in sampler.epochs(args.epochs):
        loss_sum, started = 0.0, time.monotonic()
        for images, labels in run.batches(loader):  # live
            with run.step() as step:  # live
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(net(images), labels) * run.loss_weight
                loss.backward()
                optimizer.step()
                time.sleep(args.step_delay + args.sample_delay * len(labels))
            if not step.aborted:
                loss_sum += float(loss.detach())
        if run.rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs} loss {loss_sum:.3f} in "
                f"{time.monotonic() - started:.1f} s",
                flush=True,
            )

    run.save()  # a run that is over stays over when it is started again
    if run.rank == 0:
        result = accuracy(model, test)
        malletrain.metric("accuracy", result)
        print(f"test accuracy {result:.4f}", flush=True)


if __name__ == "__main__":
    main()
