"""Fair shares in the simulator: what five users get of the idle nodes of a month, against what is
due to them, and what that costs in samples.

    python -m benchmarks.shares --log KTH-SP2-1996.swf.gz [--from-day 60] [--days 30] [--json]

The idle nodes are those of the log. The jobs are drawn from a log too (``--jobs``; default: the
same): its arrivals, sizes and run times, each with the scaling curve of a model drawn at random
(``--curves``), made malleable. They belong to five users: dealt out one by one (``--users even``),
or the log's users dealt out to the five (``--users log``). The same jobs run twice on the same
nodes: under the plain plan, and with shares of ``--weights``. ``--queued`` has every job there from
the beginning, so that each user wants more than there is all the time.

A user's *target* is recounted from the outcome, apart from the product's own counters: every
``--every`` seconds the nodes that jobs held are shared out by weight, and no user gets more than
the largest sizes of its unfinished jobs. ``off`` is how far the node-hours held are from it,
relative to it. ``samples`` are relative to the plain plan; so is ``work``, which counts single-node
seconds, so that it does not depend on whose models are quick.

``--deadlines PART``: so many of the jobs that need ten minutes or more have a deadline, as in
:mod:`benchmarks.deadlines`. The plain plan is not told of them; ``oracle`` is how many of those
that come due could be held by who has the same nodes, knows everything and has no shares to keep.
``--bound``: what is left of an oracle's samples when it holds the deadlines that were held, and
keeps the shares to 5 % (:mod:`benchmarks.shares_bound`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.deadlines import idle_over_time, met, oracle
from benchmarks.shares_bound import most_samples
from malletrain.core.settings import ControllerSettings, ShareSettings
from malletrain.sim.engine import Simulation
from malletrain.sim.idle import idle_nodes
from malletrain.sim.joblogs import read_log
from malletrain.sim.observation import Observation
from malletrain.sim.results import Result
from malletrain.sim.settings import SimSettings
from malletrain.sim.workload_files import read_curves
from malletrain.sim.workloads import (
    SimJob,
    arriving,
    built_in,
    hpo,
    with_deadlines,
    with_stated_curves,
)
from scavenger.trace.trace import Trace

DAY_S = 86400.0
ORACLE_SPAN_S = 900.0
BOUND_SPAN_S = 21600.0
USERS = ("ada", "bob", "cyd", "dan", "eve")


@dataclass(frozen=True)
class Outcome:
    """One simulation, and the node-hours due to each user in it."""

    result: Result
    due: Mapping[str, float]
    deadlines_met: frozenset[str]
    """Number of jobs whose deadlines came due and were met."""
    work: float
    """Processed work, in single-node seconds: a sample of a slow model counts as much as many of a
    quick one.
    """


def level(
    demands: Mapping[str, float], weights: Mapping[str, float], total: float
) -> dict[str, float]:
    """Divide ``total`` by weight, with nobody above their demand: the level is found by
    bisection.
    """
    if sum(demands.values()) <= total:
        return dict(demands)
    low, high = 0.0, max(demands[u] / weights[u] for u in demands)
    for _ in range(60):
        mid = (low + high) / 2
        used = sum(min(demands[u], mid * weights[u]) for u in demands)
        low, high = (mid, high) if used < total else (low, mid)
    return {u: min(demands[u], high * weights[u]) for u in demands}


def run(
    trace: Trace,
    jobs: Sequence[SimJob],
    settings: SimSettings,
    weights: Mapping[str, float],
    deadlines: dict[str, float],
) -> Outcome:
    """Simulate, and compute what was due, and which deadlines were met."""
    simulation = Simulation(trace, jobs, settings)
    result = simulation.run()
    changes: list[tuple[float, str, int]] = []
    for each in simulation.runs.values():
        end = each.ended_at if each.ended_at is not None else float("inf")
        changes.append((each.job.submit_s, each.job.user, each.job.max_nodes))
        changes.append((end, each.job.user, -each.job.max_nodes))
    changes.sort()
    demands = dict.fromkeys(weights, 0.0)
    due = dict.fromkeys(weights, 0.0)
    done = 0
    every = settings.sample_s or 60.0
    for at, _, allocation in simulation.series:
        while done < len(changes) and changes[done][0] <= at:
            _, user, more = changes[done]
            demands[user] += more
            done += 1
        for user, part in level(demands, weights, allocation).items():
            due[user] += part * every / 3600.0
    runs = simulation.runs
    allocation = frozenset(name for name, at in deadlines.items() if met(simulation, {name: at}))
    work = math.fsum(each.done / each.job.curve.at(1) for each in runs.values())
    return Outcome(result, due, allocation, work)


def account(plain: Outcome, fair: Outcome, weights: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures."""
    total = sum(weights.values())

    def users(outcome: Outcome) -> dict[str, dict[str, float]]:
        node_hours, due = outcome.result.node_hours_by_user, outcome.due
        everything, all_due = sum(node_hours.values()), sum(due.values())
        return {
            user: {
                "weight": weights[user] / total,
                "due": due[user] / all_due,
                "share": node_hours.get(user, 0.0) / everything,
                "off": (node_hours.get(user, 0.0) / everything) / (due[user] / all_due) - 1.0,
            }
            for user in weights
        }

    results = {"plain": users(plain), "shares": users(fair)}
    return {
        "users": results,
        "worst_off": {k: max(abs(u["off"]) for u in v.values()) for k, v in results.items()},
        "samples": fair.result.samples / plain.result.samples,
        "work": fair.work / plain.work,
        "harvested": [plain.result.harvested_fraction, fair.result.harvested_fraction],
        "rescales": [plain.result.rescales, fair.result.rescales],
        "starts": [plain.result.starts, fair.result.starts],
        "jobs_completed": [plain.result.jobs_completed, fair.result.jobs_completed],
        "mean_decision_ms": [plain.result.mean_decision_ms, fair.result.mean_decision_ms],
        "equivalent_nodes": plain.result.equivalent_nodes,
        "days": plain.result.hours / 24.0,
        "jobs": plain.result.jobs,
        "wall_s": plain.result.wall_s + fair.result.wall_s,
    }


