"""Detects nodes that slow down the others of their job, and lets jobs continue without them.

Decides when two reports of a worker's counts form a window. :mod:`malletrain.daemon.slow_links`
finds slow links. :mod:`malletrain.core.slow_nodes` decides which node is slow and whether a job is
better off without it; the plan decides which nodes it gets instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

from malletrain.core.events import JobState
from malletrain.core.records import JobRecord
from malletrain.core.slow_nodes import (
    MIN_LOST_FRACTION,
    WINDOWS_PER_NODE,
    Compared,
    SlowNode,
    StepShare,
    StepWindow,
    Swap,
)
from malletrain.daemon.core import Core
from malletrain.daemon.daemon_state import DaemonState
from malletrain.daemon.job_repository import ActiveJob
from malletrain.daemon.lease_actions import LeaseActions
from malletrain.daemon.sickbay import slow_node_policy
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.messages import Progress
from malletrain.rounds.interface import RoundStage

MIN_STEPS = 3
"""Minimum number of steps of each worker in a window. With fewer the window continues."""
UNEVEN = (
    "Its ranks have unequal work: a rank that takes longer than the others does so on another node "
    "too. Its nodes are no longer compared."
)


@dataclass
class _Counts:
    """The counts of one worker."""

    node: str
    """Node of the worker."""
    began: Progress
    """Counts at the start of the window."""
    now: Progress
    """Newest counts."""

    @property
    def steps(self) -> int:
        """Number of steps in the window."""
        return self.now.steps - self.began.steps

    def per_step(self) -> tuple[float, float, float]:
        """Return the mean duration, busy time (both in seconds) and samples of a step."""
        a, b = self.began, self.now
        busy = (b.busy or 0.0) - (a.busy or 0.0)
        return tuple(x / self.steps for x in (b.last - a.last, busy, b.samples - a.samples))  # type: ignore[return-value]


@dataclass
class _Round:
    """The current window of a job's newest round."""

    generation: int
    """Number of the round."""
    began: float
    """Start of the window, seconds."""
    workers: dict[int, _Counts] = field(default_factory=dict)
    """Rank → counts of its worker."""

    def window(self, job: str, members: tuple[str, ...]) -> StepWindow | None:
        """Return the step times of the window; None if a node has too few steps or does not report
        its busy time.
        """
        by_node: dict[str, list[tuple[float, float, float]]] = {node: [] for node in members}
        for counts in self.workers.values():
            if counts.steps < MIN_STEPS:
                return None
            if counts.node in by_node:
                by_node[counts.node].append(counts.per_step())
        if len(by_node) < 2 or not all(by_node.values()):
            return None
        all_steps = [counts for counts_ in by_node.values() for counts in counts_]
        shares = {
            node: StepShare(max(busy for _, busy, _ in counts_), fmean(n for *_, n in counts_))
            for node, counts_ in by_node.items()
        }
        step_s = median(seconds for seconds, *_ in all_steps)
        return StepWindow(job, step_s, shares) if step_s > 0 else None

    def start_next(self, now: float) -> None:
        """Start the next window."""
        self.began = now
        for counts in self.workers.values():
            counts.began = counts.now


class SlowNodeWatch:
    """Compares the nodes of all jobs of one daemon."""

    def __init__(self, core: Core, state: DaemonState, lease_actions: LeaseActions) -> None:
        self._core = core
        self._slow = state.slow
        self._lease_actions = lease_actions
        self._policy = slow_node_policy(core.config)
        self._window_s = core.config.nodes.slow_after / WINDOWS_PER_NODE
        self._rounds: dict[str, _Round] = {}

    def heard(self, node: str, run: ActiveJob, record: Progress) -> None:
        """Add the counts of one worker.

        Args:
            node: node of the worker.
            run: its job.
            record: its cumulative counts.
        """
        generation = run.rounds.generation
        if self._policy == "off" or record.busy is None or record.generation != generation:
            return
        job = run.row.id
        round_ = self._rounds.get(job)
        if round_ is None or round_.generation != generation:
            round_ = self._rounds[job] = _Round(generation, self._core.clock.now())
        worker = round_.workers.get(record.rank)
        if worker is None or worker.node != node or worker.now.pid != record.pid:
            round_.workers[record.rank] = _Counts(node, record, record)
        elif record.steps > worker.now.steps:
            worker.now = record

    def look(self, now: float) -> None:
        """Compare the nodes of finished windows. Call it about every half second."""
        for job, round_ in list(self._rounds.items()):
            run = self._core.runs.get(job)
            if run is None:
                del self._rounds[job]
                self._slow.ended(job)
            elif (
                now - round_.began >= self._window_s
                and run.rounds.stage is RoundStage.RUNNING
                and run.rounds.generation == round_.generation
                and (window := round_.window(job, run.rounds.members)) is not None
            ):
                round_.start_next(now)
                self._compare(run, window)

    def _compare(self, run: ActiveJob, window: StepWindow) -> None:
        with self._core.transaction() as now:
            compared = self._slow.compare(window, now)
            self._report(run, compared, now)
            job = self._core.controller.jobs[run.row.id]
            slow_nodes_ = self._slow.current(now)
            links = {n: s for n, s in self._slow.links(now).items() if n in window.shares}
            slow = {n: slow_nodes_[n] for n in window.shares if n in compared.slow or n in links}
            saved_s = window.saved_s(
                frozenset(slow), max((s.slowdown for s in links.values()), default=1.0)
            )
            worth = bool(slow) and saved_s >= MIN_LOST_FRACTION * window.step_s
            if (
                worth
                and self._policy == "swap"
                and self._swap_pays(job, window, slow, saved_s, slow_nodes_)
            ):
                self._swap(slow)

    def _report(self, run: ActiveJob, compared: Compared, now: float) -> None:
        core, job = self._core, run.row.id
        for node in compared.fresh:
            sentence = self._slow.current(now)[node].sentence
            core.audit.record(
                EventKind.NODE_SLOW, sentence, job=job, node=node, slowdown=compared.slow[node]
            )
        if compared.uneven:
            core.repository.notice(run, UNEVEN)
        for node in compared.cleared:
            core.audit.record(EventKind.NODE_NOT_SLOW, UNEVEN, job=job, node=node)

    def _swap_pays(
        self,
        job: JobRecord,
        window: StepWindow,
        slow: Mapping[str, SlowNode],
        saved_s: float,
        slow_nodes_: Mapping[str, SlowNode],
    ) -> bool:
        controller = self._core.controller
        if job.rescaling or job.state is not JobState.RUNNING or set(job.nodes) != {*window.shares}:
            return False
        nodes, planning = controller.nodes, controller.settings.planning
        pool = nodes[job.nodes[0]].pool
        cost = job.cost or planning.cost
        swap = Swap(
            len(job.nodes),
            len(slow),
            sum(nodes[n].pool == pool and n not in slow_nodes_ for n in controller.state.idle),
            window.step_s,
            saved_s,
            cost.up_s,
            cost.down_s,
            planning.t_fwd_s,
        )
        curve = job.curve
        return swap.pays(
            lambda k: curve.at(k) if curve else k**planning.prior_exponent, job.accepts
        )

    def _swap(self, slow: Mapping[str, SlowNode]) -> None:
        for node, slow_node in slow.items():
            sentence = f"{slow_node.sentence} The job is faster without it."
            within_s = self._core.controller.settings.reclaim_s
            self._lease_actions.reclaim((node,), within_s, sentence)
