"""Detects nodes that slow down the others of their job, by their steps or by a slow network link,
and lets jobs continue without them.

Decides when two reports of a worker's counts form a window, and when the link between two nodes is
measured: one pair of a class at a time, and no nodes of a job that rescales or is being profiled.
:mod:`malletrain.core.slow_nodes` decides which pair is next and whose link is slow.
:mod:`malletrain.core.slow_nodes` decides which node is slow and whether a job is better off without
it; the plan decides which nodes it gets instead.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

from malletrain.core.events import JobState
from malletrain.core.records import JobRecord
from malletrain.core.slow_nodes import (
    MIN_LOST_FRACTION,
    MIN_PARTNERS,
    WINDOWS_PER_NODE,
    Compared,
    SlowLink,
    SlowLinks,
    SlowNode,
    StepShare,
    StepWindow,
    Swap,
    measuring_interval_s,
)
from malletrain.daemon.engine.state import SiteState, slow_node_policy
from malletrain.daemon.engine.transactions import Transactions
from malletrain.daemon.jobs.repository import ActiveJob
from malletrain.daemon.leases.actions import LeaseActions
from malletrain.daemon.nodes.probes import Probes, Results
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.messages import Progress
from malletrain.rounds.interface import RoundStage
from scavenger.interface import host_of

SEND_S = 0.1
"""Duration of the measurement of one pair, seconds."""
NO_JOB = ""
"""Group of the idle nodes."""


@dataclass
class _Class:
    """The measurements of one class of nodes."""

    links: SlowLinks = field(default_factory=SlowLinks)
    """Results."""
    began: float = float("-inf")
    """Start of the last measurement, seconds."""
    under_way: bool = False
    """Whether a measurement runs."""


class SlowLinkWatch:
    """Measures the links of all nodes of one daemon."""

    def __init__(
        self,
        state: SiteState,
        transactions: Transactions,
        lease_actions: LeaseActions,
        probes: Probes,
    ) -> None:
        self._state = state
        self._transactions = transactions
        self._slow = state.slow
        self._lease_actions = lease_actions
        self._probes = probes
        self._classes: dict[str, _Class] = {}

    def check(self, now: float) -> None:
        """Begin the measurements that are due. Call it about every half second."""
        config = self._state.config
        if slow_node_policy(config) == "off" or not config.nodes.link_every:
            return
        present: dict[str, list[str]] = {}
        for agent in self._state.agents:
            if agent.gone_at is None and agent.unreachable_since is None:
                present.setdefault(agent.node_class, []).append(agent.node)
        self._classes = {name: self._classes.get(name) or _Class() for name in present}
        for name, nodes in present.items():
            class_state = self._classes[name]
            if not class_state.under_way and now - class_state.began >= measuring_interval_s(
                len(nodes), config.nodes.link_every
            ):
                class_state.began = now
                class_state.links.keep(nodes)
                self._measure(class_state, nodes, now)

    def _measure(self, class_state: _Class, nodes: list[str], now: float) -> None:
        groups = self._groups(nodes, now)
        chosen = class_state.links.next_pair(groups, host_of)
        if chosen is None:
            return
        group, a, b = chosen
        places = self._places(a, b)
        if places is None:
            return

        def done(results: Results) -> None:
            class_state.under_way = False
            result = results.get((a, b))
            at = self._state.clock.now()
            if result is not None and result.reached:
                class_state.links.measured(a, b, group, result.mbit, at)
                self._update_slow_nodes(class_state.links, group, groups[group], (a, b))

        class_state.under_way = True
        self._probes.begin(places, ((a, b),), now, done, SEND_S)

    def _groups(self, nodes: list[str], now: float) -> dict[str, list[str]]:
        """Return job (NO_JOB for idle nodes) → its nodes, for groups that are large enough to
        compare.
        """
        state = self._state
        groups: dict[str, list[str]] = {}
        for node in nodes:
            agent = state.agents.on(node)
            job = (agent.holds if agent else None) or NO_JOB
            if job == NO_JOB or self._settled(job, node):
                groups.setdefault(job, []).append(node)
        slow = self._slow.links(now)
        return {
            group: members
            for group, members in groups.items()
            if len(members) > MIN_PARTNERS or any(node in slow for node in members)
        }

    def _settled(self, job: str, node: str) -> bool:
        """Whether the job trains on the node and does not rescale."""
        run, record = self._state.runs.get(job), self._state.controller.jobs.get(job)
        return (
            run is not None
            and record is not None
            and record.state is JobState.RUNNING
            and not record.rescaling
            and run.rounds.stage is RoundStage.RUNNING
            and node in run.rounds.members
        )

    def _places(self, a: str, b: str) -> dict[str, str] | None:
        """Return the nodes' addresses in the network of their jobs; None if no network is between
        them.
        """
        rounds = self._state.rounds
        fabric = rounds.networks([a, b])
        if fabric is not None and len(fabric.places) > 1:
            places = {node: place.address for node, place in fabric.places.items()}
        else:
            places = {node: rounds.address_of(node) for node in (a, b)}
        if not all(places.values()) or places[a] == places[b]:
            return None
        return None if any(map(_is_loopback, places.values())) else places

    def _update_slow_nodes(
        self, links: SlowLinks, group: str, members: list[str], pair: tuple[str, str]
    ) -> None:
        with self._transactions.begin() as now:
            slow = self._slow.links(now)
            for node in pair:
                if (slow_node := slow.get(node)) and links.well(
                    node, slow_node.link_mbit, slow_node.since
                ):
                    self._record_recovery(node, slow_node.link_mbit)
            for node, link in links.slow(group, members, now).items():
                self._record_slow(node, link, group, now, fresh=node not in slow)

    def _record_slow(
        self, node: str, link: SlowLink, group: str, now: float, *, fresh: bool
    ) -> None:
        sentence = link.sentence(node)
        self._slow.remember(node, SlowNode(now, link.times, sentence, link.usual))
        if fresh:
            self._state.audit.record(
                EventKind.NODE_SLOW,
                sentence,
                job=group,
                node=node,
                slowdown=link.times,
                mbit=round(link.mbit, 1),
                usual_mbit=round(link.usual, 1),
            )
            if group == NO_JOB and slow_node_policy(self._state.config) == "swap":
                self._lease_actions.reclaim(
                    (node,), self._state.controller.settings.reclaim_s, sentence
                )

    def _record_recovery(self, node: str, usual: float) -> None:
        self._slow.link_well(node)
        self._state.audit.record(
            EventKind.NODE_NOT_SLOW,
            f"The link of {node} was measured again and is as fast as those of other nodes.",
            node=node,
            usual_mbit=round(usual, 1),
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


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

    def __init__(
        self, state: SiteState, transactions: Transactions, lease_actions: LeaseActions
    ) -> None:
        self._state = state
        self._transactions = transactions
        self._slow = state.slow
        self._lease_actions = lease_actions
        self._policy = slow_node_policy(state.config)
        self._window_s = state.config.nodes.slow_after / WINDOWS_PER_NODE
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
            round_ = self._rounds[job] = _Round(generation, self._state.clock.now())
        worker = round_.workers.get(record.rank)
        if worker is None or worker.node != node or worker.now.pid != record.pid:
            round_.workers[record.rank] = _Counts(node, record, record)
        elif record.steps > worker.now.steps:
            worker.now = record

    def check(self, now: float) -> None:
        """Compare the nodes of finished windows. Call it about every half second."""
        for job, round_ in list(self._rounds.items()):
            run = self._state.runs.get(job)
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
        with self._transactions.begin() as now:
            compared = self._slow.compare(window, now)
            self._report(run, compared, now)
            job = self._state.controller.jobs[run.row.id]
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
        state, job = self._state, run.row.id
        for node in compared.fresh:
            sentence = self._slow.current(now)[node].sentence
            state.audit.record(
                EventKind.NODE_SLOW, sentence, job=job, node=node, slowdown=compared.slow[node]
            )
        if compared.uneven:
            state.repository.notice(run, UNEVEN)
        for node in compared.cleared:
            state.audit.record(EventKind.NODE_NOT_SLOW, UNEVEN, job=job, node=node)

    def _swap_pays(
        self,
        job: JobRecord,
        window: StepWindow,
        slow: Mapping[str, SlowNode],
        saved_s: float,
        slow_nodes_: Mapping[str, SlowNode],
    ) -> bool:
        controller = self._state.controller
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
            within_s = self._state.controller.settings.reclaim_s
            self._lease_actions.reclaim((node,), within_s, sentence)
