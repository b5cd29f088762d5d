"""The training script of benchmarks/soak.py: records every counted step, with its samples and a
hash of the state after it. Arguments: FOLDER (files ``steps-PID-TIME``, one JSON object per line;
ends when FOLDER/stop exists), --step-s (sleep per step).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import malletrain.elastic as elastic
from benchmarks.soak_account import BATCH, SAMPLES, SEED
from malletrain import ElasticSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--step-s", type=float, default=0.05)
    args = parser.parse_args()
    stack = open(os.path.join(args.folder, f"stack-{os.getpid()}"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(2))
    samples = TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(SAMPLES))
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sampler = ElasticSampler(SAMPLES, global_batch_size=BATCH, seed=SEED)
    loader = DataLoader(samples, batch_sampler=sampler)
    run = elastic.Run(
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        snapshot=os.path.join(args.folder, "snapshot"),
        snapshot_every_s=2.0,
    )
    net = run.ddp(model)
    log = os.open(
        os.path.join(args.folder, f"steps-{os.getpid()}-{time.time_ns()}"),
        os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    )
    stop = Path(args.folder, "stop")
    for epoch in sampler.epochs(1 << 30):
        for images, labels, numbers in run.batches(loader):
            with run.step() as step:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(net(images), labels) * run.loss_weight
                loss.backward()
                optimizer.step()
                time.sleep(args.step_s)
                if stop.exists():
                    run.request_stop()
            if not step.aborted:
                line = {
                    "step": run.steps_done,
                    "generation": step.generation,
                    "rank": step.rank,
                    "size": step.world_size,
                    "epoch": epoch,
                    "seen": numbers.tolist(),
                    "digest": run.digest(),
                    "samples": run.samples_done,
                }
                os.write(log, json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    main()
