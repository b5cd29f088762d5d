"""Measures the time from an event to the controller's commands at full size, with and without
shares and goals.

    python -m benchmarks.decision [--shares] [--goals] [--nodes 10624] [--jobs 200] [--slots 8]

The daemon's own controller has all nodes, and jobs with random curves
(:mod:`benchmarks.instances`). Each repeat removes a hundredth of the nodes, returns those of the
previous repeat, and measures the step that makes the plan: counting, bids, sizes, names of nodes,
commands. The first row is of the plain plan, then one for each switch, and one with all switches if
there are several.

* ``--shares``: jobs of five parties, with new random factors between 1/16 and 16 each time.
* ``--goals``: every second job has a deadline, every fourth a budget; there is a week of node
  history. ``--goals all``: every job has both.

``median``, ``p95``, ``worst``: wall time, ms. ``cpu``: median of processor time, which other work
on the machine hardly changes. ``--slots K``: each node is a host with K slots, and a hundredth of
the slots is removed and returned.

Target: a median of 100 ms at 10,000 hosts × 8 slots and 200 jobs. Without slots: a median of 50 ms
at 10,624 nodes × 200 jobs of 1:64, and 500 ms at 500 jobs of 1:512, with all switches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.instances import random_curve
from malletrain.core.commands import Command, Start
from malletrain.core.commands import Rescale as Move
from malletrain.core.controller import Controller
from malletrain.core.events import Event, JobSubmitted, NodeJoined, NodeLost, Tick
from malletrain.core.events import RescaleFinished as Up
from malletrain.core.forecast import SPAN_S, NodeSpan
from malletrain.core.goals import NO_GOALS, OwnerGoals, WorkReported
from malletrain.core.planning import exact, make_plan
from malletrain.core.settings import ControllerSettings, PlanningSettings, ShareSettings
from malletrain.core.shares import MAX_DOUBLINGS, PartyService
from scavenger.interface import slot_name

PARTIES = ("ada", "bob", "cyd", "dan", "eve")
HOUR_S, WEEK_SPANS = 3600.0, 2016


@dataclass(frozen=True)
class Switched:
    """Switches of a row."""

    shares: bool = False
    goals: str = ""
    """Which jobs have goals: ``mixed``, ``all``; empty: none."""
    slots: int = 0
    """Slots of each host; 0: whole nodes."""

    def named(self) -> str:
        """Label in the table."""
        parts = [name for name, on in vars(self).items() if on]
        return "+".join(parts) or "plain"


class Machine:
    """A controller at full size, and its events."""

    def __init__(self, nodes: int, jobs: int, max_size: int, switched: Switched) -> None:
        self._rng = np.random.default_rng(0)
        self._switched = switched
        hosts = [f"n{k:05}" for k in range(nodes)]
        self._joined = [NodeJoined(host) for host in hosts]
        if switched.slots:
            self._joined = [
                NodeJoined(slot_name(host, "gpu", number), node_class="gpu", group=host)
                for host in hosts
                for number in range(switched.slots)
            ]
        planning = PlanningSettings(max_running=jobs)
        weights = dict(zip(PARTIES, (1.0, 1.0, 2.0, 2.0, 4.0), strict=True))
        shares = ShareSettings(weights) if switched.shares else None
        self.controller = Controller(
            ControllerSettings(planning, min_interval_s=0.0, shares=shares),
            planner=partial(make_plan, solver=partial(exact, clock=time.perf_counter)),
        )
        if switched.goals:
            spans = nodes * self._rng.uniform(0.3, 1.0, WEEK_SPANS)
            self.controller.goals.history.restore(
                NodeSpan(SPAN_S * (k - WEEK_SPANS), self._joined[0].node_class, float(n))
                for k, n in enumerate(spans)
            )
        self.now = 0.0
        self._gone: list[NodeJoined] = []
        self._turn = 0
        self._do(*self._joined)
        for number in range(jobs):
            self._do(self._job(number, max_size))

    def _job(self, number: int, max_size: int) -> JobSubmitted:
        curve = random_curve(self._rng, max_size, rough=number % 2 == 0)
        party = PARTIES[number % len(PARTIES)] if self._switched.shares else ""
        goals = NO_GOALS
        if self._switched.goals:
            goals = self._goals(number, curve.at(max_size), max_size)
        return JobSubmitted(
            f"j{number:04}",
            1,
            max_size,
            curve=curve,
            goals=goals,
            party=party,
            exempt_from_shares=goals.deadline is not None,
        )

    def _goals(self, number: int, rate: float, max_size: int) -> OwnerGoals:
        """Return the goals of one job; ``rate``: samples/s on its largest size."""
        every = self._switched.goals == "all"
        hours = float(self._rng.uniform(2.0, 24.0))
        work = rate * HOUR_S * hours * float(self._rng.uniform(0.1, 0.6))
        deadline = hours * HOUR_S if every or number % 2 == 0 else None
        budget = max_size * hours * HOUR_S if every or number % 4 == 1 else None
        return OwnerGoals(deadline, budget, work) if deadline or budget else NO_GOALS

    def _do(self, *events: Event) -> None:
        self._carried_out(self.controller.handle_all(events, self.now))

    def _carried_out(self, commands: list[Command]) -> None:
        """Let every job that is about to move train at once."""
        moved = [Up(c.job) for c in commands if isinstance(c, Start | Move)]
        if moved:
            self.controller.handle_all(moved, self.now)

    def next(self) -> tuple[float, float] | None:
        """Remove and return nodes, and measure the plan that follows: wall and processor time, ms;
        None if the events themselves already made a plan.
        """
        self._turn += 1
        self.now += 60.0
        self._do(Tick())
        if self._switched.goals and self._turn % 5 == 0:
            running = [name for name, job in self.controller.jobs.items() if job.nodes]
            self._do(*(WorkReported(name, 1e3 * self._turn) for name in running))
        few = self._rng.choice(len(self._joined), len(self._joined) // 100, replace=False)
        back, self._gone = self._gone, [self._joined[k] for k in few]
        self._do(*back, *(NodeLost(joined.node) for joined in self._gone))
        if self._switched.shares:
            self._owe()
        self.now += 5.0
        plans = self.controller.plans
        began, began_cpu = time.perf_counter(), time.process_time()
        commands = self.controller.handle(Tick(), self.now)
        taken = 1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - began_cpu)
        self._carried_out(commands)
        return taken if self.controller.plans > plans else None

    def _owe(self) -> None:
        behind = self._rng.uniform(-MAX_DOUBLINGS, MAX_DOUBLINGS, len(PARTIES)) * 4 * HOUR_S
        due = 1000 * HOUR_S
        result = {
            party: PartyService(due - late, due, due)
            for party, late in zip(PARTIES, behind.tolist(), strict=True)
        }
        self.controller.shares.restore(result, self.now)


def measure(
    nodes: int, jobs: int, max_size: int, repeats: int, switched: Switched
) -> dict[str, Any]:
    """Return one row."""
    machine = Machine(nodes, jobs, max_size, switched)
    measurements = [machine.next() for _ in range(repeats + 1)]
    taken = [each for each in measurements[1:] if each is not None]
    wall, cpu = zip(*taken, strict=True)
    return {
        "on": switched.named(),
        "plans": len(taken),
        "median": round(statistics.median(wall), 1),
        "p95": round(float(np.quantile(wall, 0.95)), 1),
        "worst": round(max(wall), 1),
        "cpu": round(statistics.median(cpu), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shares", action="store_true", help="five parties with weights")
    parser.add_argument("--goals", nargs="?", const="mixed", choices=("mixed", "all"), default="")
    parser.add_argument("--nodes", type=int, default=10624)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--slots", type=int, default=0, metavar="K", help="slots of each node")
    parser.add_argument("--max-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    args = parser.parse_args()
    plain = Switched(slots=args.slots)
    together = replace(plain, shares=args.shares, goals=args.goals)
    switches = {"shares": args.shares, "goals": args.goals}
    alone = [replace(plain, **{name: on}) for name, on in switches.items() if on]
    rows = [plain, *alone, *([together] if len(alone) > 1 else [])]
    for switched in rows:
        before = os.getloadavg()[0]
        row = measure(args.nodes, args.jobs, args.max_size, args.repeats, switched)
        row["load"] = [round(before, 1), round(os.getloadavg()[0], 1)]
        if args.json:
            print(json.dumps(row), flush=True)
        else:
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
