"""Solve time against the number of trainers that decide at the same moment (the paper's Figure
3.6).

    python -m benchmarks.trainers [--counts 1,2,4,8] [--nodes N] [--jobs J] [--max-size K]
    [--repeats R] [--json] mpiexec -n P python -m benchmarks.trainers …

Each trainer has ``--nodes`` nodes and ``--jobs`` jobs of its own
(:mod:`benchmarks.instances`), and solves ``--repeats`` events one after the other while the others
do the same; all begin together. A row per number of trainers: median and worst wall time of a solve
over all trainers, processor time, and solves a second of all trainers together. On one head node
every trainer is a process; under ``mpiexec`` (with mpi4py installed) every trainer is a rank, on as
many nodes as the ranks are on, and by default 1, 2, 4, … up to all ranks take part.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any

from allocator import solve
from benchmarks.instances import KINDS, instance

MPI_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID")
"""Environment variables with the rank: of Open MPI, MPICH, Slurm and Intel MPI."""


@dataclass(frozen=True)
class Load:
    """Settings of every trainer."""

    nodes: int
    jobs: int
    max_size: int
    repeats: int


Times = list[tuple[float, float]]
"""(wall, processor) seconds of each solve."""


def run_trainer(trainer: int, load: Load, ready: Any) -> tuple[Times, float, str]:
    """Solve this trainer's events once ``ready.wait()`` returns. Return times, seconds from first
    to last, and the host's name.
    """
    events = []
    for repeat in range(load.repeats):
        kind = KINDS[repeat % len(KINDS)]
        problem = instance(1000 * trainer + repeat, load.nodes, load.jobs, load.max_size, kind)
        events.append([problem.bid(job, on) for job, on in problem.current.items()])
    solve(
        events[0], {"default": load.nodes}, clock=time.perf_counter, time_limit_s=60.0
    )  # imports and memory, once
    ready.wait()
    times: Times = []
    first = time.perf_counter()
    for bids in events:
        began, began_cpu = time.perf_counter(), time.process_time()
        solve(bids, {"default": load.nodes}, clock=time.perf_counter, time_limit_s=60.0)
        times.append((time.perf_counter() - began, time.process_time() - began_cpu))
    return times, time.perf_counter() - first, platform.node()


def _in_process(trainer: int, load: Load, ready: Barrier, answers: Any) -> None:
    answers.put(run_trainer(trainer, load, ready))


def on_this_node(count: int, load: Load) -> list[tuple[Times, float, str]]:
    """Run ``count`` trainers, each in a process."""
    context = multiprocessing.get_context("spawn")
    ready, answers = context.Barrier(count), context.Queue()
    workers = [
        context.Process(target=_in_process, args=(t, load, ready, answers)) for t in range(count)
    ]
    for worker in workers:
        worker.start()
    results = [answers.get(timeout=600) for _ in workers]
    for worker in workers:
        worker.join()
    return results


def row(
    count: int, load: Load, results: Iterable[tuple[Times, float, str]], how: str
) -> dict[str, object]:
    """Return what ``count`` trainers measured."""
    results = list(results)
    times = [pair for mine, _, _ in results for pair in mine]
    return {
        "trainers": count,
        "nodes": load.nodes,
        "jobs": load.jobs,
        "max_size": load.max_size,
        "median_ms": round(1e3 * statistics.median(wall for wall, _ in times), 3),
        "worst_ms": round(1e3 * max(wall for wall, _ in times), 3),
        "cpu_median_ms": round(1e3 * statistics.median(cpu for _, cpu in times), 3),
        "solves_per_s": round(len(times) / max(span for _, span, _ in results), 1),
        "hosts": len({host for _, _, host in results}),
        "cpus": os.cpu_count(),
        "launcher": how,
    }


def show(rows: Iterable[dict[str, object]], as_json: bool) -> None:
    """Print rows as they come: a JSON object per line, or a table."""
    columns = ("trainers", "median_ms", "worst_ms", "cpu_median_ms", "solves_per_s", "hosts")
    for number, measured in enumerate(rows):
        if as_json:
            print(json.dumps(measured), flush=True)
            continue
        if number == 0:
            print("  ".join(f"{name:>13}" for name in columns))
        print("  ".join(f"{measured[name]!s:>13}" for name in columns), flush=True)


class _MpiBarrier:
    """``wait()`` of a communicator."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def wait(self) -> None:
        self.group.Barrier()


def under_mpi(counts: Sequence[int] | None, load: Load, as_json: bool) -> None:
    """Run every rank as a trainer; rank 0 prints."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    steps = sorted({min(1 << p, world.size) for p in range(world.size.bit_length() + 1)})
    rows: list[dict[str, object]] = []
    for count in counts or steps:
        if count > world.size:
            continue
        taking_part = world.rank < count
        group = world.Split(0 if taking_part else 1, world.rank)
        results = (
            group.gather(run_trainer(world.rank, load, _MpiBarrier(group))) if taking_part else None
        )
        if world.rank == 0 and results is not None:
            rows.append(row(count, load, results, "mpi"))
        group.Free()
        world.Barrier()
    if world.rank == 0:
        show(rows, as_json)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--counts",
        help="numbers of trainers, comma-separated (default 1,2,4,8; under mpiexec up to all "
        "ranks)",
    )
    parser.add_argument("--nodes", type=int, default=1024, help="nodes of each trainer")
    parser.add_argument("--jobs", type=int, default=50, help="jobs of each trainer")
    parser.add_argument("--max-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20, help="events of each trainer")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line instead of a table"
    )
    args = parser.parse_args()
    counts = [int(part) for part in args.counts.split(",")] if args.counts else None
    load = Load(args.nodes, args.jobs, args.max_size, args.repeats)
    if any(name in os.environ for name in MPI_RANK_VARIABLES):
        under_mpi(counts, load, args.json)
        return
    show(
        (
            row(count, load, on_this_node(count, load), "processes")
            for count in counts or (1, 2, 4, 8)
        ),
        args.json,
    )


if __name__ == "__main__":
    main()
