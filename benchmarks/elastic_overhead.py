"""What the wrapper of live mode costs an undisturbed run: the time of a step beside plain
DistributedDataParallel.

    python -m benchmarks.elastic_overhead [--ranks 2] [--steps 600] [--width 512] [--layers 10]
    [--device cuda] [--json]

Both run the same model, optimizer and data in the same processes, a step of the one after a step of
the other, so that what else the machine does hits both alike. Compared are the medians of wall
time, whose spread is that of ten equal parts of the run, and the sums of processor time over all
threads, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time

import torch
import torch.multiprocessing as mp

import malletrain.elastic as elastic

WARM_UP = 20


def _worker(rank: int, args: argparse.Namespace, port: int, results: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(args.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def network() -> torch.nn.Module:
        return torch.nn.Sequential(
            *(torch.nn.Linear(args.width, args.width) for _ in range(args.layers))
        ).to(args.device)

    def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-5)

    mine, theirs = network(), network()
    own = optimizer_of(mine)
    run = elastic.Run(model=mine, optimizer=own, device=args.device)
    net = run.ddp(mine)
    plain = torch.nn.parallel.DistributedDataParallel(theirs)
    optimizer = optimizer_of(theirs)
    batch = torch.ones(args.batch, args.width, device=args.device)

    def live() -> None:
        with run.step(samples=args.batch):
            own.zero_grad()
            net(batch).sum().backward()
            own.step()

    def ddp() -> None:
        optimizer.zero_grad()
        plain(batch).sum().backward()
        optimizer.step()

    turns: list[tuple[float, float, float, float]] = []
    for turn in range(WARM_UP + args.steps):
        took = {}
        for work in (live, ddp) if turn % 2 else (ddp, live):
            began, began_cpu = time.perf_counter(), time.process_time()
            work()
            if batch.is_cuda:
                torch.cuda.synchronize()
            took[work.__name__] = (time.perf_counter() - began, time.process_time() - began_cpu)
        if turn >= WARM_UP:
            turns.append((took["live"][0], took["ddp"][0], took["live"][1], took["ddp"][1]))
    if rank == 0:
        with open(results, "w") as file:
            json.dump(turns, file)


def main() -> None:
    """Run, and print a line and, with --json, one object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with socket.socket() as s, tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        s.close()
        mp.spawn(_worker, (args, port, file.name), nprocs=args.ranks)
        turns = json.load(file)
    live, ddp = (statistics.median(t[i] for t in turns) for i in (0, 1))
    parts = [turns[i::10] for i in range(10)]
    ratios = [
        statistics.median(t[0] for t in part) / statistics.median(t[1] for t in part) - 1
        for part in parts
    ]
    row = {
        "ranks": args.ranks,
        "model_mb": round(args.layers * args.width * (args.width + 1) * 4 / 1e6, 1),
        "live_ms": round(1e3 * live, 3),
        "ddp_ms": round(1e3 * ddp, 3),
        "overhead": round(live / ddp - 1, 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "cpu_overhead": round(sum(t[2] for t in turns) / sum(t[3] for t in turns) - 1, 4),
        "cpu_ms": [round(1e3 * statistics.fmean(t[i] for t in turns), 3) for i in (2, 3)],
        "load": os.getloadavg()[0],
    }
    if args.json:
        print(json.dumps(row))
    else:
        print(
            f"{row['model_mb']} MB on {args.ranks} ranks: live {row['live_ms']} ms, DDP "
            f"{row['ddp_ms']} ms a step, overhead "
            f"{row['overhead']:+.1%} ({min(ratios):+.1%}…{max(ratios):+.1%}), "
            f"processor time {row['cpu_overhead']:+.1%}, load {row['load']:.1f}"
        )


if __name__ == "__main__":
    main()
