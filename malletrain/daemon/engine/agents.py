"""Tracks the connected agents: the job that each of them runs, and what their silence means.

Decides that an agent holds one job at a time, that a new job is assigned only after the previous
one is released, and that an agent never gets a job of another user than its lease's owner: the code
of a job runs only as the job's owner. The rounds decide which job belongs on which node.

:class:`LivenessMonitor` decides whether silent agents are lost, or the daemon itself is cut off
from them. A daemon that was stopped, swapped out or suspended with its machine receives nothing for
that time. One whose link is down receives nothing at all. The agents continue to train meanwhile.
:mod:`malletrain.daemon.engine.decisions` acts on the decision: while the daemon is cut off, no
agent is declared lost, no time limit runs and nothing is planned.

:class:`Adoption` collects the jobs that agents report between the start of the daemon and its first
plan. A job's rounds adopt all their nodes together and would release a node that reports earlier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass, field
from enum import Enum

import structlog

from malletrain.protocol import messages
from malletrain.protocol.messages import Assignment
from malletrain.protocol.payloads import NodeNetwork

log = structlog.get_logger(__name__)
LATE_S = 2.0
"""A check later than this after the previous one means that the daemon stood still."""
PARTIAL_TIMEOUTS = 3.0
"""Maximum time for which most agents may be silent while others are heard, in agent time-outs.
After it the silent agents are declared lost: a part of the machine failed, not the daemon's
connection.
"""


@dataclass
class LeasedAgent:
    """One leased node, as its agent reports it."""

    lease: str
    """Id of the lease."""
    node: str
    """Name of the node."""
    peer: bytes
    """Address of the agent's connection."""
    host: str
    """Address at which the agent reaches other nodes and they reach it."""
    last_seen: float
    """Time of its last message, seconds."""
    node_class: str = "default"
    """Class of the node."""
    owner: str = ""
    """Owner of the lease; empty for the daemon's own user."""
    reclaimed: bool = False
    """Whether MalleTrain itself takes the node back: another owner's jobs need it more, or it is
    sick.
    """
    gone_at: float | None = None
    """Time at which the node will be gone; None if it stays."""
    holds: str | None = None
    """Job whose processes may be on the node; None if there is none."""
    releasing: bool = False
    """Whether the agent was told to stop that job."""
    spare: bool = False
    """Whether the lease ends as soon as the agent is free of that job."""
    following: messages.Assign | None = None
    """Next assignment, sent when the agent is free of that job; None if there is none."""
    shipping: set[str] = field(default_factory=set)
    """Jobs whose logs the agent may not have sent completely."""
    unreachable_since: float | None = None
    """Time since which messages cannot be delivered; None if they can."""
    welcomed: bool = False
    """Whether its Hello was answered over its current connection."""
    rss_bytes: int = 0
    """Resident memory of the agent."""
    memory_bytes: int = 0
    """Memory of the node that a job's snapshots occupy."""
    warm_bytes: int = 0
    """Memory of its warm fork servers."""
    warm: tuple[str, ...] | None = None
    """Keys of the interpreters that are warm there or failed to start; None if the agent warms up
    none.
    """
    awaited: str = ""
    """Key of the interpreter that has to be warm before jobs get the node; empty if the node is
    available.
    """
    awaited_until: float = 0.0
    """Time from which jobs get the node even if the interpreter is not warm."""
    warm_up_sent_at: float = 0.0
    """Time at which the last warm-up request was sent."""
    networks: tuple[NodeNetwork, ...] = ()
    """Networks of the node."""
    gpus: int = 0
    """Number of GPUs of the node."""
    cores: int = 0
    """Number of cores that the processes of a job may use there; 0 if unknown."""
    outdated: str = ""
    """Why the agent is replaced as soon as it has no job, as a sentence: it has another version of
    malletrain. Empty if it has the daemon's version.
    """

    def welcomed_at(self, peer: bytes) -> bool:
        """Whether its Hello was answered over this connection, and the connection can be used."""
        return self.welcomed and self.peer == peer and self.unreachable_since is None

    def beat(self, heartbeat: messages.Heartbeat) -> None:
        """Take over the memory use in a heartbeat."""
        self.rss_bytes, self.warm_bytes = heartbeat.rss_bytes, heartbeat.warm_bytes
        self.memory_bytes = heartbeat.memory_bytes


