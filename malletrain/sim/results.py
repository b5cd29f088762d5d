"""The results of a simulation, as data and as text, and the ideal throughput with which they are
compared. Decides nothing in the simulation.

The ideal is an upper bound on the throughput of any plan at one moment: the largest sum of
throughputs that the admitted jobs can reach on the idle nodes if rescaling is free. The bound of a
policy is the integral over the jobs that this policy has admitted at each moment.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from malletrain.sim.model_jobs import SimRun
from malletrain.sim.slot_kinds import KindResult
from malletrain.sim.workloads import SimJob

_MAX_CHARGE_FACTOR, _MAX_EXCESS_S = 1 + 1e-6, 1.0
"""A job exceeds its budget if its charge is above the first times the budget plus the second,
node-seconds: sums of times are rounded.
"""

if TYPE_CHECKING:
    from rich.table import Table


Floats = npt.NDArray[np.float64]
SHOWN_USERS = 8


class IdealThroughput:
    """Ideal throughput by number of idle nodes, for any set of jobs. Tables are cached.

    Args:
        nodes: number of nodes of the machine.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._rows: list[Floats] = []
        self._kinds: dict[Hashable, int] = {}
        self._table = lru_cache(maxsize=4096)(self._make)

    def kind(self, job: SimJob) -> int:
        """Return a number for the job, equal for all jobs with equal sizes and throughputs."""
        key = (job.curve, job.min_nodes, job.max_nodes, job.sizes)
        if key not in self._kinds:
            rates = np.array(job.rates()[: self._nodes + 1])
            allowed = np.zeros(len(rates), np.bool_)
            allowed[job.min_nodes :] = True
            if job.sizes is not None:
                allowed &= np.isin(np.arange(len(rates)), job.sizes)
            allowed[0] = True
            self._kinds[key] = len(self._rows)
            self._rows.append(np.where(allowed, rates, -np.inf))
        return self._kinds[key]

    def table(self, kinds: Iterable[int]) -> Floats:
        """Return the ideal throughput of jobs of these kinds, samples/s, at 0, 1, … idle nodes. The
        last value applies to all larger numbers.
        """
        return self._table(tuple(sorted(kinds)))

    def _make(self, kinds: tuple[int, ...]) -> Floats:
        # ``kinds`` is sorted, so that sets of jobs share the tables of their common prefix.
        if not kinds:
            return np.zeros(1)
        before, row = self._table(kinds[:-1]), self._rows[kinds[-1]]
        size = min(len(before) + len(row) - 1, self._nodes + 1)
        # best[n] = max over k of before[n - k] + row[k]: one window of ``before`` for each n.
        padded = np.concatenate(
            [np.full(len(row) - 1, -np.inf), before, np.full(size - len(before), before[-1])]
        )
        windows = np.lib.stride_tricks.sliding_window_view(padded, len(row))[:size]
        return np.asarray((windows + row[::-1]).max(axis=1))


