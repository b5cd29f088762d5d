"""The connected agents and the job that each of them works for.

Decides that an agent holds one job at a time, that a new job is assigned only after the previous
one is released, and that an agent never gets a job of another user than its lease's owner: code of
a job runs only as the job's owner. The rounds decide which job belongs on which node, and the
daemon whether a node counts as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import structlog

from malletrain.protocol import messages
from malletrain.protocol.payloads import NodeNetwork

log = structlog.get_logger(__name__)


@dataclass
class LeasedAgent:
    """One leased node, as its agent reports it."""

    lease: str
    node: str
    peer: bytes
    host: str
    last_seen: float
    node_class: str = "default"
    owner: str = ""
    """Whose lease it is, where it is not the daemon's own user's."""
    reclaimed: bool = False
    """MalleTrain itself takes the node back: another owner's jobs need it more, or it is sick."""
    gone_at: float | None = None
    """When the node will be gone; None: nobody wants it."""
    holds: str | None = None
    """The job whose processes may be on it."""
    releasing: bool = False
    """It was told to stop that job."""
    spare: bool = False
    """Its lease ends as soon as it is free of that job."""
    following: messages.Assign | None = None
    """What it gets when it is free of that job."""
    shipping: set[str] = field(default_factory=set)
    """The jobs of whose logs it may not have sent everything."""
    unreachable_since: float | None = None
    welcomed: bool = False
    """Its Hello was answered over the connection that it has now."""
    rss_bytes: int = 0
    memory_bytes: int = 0
    """Of the node's memory: what a job's snapshots take."""
    warm_bytes: int = 0
    """Memory of its warm fork servers."""
    warm: tuple[str, ...] | None = None
    """Keys of the interpreters that are warm there, or cannot be; None: it warms none up."""
    awaited: str = ""
    """The interpreter that has to be warm before jobs get the node; empty: they may have it."""
    awaited_until: float = 0.0
    """When they get it all the same."""
    warm_up_sent_at: float = 0.0
    """When it was told last what to have warm."""
    networks: tuple[NodeNetwork, ...] = ()
    """Those of the node."""
    outdated: str = ""
    """Why it is replaced as soon as it has no job, as a sentence: it is of another version of
    malletrain. Empty: it is of the daemon's.
    """

    def welcomed_at(self, peer: bytes) -> bool:
        """Whether its Hello was answered over this connection, which carries what is sent."""
        return self.welcomed and self.peer == peer and self.unreachable_since is None

    def beat(self, heartbeat: messages.Heartbeat) -> None:
        """Take over what its heartbeat says of memory."""
        self.rss_bytes, self.warm_bytes = heartbeat.rss_bytes, heartbeat.warm_bytes
        self.memory_bytes = heartbeat.memory_bytes


class Agents:
    """All connected agents, by lease and by node. ``send(peer, message) -> reachable`` is the
    transport's; ``account``: on whose leases a user's jobs run.
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
        """The agent has no node for jobs any more; it may still send logs."""
        self.remove(agent)
        self._dismissed[agent.lease] = agent

    def dismissed(self, lease: str) -> LeasedAgent | None:
        """The agent of a lease that is given back as soon as its logs are here."""
        return self._dismissed.get(lease)

    def forget(self, lease: str) -> LeasedAgent | None:
        """Nothing more is expected of a dismissed agent."""
        return self._dismissed.pop(lease, None)

    def shipping(self, job: str) -> bool:
        """Whether some agent may still send logs of ``job``."""
        tables = (self._by_lease, self._dismissed)
        return any(job in agent.shipping for agents in tables for agent in agents.values())

    def heard(self, at: float) -> None:
        """Take all agents to be heard at this time, which may be to come: that they were silent was
        not their doing.
        """
        for agent in self:
            agent.last_seen = at
            if agent.unreachable_since is not None:
                agent.unreachable_since = at

    def memory(self) -> dict[str, int]:
        """Bytes of its nodes' memory that each job's snapshots take."""
        taken: dict[str, int] = {}
        for agent in self:
            if agent.holds and agent.memory_bytes:
                taken[agent.holds] = taken.get(agent.holds, 0) + agent.memory_bytes
        return taken

    def tell(self, node: str, message: messages.Message) -> None:
        """Send to the agent on ``node``; one that cannot be reached is marked and hears it never
        (its Hello tells what it missed).
        """
        agent = self._by_node.get(node)
        if agent:
            self.reach(agent, message)

    def reach(self, agent: LeasedAgent, message: messages.Message) -> bool:
        """Send, and remember since when the agent cannot be reached."""
        if self._send(agent.peer, message):
            return True
        if agent.unreachable_since is None:
            agent.unreachable_since = agent.last_seen
        return False

    def assign(self, node: str, message: messages.Assign) -> bool:
        """Have the agent start ``message.job``, now or when it is free of another. Returns whether
        another is in the way.
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
        """Have the agent stop ``job``. False when it never got that far: nothing is to be waited
        for.
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
        """The agent is free of ``job``: give it what follows."""
        if agent.holds == job:
            agent.holds, agent.releasing = None, False
        if agent.holds is None and agent.following is not None and agent.gone_at is None:
            self.assign(agent.node, agent.following)