class Agents:
    """All connected agents, by lease and by node. ``send(peer, message) -> reachable`` is the
    transport's; ``account``: returns the owner of the leases on which a user's jobs run.
    """

    def __init__(
        self,
        send: Callable[[bytes, messages.Message], bool],
        account: Callable[[str], str] = lambda user: "",
    ) -> None:
        self._send = send
        self._account = account
        self._by_lease: dict[str, LeasedAgent] = {}
        self._by_node: dict[str, LeasedAgent] = {}
        self._dismissed: dict[str, LeasedAgent] = {}

    def __iter__(self) -> Iterator[LeasedAgent]:
        return iter(list(self._by_lease.values()))

    def of_lease(self, lease: str) -> LeasedAgent | None:
        return self._by_lease.get(lease)

    def on(self, node: str) -> LeasedAgent | None:
        return self._by_node.get(node)

    def add(self, agent: LeasedAgent) -> None:
        self._by_lease[agent.lease] = agent
        self._by_node[agent.node] = agent

    def remove(self, agent: LeasedAgent) -> None:
        self._by_lease.pop(agent.lease, None)
        if self._by_node.get(agent.node) is agent:
            del self._by_node[agent.node]

    def dismiss(self, agent: LeasedAgent) -> None:
        """Take an agent's node from jobs. The agent may still send logs."""
        self.remove(agent)
        self._dismissed[agent.lease] = agent

    def dismissed(self, lease: str) -> LeasedAgent | None:
        """Return the agent of a lease that is given back as soon as its logs have arrived."""
        return self._dismissed.get(lease)

    def forget(self, lease: str) -> LeasedAgent | None:
        """Remove a dismissed agent: its logs have arrived."""
        return self._dismissed.pop(lease, None)

    def shipping(self, job: str) -> bool:
        """Whether some agent may still send logs of ``job``."""
        tables = (self._by_lease, self._dismissed)
        return any(job in agent.shipping for agents in tables for agent in agents.values())

    def heard(self, at: float) -> None:
        """Treat all agents as heard at ``at``, which may be in the future, because they were not
        the cause of the silence.
        """
        for agent in self:
            agent.last_seen = at
            if agent.unreachable_since is not None:
                agent.unreachable_since = at

    def memory(self) -> dict[str, int]:
        """Return job → bytes of memory that its snapshots occupy on all nodes."""
        bytes_by_job: dict[str, int] = {}
        for agent in self:
            if agent.holds and agent.memory_bytes:
                bytes_by_job[agent.holds] = bytes_by_job.get(agent.holds, 0) + agent.memory_bytes
        return bytes_by_job

    def tell(self, node: str, message: messages.Message) -> None:
        """Send a message to the agent on ``node``. An agent that cannot be reached is marked and
        never receives it; the state in its next Hello is reconciled.
        """
        agent = self._by_node.get(node)
        if agent:
            self.reach(agent, message)

    def reach(self, agent: LeasedAgent, message: messages.Message) -> bool:
        """Send a message. If the agent cannot be reached, note since when. Return whether it was
        reached.
        """
        if self._send(agent.peer, message):
            return True
        if agent.unreachable_since is None:
            agent.unreachable_since = agent.last_seen
        return False

    def assign(self, node: str, message: messages.Assign) -> bool:
        """Make the agent start ``message.job``, now or when it is free of another job. Returns
        whether another job has to stop first.
        """
        agent = self._by_node.get(node)
        if agent is None:
            return False
        if self._account(message.spec.owner) != agent.owner:
            log.error(
                "job not assigned: the lease is another user's",
                job=message.job,
                owner=message.spec.owner,
                lease=agent.lease,
            )
            return False
        agent.spare = False
        if agent.holds is None or (agent.holds == message.job and not agent.releasing):
            agent.holds, agent.following = message.job, None
            agent.shipping.add(message.job)
            self.reach(agent, message)
            return False
        agent.following = message
        return agent.holds != message.job

    def release(self, node: str, job: str, grace_s: float) -> bool:
        """Make the agent stop ``job``.

        Args:
            node: node of the agent.
            job: id of the job.
            grace_s: time between SIGTERM and SIGKILL, seconds.

        Returns:
            Whether to wait for the job to stop. False if the agent never started it.

        """
        agent = self._by_node.get(node)
        if agent is None:
            return False
        if agent.following is not None and agent.following.job == job:
            agent.following = None
        if agent.holds != job:
            return False
        agent.releasing = True
        self.reach(agent, messages.Release(job, grace_s))
        return True

    def released(self, agent: LeasedAgent, job: str) -> None:
        """Record that the agent is free of ``job``, and send its next assignment."""
        if agent.holds == job:
            agent.holds, agent.releasing = None, False
        if agent.holds is None and agent.following is not None and agent.gone_at is None:
            self.assign(agent.node, agent.following)


