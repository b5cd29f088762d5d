"""Follows the members of a service, and keeps the replicas of a dispatcher equal to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger(__name__)

POLL_WAIT_S = 30.0
"""Maximum time for which the daemon holds back its answer until something changes, seconds."""
RETRY_S = 2.0
"""Seconds until the daemon is asked again after an error."""


@dataclass(frozen=True)
class ServiceMember:
    """A member with an address, as the daemon reports it."""

    node: str
    address: str
    expected_remaining_s: float | None = None
    """Expected remaining time of its node when the view was made, seconds; None: no forecast."""


class ReplicaSet(Protocol):
    """The part of :class:`llmserve.live_dispatcher.LiveDispatcher` that is used."""

    def add_replica(self, name: str, address: str) -> None:
        """Add a replica."""

    def expect_end(self, name: str, seconds: float) -> None:
        """Record a forecast: the number of seconds for which the node of a replica is expected to
        last.
        """

    def remove_replica(self, name: str) -> None:
        """Remove a replica."""


class MembersClient(Protocol):
    """The part of ``malletrain.AsyncClient`` that is used."""

    async def members(self, job: str, *, since: str = "", wait_s: float = 0.0) -> Any:
        """Return the members of a service, after a change since ``since``."""


class ReplicaFollower:
    """Adds and removes replicas of a dispatcher as members of a service come and go. It ignores
    notices: the dispatcher learns from the front of a replica whether the replica is draining.

    Args:
        replicas: the replicas of the dispatcher.
    """

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas
        self._addresses: dict[str, str] = {}
        self._expected: dict[str, float | None] = {}
        """Replica → its expected remaining time, as it was reported last."""

    def apply(self, members: Iterable[ServiceMember]) -> None:
        """Add and remove replicas so that they are the current members."""
        present = {member.node: member for member in members if member.address}
        for node, address in list(self._addresses.items()):
            if node not in present or present[node].address != address:
                self._replicas.remove_replica(node)
                del self._addresses[node]
                self._expected.pop(node, None)
        for node, member in present.items():
            if node not in self._addresses:
                self._replicas.add_replica(node, member.address)
                self._addresses[node] = member.address
            expected_s = member.expected_remaining_s
            if expected_s is not None and expected_s != self._expected.get(node):
                self._replicas.expect_end(node, expected_s)
            self._expected[node] = expected_s

    async def run(self, client: MembersClient, job: str) -> None:
        """Follow a service until it is cancelled. While the daemon is not reachable, replicas stay
        as they are: the dispatcher itself detects the loss of one.
        """
        version, failure = "", ""
        while True:
            try:
                view = await client.members(
                    job, since=version, wait_s=POLL_WAIT_S if version else 0.0
                )
            except asyncio.CancelledError:
                raise
            except Exception as error:  # the daemon is restarted, or the job has ended
                if str(error) != failure:
                    failure = str(error)
                    log.warning("The members of service %s are not known: %s", job, failure)
                version = ""
                await asyncio.sleep(RETRY_S)
                continue
            failure, version = "", view.version
            self.apply(
                ServiceMember(m.node, m.address, m.expected_remaining_s) for m in view.members
            )
            if not version:  # the service has ended; another one of this name may start
                await asyncio.sleep(RETRY_S)