def deadlines_held(
    trace: Trace, jobs: list[SimJob], plain: Outcome, fair: Outcome
) -> dict[str, float]:
    """Return the figures for the deadlines of ``jobs``, all of which came due."""
    if not jobs:
        return {}
    best = oracle(jobs, idle_over_time(trace, ORACLE_SPAN_S), ORACLE_SPAN_S)
    return {
        "due": len(jobs),
        "oracle": best,
        "met": len(fair.deadlines_met),
        "plain_met": len(plain.deadlines_met),
        "held": len(fair.deadlines_met) / max(1.0, best),
    }


def bounds(trace: Trace, jobs: Sequence[SimJob], fair: Outcome) -> dict[str, float]:
    """Return the share of the samples that an oracle can still process when it meets the deadlines,
    and when it also keeps the shares.
    """
    there = [job for job in jobs if job.submit_s < trace.duration_s]
    idle, total = idle_over_time(trace, BOUND_SPAN_S), sum(fair.due.values())
    most = partial(most_samples, there, idle, BOUND_SPAN_S)
    free = most()
    parts = {user: due / total for user, due in fair.due.items()}
    return {
        "deadlines": most(served_deadlines=fair.deadlines_met) / free,
        "deadlines_and_shares": most(served_deadlines=fair.deadlines_met, parts=parts) / free,
        "reached": fair.result.samples / free,
    }


