"""Simulates what MalleTrain would harvest: a few settings with the same jobs on the same idle
nodes. Decides which settings are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from malletrain.sim.engine import Simulation
from malletrain.sim.policies import POLICIES
from malletrain.sim.results import Result
from malletrain.sim.settings import SimSettings
from malletrain.sim.workloads import SimJob
from scavenger.trace.trace import Trace

SAMPLES = 600
"""Number of points of the curve of nodes in use over time."""


@dataclass(frozen=True)
class Case:
    """One simulation: ``name`` and ``what`` describe the difference from the first. ``series``:
    (hour, idle nodes, nodes with a job).
    """

    name: str
    what: str
    result: Result
    series: tuple[tuple[float, int, int], ...]


def enough_at_a_time(trace: Trace, jobs: Sequence[SimJob], fewest: int) -> int:
    """Return the number of simultaneous jobs that could use the number of idle nodes that is not
    exceeded for 95 % of the time.

    Args:
        trace: the idle nodes.
        jobs: the jobs; each uses as many nodes as its scaling curve reaches.
        fewest: minimum of the result.
    """
    times, counts = trace.idle_count()
    lengths = np.diff(np.append(times, trace.duration_s))
    order = np.argsort(counts)
    reached = np.cumsum(lengths[order]) >= 0.95 * trace.duration_s
    many = float(counts[order][np.argmax(reached)]) if reached.any() else 0.0
    each = sum(job.max_nodes for job in jobs) / len(jobs) if jobs else 1.0
    return max(fewest, min(MAX_SIMULTANEOUS_JOBS, math.ceil(many / each)))


MAX_SIMULTANEOUS_JOBS = 200
"""Maximum number of simultaneous jobs unless requested: with more, every decision takes longer."""


def lasting(jobs: Sequence[SimJob], node_s: float) -> int:
    """Return the number of such jobs that have work for ``node_s`` node-seconds at any placement.

    Args:
        jobs: a sample of them. At its most efficient size a job needs the fewest node-seconds.
        node_s: the idle node-seconds to use.
    """
    least = (job.samples / max(rate / nodes for nodes, rate in job.curve.points) for job in jobs)
    return math.ceil(node_s / (sum(least) / len(jobs))) + 1


def cases(
    trace: Trace,
    jobs: Sequence[SimJob],
    settings: SimSettings,
    on_progress: Callable[[str, float], None] = lambda what, part: None,
) -> list[Case]:
    """Simulate the requested settings, and a few changes of them.

    Args:
        trace: the idle nodes.
        jobs: the jobs to train on them.
        settings: the requested settings.
        on_progress: called with the name of a case and the fraction of it that is done, 0 to 1.

    Raises:
        WorkloadError: there is nothing to simulate.
    """
    costs = settings.costs
    variants = [("as asked for", "the settings of this report", settings)]
    if settings.policy.name != "equal":
        equal = replace(settings, policy=POLICIES["equal"])
        variants.append(
            ("equal division", "nodes divided equally, whatever the scaling curves say", equal)
        )
    if costs.semantics == "real" and costs.notice_s < 30:
        with_notice = replace(settings, costs=replace(costs, notice_s=30.0))
        variants.append(
            (
                "30 s of notice",
                "a grace time of 30 s between the notice of a preemption and its end",
                with_notice,
            )
        )
    if costs.semantics == "real" and costs.mode == "restart":
        live = replace(costs, mode="live", up_s=costs.up_s / 4, down_s=costs.down_s / 4)
        description = (
            f"workers that stay alive: pauses of {live.up_s:g} and {live.down_s:g} s, one step lost"
        )
        variants.append(("live mode", description, replace(settings, costs=live)))
    all_cases = []
    for name, description, each in variants:
        on_progress(name, 0.0)
        until = _until(trace, each)
        simulation = Simulation(trace, jobs, replace(each, sample_s=until / SAMPLES))
        result = simulation.run(partial(on_progress, name))
        all_cases.append(
            Case(
                name,
                description,
                result,
                tuple((at / 3600.0, idle, used) for at, idle, used in simulation.series),
            )
        )
    return all_cases


def _until(trace: Trace, settings: SimSettings) -> float:
    """Return the simulated time, seconds."""
    hours = math.inf if settings.hours is None else settings.hours
    return min(trace.duration_s, hours * 3600.0)
