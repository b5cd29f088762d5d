"""The training script of benchmarks/rescale.py: a DDP model of a given size that records every step
with its time. Runs under torchrun and under MalleTrain. Arguments: --mb (parameters in MB),
--steps-file FILE (one line per step: time, step, world size), --step-s (sleep per step, so that the
machine is not saturated), --snapshot FILE, --device DEVICE. Stops when FILE.stop exists.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import malletrain


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=float, default=10.0)
    parser.add_argument("--steps-file", required=True)
    parser.add_argument("--snapshot", required=True)
    parser.add_argument("--memory", action="store_true", help="snapshots in memory first")
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    width = 512
    layers = max(1, round(args.mb * 1e6 / 4 / width / width))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    model.to(args.device)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    state = {"step": 0}
    snapshot = malletrain.Snapshot(
        args.snapshot, every_s=3600.0, memory=args.memory, model=model, progress=state
    )
    snapshot.restore()
    stop = Path(args.steps_file + ".stop")
    log = (
        os.open(args.steps_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if dist.get_rank() == 0
        else -1
    )
    batch = torch.ones(2, width, device=args.device)
    agreed = torch.zeros(1)
    while not agreed.item():
        optimizer.zero_grad()
        ddp(batch).sum().backward()
        optimizer.step()
        state["step"] += 1
        time.sleep(args.step_s)
        if log >= 0:
            os.write(log, f"{time.time():.6f} {state['step']} {dist.get_world_size()}\n".encode())
        malletrain.report(2)
        snapshot.step()
        agreed.fill_(float(stop.exists()))
        dist.all_reduce(agreed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
