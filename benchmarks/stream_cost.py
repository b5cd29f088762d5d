"""Measures the cost of malletrain.ElasticStream in an undisturbed run: the duration of a step
beside a plain DataLoader that reads the same shards.

    python -m benchmarks.stream_cost [--ranks 2] [--workers 2] [--steps 300] [--batch 64] [--json]

Both read WebDataset-style tars of small images in loader processes, decode and collate them there,
and train the same model under DistributedDataParallel, with alternating steps in the same
processes. The plain one is an IterableDataset whose workers have a part of the shards each; it
records no position. A step is: the next batch, forward, backward, optimizer, and for the stream
advance() and state_dict(). Compared are medians of wall time, with the spread over ten equal parts
of the run, and the processor time of the training processes.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import socket
import statistics
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import malletrain
from malletrain.training.stream_sources import tar_records

WARM_UP = 20
SIDE = 32
SHARD = 512


def decode(record: dict[str, Any]) -> torch.Tensor:
    """Decode an image of bytes as numbers."""
    return torch.frombuffer(bytearray(record["raw"]), dtype=torch.uint8).float().div_(255)


class Plain(IterableDataset[torch.Tensor]):
    """Repeats the same records; each worker reads those of its own shards."""

    def __init__(self, shards: list[str], rank: int, world: int) -> None:
        self._shards, self._rank, self._world = shards, rank, world

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        first = self._rank + self._world * number
        for path in itertools.cycle(self._shards[first :: self._world * workers]):
            yield from map(decode, tar_records(path))


def _write(folder: str, shards: int) -> list[str]:
    paths = []
    for shard in range(shards):
        paths.append(f"{folder}/{shard:04}.tar")
        with tarfile.open(paths[-1], "w") as archive:
            for number in range(SHARD):
                entry = tarfile.TarInfo(f"{number:06}.raw")
                entry.size = SIDE * SIDE * 3
                archive.addfile(entry, io.BytesIO(os.urandom(entry.size)))
    return paths


def _worker(rank: int, args: argparse.Namespace, port: int, shards: list[str], out: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(args.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    models = [
        torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(
                torch.nn.Linear(3 * SIDE * SIDE, args.width),
                torch.nn.ReLU(),
                torch.nn.Linear(args.width, 10),
            )
        )
        for _ in range(2)
    ]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-5) for model in models]
    stream = malletrain.ElasticStream(
        shards, tar_records, decode=decode, batch_size=args.batch, num_workers=args.workers
    )
    endless = (batch for _ in stream.epochs(10**9) for batch in stream)
    plain = iter(
        DataLoader(Plain(shards, rank, args.ranks), batch_size=args.batch, num_workers=args.workers)
    )

    def train(number: int, batch: torch.Tensor) -> None:
        optimizers[number].zero_grad()
        models[number](batch).sum().backward()
        optimizers[number].step()

    def elastic() -> None:
        train(0, next(endless))
        stream.advance()
        stream.state_dict()

    def loader() -> None:
        train(1, next(plain))

    turns: list[tuple[float, ...]] = []
    for turn in range(WARM_UP + args.steps):
        took = {}
        for work in (elastic, loader) if turn % 2 else (loader, elastic):
            began, began_cpu = time.perf_counter(), time.process_time()
            work()
            took[work.__name__] = (time.perf_counter() - began, time.process_time() - began_cpu)
        if turn >= WARM_UP:
            turns.append((*took["elastic"], *took["loader"]))
    if rank == 0:
        Path(out).write_text(json.dumps(turns))


def main() -> None:
    """Run, and print a line and, with --json, one object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    each = args.ranks * args.batch
    count = (WARM_UP + args.steps + 20) * each // SHARD + 1
    with socket.socket() as s, tempfile.TemporaryDirectory() as folder:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        s.close()
        shards = _write(folder, max(count, 4 * args.ranks * args.workers))
        out = f"{folder}/turns.json"
        mp.spawn(_worker, (args, port, shards, out), nprocs=args.ranks)
        turns = json.loads(Path(out).read_text())
    elastic, loader = (statistics.median(t[i] for t in turns) for i in (0, 2))
    parts = [turns[i::10] for i in range(10)]
    ratios = [
        statistics.median(t[0] for t in part) / statistics.median(t[2] for t in part) - 1
        for part in parts
    ]
    row = {
        "ranks": args.ranks,
        "workers": args.workers,
        "stream_ms": round(1e3 * elastic, 3),
        "loader_ms": round(1e3 * loader, 3),
        "overhead": round(elastic / loader - 1, 4),
        "mean_overhead": round(sum(t[0] for t in turns) / sum(t[2] for t in turns) - 1, 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "cpu_overhead": round(sum(t[1] for t in turns) / sum(t[3] for t in turns) - 1, 4),
        "load": os.getloadavg()[0],
    }
    if args.json:
        print(json.dumps(row))
    else:
        print(
            f"{args.ranks} ranks, {args.workers} workers each: stream {row['stream_ms']} ms, "
            f"plain loader {row['loader_ms']} ms a step, overhead {row['overhead']:+.1%} "
            f"({min(ratios):+.1%}…{max(ratios):+.1%}), processor time "
            f"{row['cpu_overhead']:+.1%}, load {row['load']:.1f}"
        )


if __name__ == "__main__":
    main()
