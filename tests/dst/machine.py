"""The main scheduler and its nodes: gaps, leases, its own jobs, and its faults.

A lease is a process on a node, the agent. Jobs of the main scheduler take nodes at any time: a
leased one with a notice (SIGTERM, and SIGKILL after the grace time) or without. The main scheduler
may be slow, refuse, not answer, or carry out a request without an answer. It never gives a wrong
answer about who is on a node.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from scavenger.interface import (
    Contact,
    Gap,
    Lease,
    LeaseRequest,
    LeaseState,
    PollResult,
    SchedulerError,
)
from tests.dst.head import GRACE_S
from tests.dst.loop import VirtualLoop
from tests.dst.network import Network

REAPED_S = 0.3
"""Maximum time for which processes of an ended lease stay on its node, seconds."""


@dataclass
class MachineLease:
    """The main scheduler's record of a lease."""

    request: LeaseRequest
    state: LeaseState = LeaseState.PENDING
    reason: str = ""
    gone_at: float | None = None
    agent: Any = None
    began: float | None = None
    ended: float | None = None
    over: bool = False
    """The agent has ended, and its processes are being removed."""


@dataclass
class Node:
    """One node. ``launchers``: what runs there of jobs."""

    name: str
    up: bool = True
    busy_until: float = 0.0
    """A job of the main scheduler runs on it until then."""
    lease: str = ""
    idle_since: float = 0.0
    launchers: list[Any] = field(default_factory=list)