@dataclass(frozen=True)
class Result:
    """The outcome of one simulation.

    Args:
        policy, costs, nodes, max_running, t_fwd_s: inputs of the simulation.
        hours: simulated time; shorter than requested if all work was done.
        jobs: jobs submitted within that time.
        samples: processed and not lost.
        ideal_samples: maximum number of samples that the jobs of each moment could have processed
            on the idle nodes of that moment if rescaling were free.
        fraction_of_ideal: ``samples / ideal_samples``.
        equivalent_nodes: mean number of idle nodes: the size of a dedicated machine with the same
            node-hours.
        harvested_fraction: fraction of the idle node-seconds in which samples were processed.
        start_fraction, rescale_fraction, preemption_fraction: fraction of the idle node-seconds in
            pauses, by cause. The rest was not used.
        snapshot_fraction, redone_fraction: fraction of the idle node-seconds in which snapshots
            were taken, and in which samples were processed that were lost with a node.
        rescale_loss, preemption_loss, start_loss: samples not processed, or processed and lost, by
            cause (at the throughput before).
        starts, rescales, preemptions: number of starts, of changes of nodes, and of losses of nodes
            (several at once count once).
        jobs_completed: number of completed jobs.
        mean_job_hours, mean_wait_hours: mean time of completed jobs from first start to end, and
            from submission to first start; None if no job completed.
        longest_wait_hours, p95_wait_hours: maximum and 95th percentile, over the jobs, of the
            longest time as an admitted job without nodes.
        deadlines, deadlines_met: number of deadlines within the simulated time, and of those that
            were met.
        budgets_overspent: number of jobs that cost more than their budget.
        plans, profiles: number of plans made and of profiles ended.
        mean_decision_ms, p95_decision_ms, max_decision_ms: wall time of the controller's decisions
            that made a plan.
        wall_s: wall time of the simulation.
        slots_by_kind: use of each kind of slots; empty if the trace has no kinds.
        node_hours_by_user: node-hours of each user's jobs; empty if no job has a user.
    """

    policy: str
    costs: str
    nodes: int
    max_running: int
    t_fwd_s: float
    hours: float
    jobs: int
    samples: float
    ideal_samples: float
    fraction_of_ideal: float
    equivalent_nodes: float
    harvested_fraction: float
    start_fraction: float
    rescale_fraction: float
    preemption_fraction: float
    rescale_loss: float
    preemption_loss: float
    start_loss: float
    starts: int
    rescales: int
    preemptions: int
    jobs_completed: int
    mean_job_hours: float | None
    mean_wait_hours: float | None
    deadlines: int
    deadlines_met: int
    budgets_overspent: int
    plans: int
    profiles: int
    mean_decision_ms: float
    p95_decision_ms: float
    max_decision_ms: float
    wall_s: float
    node_hours_by_user: dict[str, float] = dataclasses.field(default_factory=dict)
    snapshot_fraction: float = 0.0
    snapshot_loss: float = 0.0
    redone_fraction: float = 0.0
    longest_wait_hours: float = 0.0
    p95_wait_hours: float = 0.0
    slots_by_kind: tuple[KindResult, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dataclasses.asdict(self)


def table(result: Result) -> Table:
    """Return the result as a table for users."""
    from rich.table import Table

    r = result
    lost = [
        ("starting", r.start_fraction, r.start_loss),
        ("rescaling", r.rescale_fraction, r.rescale_loss),
        ("preemption", r.preemption_fraction, r.preemption_loss),
        *([("snapshots", r.snapshot_fraction, r.snapshot_loss)] if r.snapshot_loss else []),
    ]
    unused = 1.0 - r.harvested_fraction - sum(fraction for _, fraction, _ in lost)
    rows = [
        (
            "policy",
            f"{r.policy}, costs {r.costs}, {r.max_running} jobs at a time, T_fwd {r.t_fwd_s:g} s",
        ),
        (
            "machine",
            f"{r.nodes} nodes, {r.equivalent_nodes:.1f} of them idle on average over "
            f"{r.hours:.1f} h",
        ),
        (
            "samples",
            f"{r.samples:.4g}, {100 * r.fraction_of_ideal:.1f} % of {r.ideal_samples:.4g}, the "
            "upper bound",
        ),
        (
            "idle node-hours",
            f"{100 * r.harvested_fraction:.1f} % harvested, {100 * unused:.1f} % not used",
        ),
        *(
            (f"  lost to {name}", f"{100 * fraction:.1f} % ({samples:.3g} samples)")
            for name, fraction, samples in lost
        ),
        ("changes", f"{r.starts} starts, {r.rescales} rescales, {r.preemptions} preemptions"),
        ("jobs", f"{r.jobs_completed} done of {r.jobs}"),
    ]
    if r.mean_job_hours is not None and r.mean_wait_hours is not None:
        rows.append(
            (
                "  on average",
                f"{r.mean_job_hours:.2f} h from start to end, {r.mean_wait_hours:.2f} h in the "
                "queue before",
            )
        )
    rows.append(
        (
            "longest waits",
            f"{r.longest_wait_hours:.2f} h without nodes, 95 % of the jobs {r.p95_wait_hours:.2f} "
            "h or less",
        )
    )
    if r.node_hours_by_user:
        total = math.fsum(r.node_hours_by_user.values()) or 1.0
        by_node_hours = sorted(r.node_hours_by_user.items(), key=lambda item: -item[1])
        words = [
            f"{user} {hours:,.0f} ({100 * hours / total:.1f} %)" for user, hours in by_node_hours
        ]
        if len(words) > SHOWN_USERS:
            words[SHOWN_USERS:] = [f"and {len(words) - SHOWN_USERS} more"]
        rows.append(("node-hours", ", ".join(words)))
    rows += [
        (
            f"{kind.kind} slots",
            f"{kind.slots}; {100 * kind.harvested_fraction:.1f} % of {kind.idle_slot_hours:,.1f} "
            f"idle slot-hours harvested; {kind.allocated_slot_hours:,.1f} with jobs, at "
            f"{kind.price:g}: {kind.charged_node_hours:,.1f} node-hours",
        )
        for kind in r.slots_by_kind
    ]
    if r.deadlines:
        rows.append(("deadlines", f"{r.deadlines_met} held of {r.deadlines} that came due"))
    if r.profiles:
        rows.append(("profiles", f"{r.profiles}"))
    rows.append(
        (
            "decisions",
            f"{r.plans} plans; {r.mean_decision_ms:.1f} ms on average, 95 % within "
            f"{r.p95_decision_ms:.1f} ms",
        )
    )
    rows.append(("took", f"{r.wall_s:.1f} s"))
    grid = Table(show_header=False, box=None, pad_edge=False)
    for row in rows:
        grid.add_row(*row)
    return grid


@dataclass(frozen=True)
class GoalCounts:
    """Numbers of deadlines and budgets that a simulation met and missed."""

    deadlines: int
    """Number of deadlines within the simulated time."""
    met: int
    """Number of these that were met."""
    overspent: int
    """Number of jobs that exceeded their budget."""


def count_goals(
    runs: Iterable[SimRun], end_s: float, prices: Mapping[str, float] | None = None
) -> GoalCounts:
    """Count the deadlines up to ``end_s``, those that were met, and the exceeded budgets.

    Args:
        runs: all jobs.
        end_s: end of the simulation, seconds.
        prices: kind of slots → node-seconds that a second of one counts; others count 1.
    """
    price = (prices or {}).get
    all_runs = list(runs)
    due = [r for r in all_runs if r.job.deadline_s is not None and r.job.deadline_s <= end_s]
    met = [r for r in due if r.ended_at is not None and r.ended_at <= (r.job.deadline_s or 0.0)]
    overspent = [
        r
        for r in all_runs
        if r.job.budget_nh is not None
        and sum(price(kind, 1.0) * use.allocated_s for kind, use in r.use.items())
        > _MAX_CHARGE_FACTOR * 3600.0 * r.job.budget_nh + _MAX_EXCESS_S
    ]
    return GoalCounts(len(due), len(met), len(overspent))