class Adoption:
    """The reports of agents after one start of the daemon."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._assignments: dict[str, dict[str, Assignment]] = {}

    def record(self, node: str, assignment: Assignment) -> None:
        """Record the assignment in an agent's Hello."""
        self._assignments.setdefault(assignment.job, {})[node] = assignment

    def update(self, node: str, assignment: Assignment) -> bool:
        """Replace the recorded assignment of a node by a newer one. Return whether there was one
        of this job.
        """
        is_recorded = node in self._assignments.get(assignment.job, {})
        if is_recorded:
            self._assignments[assignment.job][node] = assignment
        return is_recorded

    def of(self, job: str) -> dict[str, Assignment]:
        """Return node → assignment, for the nodes that still hold the job and have not been
        lost.
        """
        assignments = self._assignments.get(job, {})
        agents = {node: self._agents.on(node) for node in assignments}
        return {
            node: assignments[node]
            for node, agent in agents.items()
            if agent is not None and agent.holds == job and not agent.releasing
        }

    def ended_jobs(self, unfinished: Container[str]) -> list[tuple[str, str]]:
        """Return (node, job) of each node that still holds a job that has ended. Its agent does not
        know yet.
        """
        ended = [job for job in self._assignments if job not in unfinished]
        return [(node, job) for job in ended for node in self.of(job)]


class AgentLiveness(Enum):
    """Meaning of the silence of agents."""

    OK = "ok"
    """An agent that exceeds its time-out is lost."""
    PARTITIONED = "partitioned"
    """The daemon is cut off from most or all agents; none of them is lost."""
    RECOVERED = "recovered"
    """The daemon has just begun to receive from the agents again."""


class LivenessMonitor:
    """Interprets the silence of the agents of one daemon.

    Args:
        timeout_s: silence after which a single agent is lost, seconds.
        heartbeat_s: interval of the agents' heartbeats, seconds.
    """

    def __init__(self, timeout_s: float, heartbeat_s: float) -> None:
        self._timeout_s, self._heartbeat_s = timeout_s, heartbeat_s
        self._quiet_s = max(timeout_s / 2, 1.5 * heartbeat_s)
        self._last_check_at: float | None = None
        self.partitioned_since: float | None = None
        """Time at which the daemon was cut off; None if it is not."""
        self._some_since: float | None = None
        """Time within that partition since which some agents are heard without a break; None if all
        are silent.
        """
        self.settling_until: float | None = None
        """Time until which the daemon waits for agents to report again after a partition; None if
        it does not wait.
        """
        self._recovered_at = math.inf

    def settle(self, until: float, recovered_at: float = math.inf) -> None:
        """Wait for the agents to report again.

        Args:
            until: time at which the wait ends, seconds on the daemon's clock.
            recovered_at: time since which agents can be heard, seconds.
        """
        self.settling_until, self._recovered_at = until, recovered_at

    def settled(self, last_heard: Collection[float], now: float) -> bool:
        """Whether that wait has just ended: its time is over, or all agents have been heard.

        A message that was sent before the recovery and read after it does not count: its sender
        may have disconnected since.

        Args:
            last_heard: time of the last message of each agent, seconds.
            now: seconds.
        """
        until, earliest = self.settling_until, self._recovered_at + self._heartbeat_s
        if until is None or (now < until and not all(earliest <= at <= now for at in last_heard)):
            return False
        self.settling_until = None
        return True

    def unheard_s(self, now: float) -> float:
        """Return the seconds since the last call in which the daemon cannot have received anything;
        usually 0. Call it in every batch of messages, and at least every second.
        """
        elapsed_s = 0.0 if self._last_check_at is None else now - self._last_check_at
        self._last_check_at = now
        return elapsed_s if elapsed_s > LATE_S or self.partitioned_since is not None else 0.0

    def check(self, last_heard: Collection[float], now: float) -> AgentLiveness:
        """Interpret the current silence of the agents.

        Args:
            last_heard: time of the last message of each agent, seconds.
            now: seconds.
        """
        # Agents that are cut off together fall silent within one heartbeat, not at one instant.
        silent = sum(now - at > self._quiet_s for at in last_heard)
        most_are_silent = silent >= 2 and 2 * silent > len(last_heard)
        if self.partitioned_since is None:
            if not most_are_silent or all(now - at <= self._timeout_s for at in last_heard):
                return AgentLiveness.OK
            self.partitioned_since = now
        if silent == len(last_heard):
            self._some_since = None
        elif self._some_since is None:
            self._some_since = now
        partial = (
            self._some_since is not None
            and now - self._some_since > PARTIAL_TIMEOUTS * self._timeout_s
        )
        if most_are_silent and not partial:
            return AgentLiveness.PARTITIONED
        self.partitioned_since = self._some_since = None
        return AgentLiveness.OK if most_are_silent else AgentLiveness.RECOVERED