class Machine:
    """A main scheduler, as used by :class:`scavenger.interface.Scavenger`.

    Args:
        start_agent: starts the agent of a lease on its node and returns it.
    """

    name = "imagined"

    def __init__(
        self,
        loop: VirtualLoop,
        rng: Random,
        network: Network,
        count: int,
        start_agent: Callable[[MachineLease, Node], Any],
        say: Callable[[str, str], None],
    ) -> None:
        self._loop, self._rng, self._network, self._say = loop, rng, network, say
        self._start_agent = start_agent
        self.nodes = {f"n{i}": Node(f"n{i}") for i in range(count)}
        self.leases: dict[str, MachineLease] = {}
        self.trouble = ""
        """Present fault: ``down``, ``deaf`` (carries out requests without an answer), ``refuses``,
        ``garbles`` (its output shows a part of the leases as ended).
        """

    # --- what the daemon asks ---

    def know(
        self, leases: Mapping[str, str], nodes: Mapping[str, str], jobs: Mapping[str, str]
    ) -> None:
        """Do nothing: the machine knows its leases."""

    def contact(self) -> Contact:
        return Contact()

    def check(self) -> list[tuple[bool, str]]:
        return []

    def poll(self) -> PollResult:
        if self.trouble in ("down", "deaf"):
            raise SchedulerError("The main scheduler does not answer.")
        now = self._loop.time()
        gaps = [
            Gap(n.name, self._loop.wall() - now + n.idle_since)
            for n in self.nodes.values()
            if self._idle(n)
        ]
        leases = [
            self._shown(lease)
            for lease in self.leases.values()
            if lease.ended is None or now - lease.ended < 10.0
        ]
        return PollResult(self._loop.wall(), tuple(gaps), tuple(leases), len(self.nodes), len(gaps))

    def _shown(self, lease: MachineLease) -> Lease:
        request = lease.request
        gone_at = None if lease.gone_at is None else lease.gone_at + self._wall
        # A job waits already for the nodes of some leases.
        waited_s = GRACE_S / 2 if int(request.id.removeprefix("l")) % 3 == 0 else None
        return Lease(
            request.id,
            f"s{request.id}",
            lease.state,
            request.node if lease.state is not LeaseState.PENDING else "",
            lease.reason,
            gone_at,
            None if lease.began is None else lease.began + self._wall,
            None if lease.ended is None else lease.ended + self._wall,
            leave_by=None if gone_at is None or waited_s is None else gone_at - waited_s,
        )

    @property
    def _wall(self) -> float:
        return self._loop.wall() - self._loop.time()

    def take(self, requests: Sequence[LeaseRequest]) -> list[Lease]:
        if self.trouble == "down":
            raise SchedulerError("The main scheduler does not answer.")
        taken = []
        for request in requests:
            if self.trouble == "refuses":
                refusal = "The account has no right to submit."
                taken.append(Lease(request.id, "", LeaseState.ENDED, request.node, refusal))
                continue
            if request.id not in self.leases:
                self.leases[request.id] = MachineLease(request)
                self._say("scheduler", f"queues {request.id} for {request.node}")
                self._network.later(self._rng.uniform(0.1, 2.0), self._place, request.id)
            taken.append(self._shown(self.leases[request.id]))
        if self.trouble == "deaf":
            raise SchedulerError("The main scheduler did not answer within 30 s.")
        return taken

    def give_back(self, leases: Sequence[Lease]) -> None:
        if self.trouble == "down":
            raise SchedulerError("The main scheduler does not answer.")
        for each in leases:
            lease = self.leases.get(each.id)
            if lease is None or lease.state is LeaseState.ENDED:
                continue
            self._say("scheduler", f"cancels {each.id}")
            if lease.state is LeaseState.PENDING:
                self._end(lease, "cancelled")
            else:
                self._terminate(lease, "cancelled")
        if self.trouble == "deaf":
            raise SchedulerError("The main scheduler did not answer within 30 s.")

    # --- leases ---

    def _idle(self, node: Node) -> bool:
        return node.up and not node.lease and node.busy_until <= self._loop.time()

    def _place(self, lease_id: str) -> None:
        lease = self.leases[lease_id]
        if lease.state is not LeaseState.PENDING:
            return
        node = self.nodes[lease.request.node]
        if not self._idle(node):
            self._network.later(1.0, self._place, lease_id)
            return
        lease.state, node.lease = LeaseState.RUNNING, lease_id
        lease.began = self._loop.time()
        self._say("scheduler", f"starts {lease_id} on {node.name}")
        lease.agent = self._start_agent(lease, node)

    def _terminate(self, lease: MachineLease, reason: str) -> None:
        """SIGTERM now, SIGKILL after the grace."""
        if lease.gone_at is None and not lease.over:
            lease.gone_at, lease.reason = self._loop.time() + GRACE_S, reason
            self._loop.signal(lease.agent.process, signal.SIGTERM)
            self._network.later(GRACE_S, self._kill_left, lease)

    def _kill_left(self, lease: MachineLease) -> None:
        if not lease.over:
            self._say("scheduler", f"kills {lease.request.id}")
            lease.agent.kill()

    def agent_ended(self, lease: MachineLease) -> None:
        """The agent of the lease has ended, or was killed. What it leaves ends too."""
        if lease.over:
            return
        lease.over = True
        node = self.nodes[lease.request.node]
        for launcher in list(node.launchers):
            self._network.later(self._rng.uniform(0.0, REAPED_S), launcher.kill)
        self._network.later(REAPED_S, self._cleared, lease)

    def _cleared(self, lease: MachineLease) -> None:
        node = self.nodes[lease.request.node]
        node.lease = ""
        node.idle_since = self._loop.time()
        self._end(lease, lease.reason or "the agent ended")

    def _end(self, lease: MachineLease, reason: str) -> None:
        lease.state, lease.reason, lease.ended = LeaseState.ENDED, reason, self._loop.time()
        self._say("scheduler", f"has ended {lease.request.id}: {reason}")

    # --- what happens to nodes ---

    def want(self, name: str, for_s: float, notice: bool) -> None:
        """A job of the main scheduler takes the node, as soon as it is free."""
        node = self.nodes[name]
        if not node.up:
            return
        lease = self.leases.get(node.lease)
        self._say("scheduler", f"wants {name}{'' if notice else ' at once'}")
        if lease is not None and not lease.over:
            if notice:
                self._terminate(lease, "preempted")
            else:
                lease.reason = "preempted"
                lease.agent.kill()
            self._network.later(REAPED_S + 0.1, self._occupy, name, for_s, 40)
        else:
            self._occupy(name, for_s, 40)

    def _occupy(self, name: str, for_s: float, tries: int) -> None:
        node = self.nodes[name]
        if node.lease and tries:
            self._network.later(0.3, self._occupy, name, for_s, tries - 1)
        elif node.up and not node.lease:
            node.busy_until = self._loop.time() + for_s
            node.idle_since = node.busy_until

    def power_fails(self, name: str, for_s: float) -> None:
        """The node is gone at one moment, without a word to anybody."""
        node = self.nodes[name]
        if not node.up:
            return
        self._say("fault", f"the power of {name} fails for {for_s:.1f} s")
        node.up = False
        self._network.cut_off(name)
        for launcher in list(node.launchers):
            launcher.kill()
        lease = self.leases.get(node.lease)
        if lease is not None and not lease.over:
            lease.reason = "the node does not respond"
            lease.agent.kill()
        self._network.later(for_s, self._boots, name)

    def _boots(self, name: str) -> None:
        self.nodes[name].up = True
        self.nodes[name].idle_since = self._loop.time()
        self._network.mend(name)

    @property
    def active_leases(self) -> list[str]:
        """The leases that have not ended."""
        return [i for i, each in self.leases.items() if each.state is not LeaseState.ENDED]
