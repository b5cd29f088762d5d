"""What a proxy knows of how its nodes come and go: from that, the prospect of each. Pure.

The daemon's forecast of how long a node lasts counts. Without one it is age: gaps that have lasted
are those that last, on every machine that was looked at, and the age told nearly as much as knowing
the ends (docs/infinicache.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinicache.entries import PoolNode
from infinicache.placement import NO_PROSPECT, Prospect, bonds_of

TOGETHER_S = 30.0
"""Nodes that came within so many seconds came together."""


@dataclass(frozen=True)
class _Arrival:
    name: str
    at: float


class NodeArrivals:
    """The nodes of one proxy. Times are the caller's, in seconds."""

    def __init__(self) -> None:
        self._came: dict[str, _Arrival] = {}
        self._lasts: dict[str, tuple[float, float]] = {}

    def came(self, address: str, name: str, age_s: float, now: float) -> None:
        """A process registers; it has been up for ``age_s`` on the node called ``name``."""
        self._came.setdefault(address, _Arrival(name, now - age_s))

    def update_lifetimes(self, lasts: Mapping[str, float], now: float) -> None:
        """Address → seconds that its node is expected to last from now on."""
        self._lasts = {address: (lasts_s, now) for address, lasts_s in lasts.items()}

    def remove(self, address: str) -> None:
        """The node is gone."""
        self._came.pop(address, None)

    def prospect(self, address: str, now: float) -> Prospect:
        """What is expected of a node."""
        arrival = self._came.get(address)
        if arrival is None:
            return NO_PROSPECT
        lasts_s, reported_at = self._lasts.get(address, (now - arrival.at, now))
        return Prospect(
            max(0.0, lasts_s - (now - reported_at)),
            bonds_of(arrival.name, f"{arrival.at // TOGETHER_S:.0f}"),
        )


def peer_of(nodes: Mapping[str, PoolNode], address: str, peer: str | None) -> str | None:
    """Who is to keep copies of a node's chunks: ``peer`` as long as it can, else the next one after
    the node that does not leave with it. None where the node is not known.
    """
    if address not in nodes:
        return None
    if peer in nodes and not nodes[str(peer)].leaving:
        return peer
    at = [*nodes].index(address) + 1
    others = [a for a in (*[*nodes][at:], *nodes) if a != address and not nodes[a].leaving]
    bonds = set(nodes[address].prospect.bonds)
    apart = [a for a in others if not bonds & set(nodes[a].prospect.bonds)]
    return next(iter(apart or others), None)
