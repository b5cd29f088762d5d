"""What agents say, turned into events: who is there, who leaves, how their jobs stand.

Decides when an agent counts as lost and that an agent speaks only of the job it holds. What follows
from the news is the controller's and the rounds' decision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import structlog

from malletrain import __version__
from malletrain.core.events import RoundInterrupted
from malletrain.core.fabric import with_addresses
from malletrain.daemon import losses
from malletrain.daemon.adoption import Adoption
from malletrain.daemon.agents import LeasedAgent
from malletrain.daemon.arrivals import Arrivals
from malletrain.daemon.bandwidth import Bandwidth
from malletrain.daemon.core import Core
from malletrain.daemon.departures import RECLAIMED, RELEASED, SICK, Departures
from malletrain.daemon.hearing import Ear
from malletrain.daemon.hung import HungSteps
from malletrain.daemon.job_repository import ActiveJob
from malletrain.daemon.lease_actions import LeaseDesk
from malletrain.daemon.logsink import LogSink
from malletrain.daemon.parts import Parts
from malletrain.daemon.probes import Probes
from malletrain.daemon.reports import AgentReports
from malletrain.daemon.slow_links import SlowLinkWatch
from malletrain.daemon.slow_nodes import SlowNodeWatch
from malletrain.daemon.stuck import StuckRounds, warn_of_silence
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind, LeaseStatus
from malletrain.protocol.phases import BROKEN
from malletrain.rounds.interface import RoundStage
from malletrain.store.records import LeaseRow

log = structlog.get_logger(__name__)


class Inbox:
    """Handles every message of every agent. ``boot`` names this start of the daemon."""

    def __init__(
        self,
        core: Core,
        parts: Parts,
        departures: Departures,
        desk: LeaseDesk,
        logs: LogSink,
        boot: str,
    ) -> None:
        self.core = core
        self.departures = departures
        self.desk = desk
        slow = SlowNodeWatch(core, parts, desk)
        self.reports = AgentReports(core, logs, slow)
        self.boot = boot
        self.probes = Probes(core.agents)
        self._hung, links = HungSteps(core), SlowLinkWatch(core, desk, self.probes)
        stuck, bandwidth = StuckRounds(core, self.probes), Bandwidth(core, self.probes)
        self._watches = (stuck, self._hung, bandwidth, slow, links)
        self.arrivals = Arrivals(parts)
        self.poll_soon = parts.poll_soon
        self.adopting: Adoption | None = Adoption(core.agents)
        self._table: dict[type, Callable[[LeasedAgent, ActiveJob, Any], None]] = {
            messages.Phase: self._phase,
            messages.StoreUp: self._store_up,
            messages.Drained: self._drained,
            messages.Worth: self.reports.worth,
            messages.Progress: self.reports.progress,
            messages.Mark: lambda agent, run, m: run.monitor.mark(m),
            messages.Metric: self.reports.metric,
            messages.Notice: self.reports.notice,
            messages.Doubt: self._doubt,
            messages.Stacks: self._hung.said,
        }

    def handle(self, peer: bytes, lease: str, message: Any) -> None:
        """One message of the agent of ``lease``."""
        core = self.core
        if isinstance(message, messages.Hello):
            self._hello(peer, lease, message)
            return
        agent = core.agents.of_lease(lease)
        if agent is None:
            self._last_words(peer, lease, message)
            return
        self._seen(agent, peer)
        if isinstance(message, messages.Heartbeat):
            agent.beat(message)
            core.transmit(peer, (messages.WhoAreYou, messages.Alive)[agent.welcomed](self.boot))
        elif isinstance(message, messages.Warm):
            with core.step() as now:
                self.arrivals.warm(agent, message.keys, now)
        elif isinstance(message, messages.Leaving):
            with core.step():
                self.departures.notice(agent, message.in_s, message.reason)
        elif isinstance(message, messages.Sick):
            with core.step():
                self.desk.sick(agent, message.sentence, message.broken)
        elif isinstance(message, messages.Released):
            self._released(agent, message.job)
        elif isinstance(message, messages.LogChunk):
            self.reports.log_chunk(agent, message)
        elif isinstance(message, messages.LogEnd):
            self.reports.log_end(agent, message)
        elif isinstance(message, messages.ProbeUp):
            self.probes.up(agent.node, message)
        elif isinstance(message, messages.Probed):
            self.probes.tried(agent.node, message)
        elif isinstance(message, messages.LogsShipped):
            if agent.holds != message.job:  # else it is of the time before it got the job again
                agent.shipping.discard(message.job)
        elif type(message) in self._table:
            job = message.assignment.job if isinstance(message, messages.Phase) else message.job
            run = core.runs.get(job)
            heard = not agent.releasing or isinstance(
                message, messages.Progress
            )  # what was done before the release counts
            if run is not None and agent.holds == job and heard:
                self._table[type(message)](agent, run, message)
        else:
            core.transmit(peer, messages.Error(f"An agent may not send {type(message).__name__}."))

    def _last_words(self, peer: bytes, lease: str, message: Any) -> None:
        """A message of an agent that has no node for jobs: it may send logs if it was dismissed."""
        core = self.core
        agent = core.agents.dismissed(lease)
        if agent is None:
            core.transmit(peer, messages.WhoAreYou(self.boot))
        elif isinstance(message, messages.Heartbeat):
            core.transmit(peer, messages.Alive(self.boot))
        elif isinstance(message, messages.LogChunk):
            self.reports.log_chunk(agent, message)
        elif isinstance(message, messages.LogEnd):
            self.reports.log_end(agent, message)
        elif isinstance(message, messages.LogsShipped):
            agent.shipping.discard(message.job)
            if not agent.shipping:
                self.desk.let_go(lease)

    def watch(self) -> None:
        """Look for agents that have fallen silent; call it every half second or so."""
        core, limit = self.core, self.core.config.daemon.agent_timeout
        if self.adopting is None and self._deaf():
            return
        now = core.clock.now()
        for agent in self.core.agents:
            if now - agent.last_seen > limit:
                self._lost(agent, f"nothing was heard of its agent for {limit:g} s")
            elif agent.unreachable_since is not None and now - agent.unreachable_since > limit / 2:
                self._lost(agent, "the connection of its agent ended and did not come back")
        for run in list(core.runs.values()):
            warn_of_silence(core, run, now)
        with core.step():
            self.arrivals.look(now)
        self.probes.tick(now)
        if self.adopting is None:
            for watch in self._watches:
                watch.look(now)

    def _deaf(self) -> bool:
        """Whether the daemon hears hardly anybody now, which is its own trouble."""
        core = self.core
        with core.step() as now:
            last_heard = [agent.last_seen for agent in core.agents]
            ear = core.hearing.listen(last_heard, now)
            if ear is Ear.DEAF:
                core.deaf(now)
            elif ear is Ear.BACK:
                core.hear_again("The daemon hears its agents again", now)
            elif core.hearing.settled(last_heard, now):
                core.controller.hold(now)
        return ear is Ear.DEAF

    def probe(self, peers: Collection[bytes]) -> None:
        """The connections of these ended: see who cannot be reached."""
        for agent in self.core.agents:
            if agent.peer not in peers:
                continue
            if agent.unreachable_since is None and not self.core.agents.reach(
                agent, messages.Alive(self.boot)
            ):
                agent.unreachable_since = self.core.clock.now()
                self.core.unreachable(agent.node)
                self.poll_soon.set()
        with self.core.step():
            self.departures.lost_to_peers(self.core.runs.values())

    def _lost(self, agent: LeasedAgent, why: str) -> None:
        with self.core.step():
            self.departures.lost(agent, why)

    # --- who is there ---

    def _seen(self, agent: LeasedAgent, peer: bytes) -> None:
        agent.last_seen = self.core.clock.now()
        if agent.unreachable_since is not None or agent.peer != peer:
            agent.unreachable_since, agent.peer, agent.welcomed = None, peer, False
            for run in self.core.runs.values():
                run.rounds.reachable(agent.node)

    def _hello(self, peer: bytes, lease: str, hello: messages.Hello) -> None:
        core = self.core
        row = core.lease_rows.active.get(lease) or core.store.get_lease(lease)
        if row is None or row.state == LeaseStatus.ENDED or hello.lease != lease:
            core.transmit(peer, messages.Goodbye("This lease has ended."))
            return
        if (
            row.owner and hello.node != row.node
        ):  # the agent is another user's process: it may say much, but not that it is elsewhere
            log.warning(
                "agent refused", lease=lease, owner=row.owner, node=row.node, claimed=hello.node
            )
            core.transmit(peer, messages.Goodbye(f"This lease is for {row.node}."))
            return
        taken_back = core.agents.of_lease(lease) is None and self.adopting is None
        if row.end_reason == RELEASED or (row.end_reason == SICK and taken_back):
            self._dismissed(peer, row, hello)
            return
        known = core.agents.of_lease(lease)
        if known is not None and known.welcomed_at(peer) and hello.again:
            self._seen(known, peer)  # the answer is on its way
            return
        with core.step() as now:
            agent = core.agents.of_lease(lease)
            new = agent is None
            reclaimed = row.end_reason in (RECLAIMED, SICK)  # of which the agent knows nothing
            if row.state == LeaseStatus.LEAVING and hello.leaving_in_s is None and not reclaimed:
                # Not the agent that was told to leave: its lease was requeued and has begun again.
                if agent is not None:
                    self.departures.lost(agent, "its lease has begun again")
                core.transmit(peer, messages.Goodbye("This lease has left."))
                return
            if agent is None:
                if (other := core.agents.on(hello.node)) is not None:
                    self.departures.lost(other, f"lease {lease} has begun on the node")
                node_class = row.node_class if row.owner else hello.node_class
                agent = LeasedAgent(lease, hello.node, peer, hello.host, now, node_class, row.owner)
                core.agents.add(agent)
                if row.state != LeaseStatus.LEAVING:
                    core.lease_rows.update(
                        lease,
                        state=LeaseStatus.RUNNING,
                        node=hello.node,
                        started=row.started or now,
                    )
            self._seen(agent, peer)
            agent.host, agent.networks = hello.host, with_addresses(hello.networks)
            agent.outdated = _outdated(hello.version)
            if new:
                agent.warm = hello.warm
            else:
                self.arrivals.back(agent, hello.warm, now)
            agent.shipping = {*hello.shipping, *([agent.holds] if agent.holds else [])}
            core.agents.reach(agent, self._welcome())
            agent.welcomed = True
            self._settle(agent, hello.assignment, new, now)
            if agent.gone_at is not None:
                self.departures.may_go(agent)  # it may not have heard of it
            elif hello.leaving_in_s is not None:
                self.departures.notice(agent, hello.leaving_in_s, "")
            elif hello.sick:
                self.desk.sick(agent, hello.sick, _broken(hello.assignment))
            elif reclaimed:  # before the daemon's last start
                self.desk.reclaim((agent.node,), core.controller.settings.reclaim_s)
            elif agent.outdated:
                self.desk.free(agent)

    def _welcome(self) -> messages.Welcome:
        config = self.core.config
        return messages.Welcome(self.boot, config.daemon.heartbeat, config.jobs.log_limit)

    def _dismissed(self, peer: bytes, row: LeaseRow, hello: messages.Hello) -> None:
        """An agent that does not know yet that its lease was given back, or whose connection broke
        while it sent its logs.
        """
        core, sentence = self.core, "This lease has ended."
        if not hello.shipping:
            core.transmit(peer, messages.Goodbye(sentence))
            self.desk.let_go(row.id)
            return
        core.transmit(peer, self._welcome())
        agent = core.agents.forget(row.id) or LeasedAgent(
            row.id, hello.node, peer, hello.host, core.clock.now(), row.node_class, row.owner
        )
        agent.peer, agent.shipping = peer, set(hello.shipping)
        agent.holds = hello.assignment.job if hello.assignment else None
        self.desk.dismiss(agent, sentence)

    def _settle(
        self, agent: LeasedAgent, held: messages.Assignment | None, new: bool, now: float
    ) -> None:
        """Bring together what the agent holds and what the daemon thinks it should."""
        core = self.core
        run = core.runs.get(held.job) if held else None
        if run is not None and core.accounts.of(run.spec.owner) != agent.owner:
            log.warning(
                "agent speaks for a job of another user",
                lease=agent.lease,
                owner=agent.owner,
                job=run.row.id,
            )
            run = None
        if new:
            adopted = run is not None and self.adopting is not None
            if held is not None:
                agent.holds = held.job
                if adopted and self.adopting is not None:
                    self.adopting.reported(agent.node, held)
                else:
                    core.agents.release(agent.node, held.job, core.config.jobs.stop_grace)
            job = held.job if held and adopted else None
            self.arrivals.reported(agent, job, job or "", now)
        elif held is None:
            if agent.holds is not None:
                self._released(agent, agent.holds)
        elif run is None or held.job != agent.holds:
            agent.holds = held.job
            core.agents.release(agent.node, held.job, core.config.jobs.stop_grace)
        elif agent.releasing:  # it has not heard of it
            core.agents.release(agent.node, held.job, core.config.jobs.stop_grace)
        elif self.adopting is None or not self.adopting.changed(agent.node, held):
            core.rounds.act(run, run.rounds.phase(agent.node, held, now))

    def adopt(self) -> None:
        """The time to wait after a restart is over: take over the rounds that are whole, have the
        others formed anew.
        """
        found, self.adopting = self.adopting or Adoption(self.core.agents), None
        with self.core.step() as now:
            self.core.controller.hold(now)
            for node, job in found.over(self.core.runs):
                self.core.agents.release(node, job, self.core.config.jobs.stop_grace)
            for job, run in self.core.runs.items():
                phases = found.of(job)
                members = run.row.members or tuple(phases)
                adopted = run.rounds.adopt(run.row.generation, members, phases, now)
                self.core.rounds.act(run, adopted)
                whole = run.rounds.stage is RoundStage.RUNNING and set(
                    run.row.planned_nodes
                ) == set(members)
                if whole:
                    run.monitor.adopted(len(members), now)
                    self.core.audit.record(
                        EventKind.JOB_ADOPTED,
                        f"The job went on meanwhile on {len(members)} nodes.",
                        job=job,
                    )
                else:  # nothing happens to jobs without nodes by it
                    self.core.feed(RoundInterrupted(job))

    # --- how their jobs stand ---

    def _released(self, agent: LeasedAgent, job: str) -> None:
        core = self.core
        with core.step() as now:
            core.agents.released(agent, job)
            if (run := core.runs.get(job)) is not None:
                core.rounds.act(run, run.rounds.released(agent.node, now))
            self.desk.free(agent)
            self.departures.may_go(agent)

    def _phase(self, agent: LeasedAgent, run: ActiveJob, message: messages.Phase) -> None:
        if message.tail:
            run.launcher_tail = message.tail
        losses.note(run, agent.node, message.assignment)
        if self.adopting is not None and self.adopting.changed(agent.node, message.assignment):
            return
        with self.core.step() as now:
            self.core.rounds.act(run, run.rounds.phase(agent.node, message.assignment, now))
            self.departures.lost_to_peers([run])

    def _doubt(self, agent: LeasedAgent, run: ActiveJob, message: messages.Doubt) -> None:
        with self.core.step():
            self.core.rounds.act(run, run.rounds.doubt(agent.node, message.over))

    def _store_up(self, agent: LeasedAgent, run: ActiveJob, message: messages.StoreUp) -> None:
        with self.core.step():
            self.core.rounds.act(
                run, run.rounds.store_up(agent.node, message.generation, message.host, message.port)
            )

    def _drained(self, agent: LeasedAgent, run: ActiveJob, message: messages.Drained) -> None:
        with self.core.step() as now:
            if message.sentence:
                # Whoever wonders where samples went wants it: its workers may just be starting.
                self.core.audit.record(
                    EventKind.DRAIN_WITHOUT_SNAPSHOT,
                    message.sentence,
                    job=run.row.id,
                    node=agent.node,
                )
            drained = run.rounds.drained(agent.node, message.generation, now, message.number)
            self.core.rounds.act(run, drained)


def _outdated(version: str | None) -> str:
    """Why an agent of this version of malletrain is replaced; empty: it is of the daemon's. None:
    it does not say which.

    What this daemon says may have fields that it does not know. Jobs go on with it meanwhile.
    """
    if version == __version__:
        return ""
    which = "an earlier malletrain" if version is None else f"malletrain {version}"
    return f"Its agent is of {which}, the daemon of {__version__}."


def _broken(held: messages.Assignment | None) -> bool:
    """Whether the workers that an agent has have failed."""
    return held is not None and held.phase in BROKEN
