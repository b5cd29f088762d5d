"""The same training as benchmarks/train_step.py in live mode, with the same arguments and lines.
STEPS_FILE.parts gets a JSON object for each change of the group.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

import malletrain.elastic as elastic


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=float, default=10.0)
    parser.add_argument("--steps-file", required=True)
    parser.add_argument("--snapshot", required=True)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    width = 512
    layers = max(1, round(args.mb * 1e6 / 4 / width / width))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    model.to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.ones(2, width, device=args.device)
    run = elastic.Run(
        model=model,
        optimizer=optimizer,
        snapshot=args.snapshot,
        snapshot_every_s=3600.0,
        device=args.device,
        warmup=lambda: model(batch).sum().backward(),
    )
    net = run.ddp(model)
    parts = os.open(args.steps_file + ".parts", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @run.on_change
    def write_parts(run: elastic.Run) -> None:
        if run.rank == 0:
            os.write(parts, json.dumps(run.change_parts).encode() + b"\n")

    stop = Path(args.steps_file + ".stop")
    log = os.open(args.steps_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for step in run.steps(1 << 60):
        with run.step(samples=2):
            optimizer.zero_grad()
            net(batch).sum().backward()
            optimizer.step()
            time.sleep(args.step_s)
            # written inside the step, so with the group that did it
            if run.rank == 0:
                os.write(log, f"{time.time():.6f} {step + 1} {run.world_size}\n".encode())
            if stop.exists():
                run.request_stop()


if __name__ == "__main__":
    main()