def jobs_of(args: argparse.Namespace) -> list[SimJob]:
    """Return the jobs of the five users."""
    log = read_log(args.jobs or args.log, per_node=args.per_node)
    begin = args.jobs_from_day * DAY_S
    end = begin + (args.jobs_days or args.days) * DAY_S
    there = [job for job in log.jobs if begin <= job.submit_s < end and job.run_s][:: args.thin]
    curves = read_curves(args.curves) if args.curves else built_in(64)
    drawn = hpo(curves, len(there), args.seed)
    arrived = arriving(drawn, [(job.submit_s - begin, job.nodes, job.run_s) for job in there])
    names = sorted({job.user for job in there})
    owners = [
        USERS[(names.index(job.user) if args.users == "log" else number) % len(USERS)]
        for number, job in enumerate(there)
    ]
    jobs = [
        replace(job, user=owner, submit_s=0.0 if args.queued else job.submit_s)
        for job, owner in zip(arrived, owners, strict=True)
    ]
    jobs = with_stated_curves(jobs, args.given, args.seed) if args.given != "exact" else jobs
    return with_deadlines(jobs, args.deadlines, seed=args.seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--log", type=Path, required=True, help="whose idle nodes (SWF, sacct, PBS)"
    )
    parser.add_argument("--jobs", type=Path, help="log whose jobs arrive; default: the same")
    parser.add_argument("--from-day", type=float, default=60.0, help="of the idle nodes")
    parser.add_argument("--jobs-from-day", type=float, default=60.0)
    parser.add_argument("--jobs-days", type=float, help="default: as --days")
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--per-node", type=int, help="processors or GPUs of a node, in both logs")
    parser.add_argument("--thin", type=int, default=1, help="take one of so many jobs")
    parser.add_argument("--curves", type=Path, help="CSV model,nodes,samples_per_s")
    parser.add_argument("--weights", default="1,1,2,2,4", help="of the five users")
    parser.add_argument("--users", choices=("even", "log"), default="even")
    parser.add_argument(
        "--queued", action="store_true", help="all jobs are submitted at the beginning"
    )
    parser.add_argument("--given", choices=("exact", "other", "linear", "none"), default="exact")
    parser.add_argument("--max-jobs", type=int, default=20, help="jobs at a time")
    parser.add_argument("--half-life-days", type=float, default=7.0)
    parser.add_argument("--double-after-hours", type=float, default=4.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two samples")
    parser.add_argument("--deadlines", type=float, default=0.0, help="part of jobs that have one")
    parser.add_argument(
        "--bound", action="store_true", help="share of the samples that an oracle would lose"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    weights = dict(zip(USERS, map(float, args.weights.split(",")), strict=True))
    before = os.getloadavg()[0]
    begin = args.from_day * DAY_S
    log = read_log(args.log, per_node=args.per_node)
    trace = idle_nodes(log, observed=Observation(begin, begin + args.days * DAY_S)).trace
    jobs = jobs_of(args)
    settings = SimSettings(max_running=args.max_jobs, sample_s=args.every, seed=args.seed)
    shares = ShareSettings(
        weights,
        half_life_s=args.half_life_days * DAY_S,
        double_after_s=args.double_after_hours * 3600.0,
    )
    due = {j.name: d for j in jobs if (d := j.deadline_s) is not None and d <= trace.duration_s}
    untold = [replace(job, deadline_s=None) for job in jobs]
    plain = run(trace, untold, settings, weights, due)
    site = ControllerSettings(shares=shares)
    fair = run(trace, jobs, replace(settings, site=site), weights, due)
    row = {
        **account(plain, fair, weights),
        "deadlines": deadlines_held(trace, [job for job in jobs if job.name in due], plain, fair),
        "bound": bounds(trace, jobs, fair) if args.bound else {},
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "arguments": {k: str(v) for k, v in vars(args).items()},
    }
    if args.json:
        print(json.dumps(row))
        return
    print(f"{'user':>8} {'weight':>8} {'due':>8} {'plain':>8} {'shares':>8} {'off':>8}")
    for user, results in row["users"]["shares"].items():
        before_share = row["users"]["plain"][user]["share"]
        cells = (results["weight"], results["due"], before_share, results["share"], results["off"])
        print(f"{user:>8} " + " ".join(f"{100 * cell:7.2f}%" for cell in cells))
    names = ("samples", "work", "harvested", "rescales", "starts", "jobs_completed", "jobs")
    for name in (*names, "deadlines", "bound", "load"):
        print(f"{name}: {row[name]}")
    print(f"mean_decision_ms: {row['mean_decision_ms']}, wall_s: {row['wall_s']:.0f}")


if __name__ == "__main__":
    main()
