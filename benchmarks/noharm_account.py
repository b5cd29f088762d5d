"""Attributes the idle node-seconds of :mod:`benchmarks.noharm` to their uses, from the records of a
run: when main jobs had a node, when a lease existed and when a stub worked. Runs nothing.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from malletrain.config.model import DATABASE_NAME
from malletrain.demo.account import Intervals, both, length, normal, without
from malletrain.store.store import Store


@dataclass(frozen=True)
class MainRun:
    """The record of a run: delays by job, and for each node the times of main jobs."""

    delays: list[float]
    used: dict[str, Intervals]
    begin: float
    end: float


def gaps_of(run: MainRun, longer_than_s: float) -> dict[str, Intervals]:
    """Return for each node the times without a main job that are longer than ``longer_s``."""
    whole = ((run.begin, run.end),)
    return {
        node: tuple(g for g in without(whole, used) if g[1] - g[0] > longer_than_s)
        for node, used in run.used.items()
    }


def spans_of(folder: Path) -> dict[str, Intervals]:
    """Return for each node the times at which a stub worked."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for path in folder.iterdir():
        text = path.read_text()
        if text:
            spans.setdefault(path.name.rsplit(".", 2)[0], []).append(
                (float(text), path.stat().st_mtime)
            )
    return {node: normal(pieces) for node, pieces in spans.items()}


@dataclass(frozen=True)
class Harvest:
    """The record of MalleTrain, by node: when stubs worked, when a lease was requested or existed,
    and when one existed.
    """

    worked: dict[str, Intervals]
    demand: dict[str, Intervals]
    use: dict[str, Intervals]
    counts: dict[str, int]


def harvest_of(root: Path, counts: dict[str, int]) -> Harvest:
    """Read the record from the marks of the stubs and the daemon's store."""
    now = time.time()
    demand: dict[str, list[tuple[float, float]]] = {}
    use: dict[str, list[tuple[float, float]]] = {}
    with Store.open(f"sqlite:///{root / 'state' / DATABASE_NAME}") as store:
        for lease in store.list_leases():
            demand.setdefault(lease.node, []).append((lease.requested, lease.ended or now))
            if lease.started is not None:
                use.setdefault(lease.node, []).append((lease.started, lease.ended or now))
    return Harvest(
        spans_of(root / "spans"),
        {n: normal(p) for n, p in demand.items()},
        {n: normal(p) for n, p in use.items()},
        counts,
    )


def account(gaps: dict[str, Intervals], harvest: Harvest) -> dict[str, float]:
    """Return how the node-seconds of these gaps were used.

    Without a lease: ``before`` the first one of a gap, ``between`` two, and ``after`` the last.
    ``starting``: a lease was requested and had no agent yet. With an agent, without work:
    ``waiting`` for its first work, ``rescaling`` between two pieces, ``leaving`` after the last.
    """
    sums = dict.fromkeys(
        (
            "offered",
            "worked",
            "before",
            "between",
            "after",
            "starting",
            "waiting",
            "rescaling",
            "leaving",
        ),
        0.0,
    )
    for node, pieces_of_node in gaps.items():
        for gap in pieces_of_node:
            worked = both((gap,), harvest.worked.get(node, ()))
            demand = both((gap,), harvest.demand.get(node, ()))
            use = both((gap,), harvest.use.get(node, ()))
            sums["offered"] += length((gap,))
            sums["worked"] += length(worked)
            for lease in use:
                pieces = both((lease,), worked)
                for begin, end in without((lease,), pieces):
                    kind = (
                        "waiting"
                        if not pieces or end <= pieces[0][0]
                        else "leaving"
                        if begin >= pieces[-1][1]
                        else "rescaling"
                    )
                    sums[kind] += end - begin
            sums["starting"] += length(without(without(demand, use), worked))
            for begin, end in without(without((gap,), demand), worked):
                kind = "before" if begin == gap[0] else "after" if end == gap[1] else "between"
                sums[kind] += end - begin
    return sums


def summary(values: list[float]) -> dict[str, float]:
    """Return median, 90th percentile, maximum and mean."""
    ordered = sorted(values)
    return {
        "median_s": statistics.median(ordered),
        "p90_s": ordered[int(0.9 * (len(ordered) - 1))],
        "max_s": ordered[-1],
        "mean_s": statistics.fmean(ordered),
    }
