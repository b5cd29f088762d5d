"""Slots of the embedded cluster: what its virtual hosts have, what main jobs take of it, and which
slots are idle.

Decides which leases a main job preempts, and which GPUs a lease gets. A virtual host has made-up
resources (:class:`Division`). A trace with amounts says what part of a host is idle: main jobs have
the rest of each resource, rounded up. :mod:`scavenger.batch.slots` decides, as for the batch
schedulers, which slots are idle beside them. Pure: starts and ends nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from scavenger.batch.rules import NodeFacts
from scavenger.batch.slots import (
    Amounts,
    HostResources,
    LeasedSlot,
    Neighbour,
    SlotKind,
    capacity,
    slot_facts,
)
from scavenger.interface import kind_of, slot_name

GPU = "gpu"
"""Name of the GPUs in amounts."""
MAIN_JOB = Neighbour("a user of the main scheduler", "main")
"""What main jobs of the trace count as beside a slot."""


@dataclass(frozen=True)
class Division:
    """What each virtual host has, and the kinds of slots into which hosts are divided."""

    total: Amounts = field(default_factory=dict)
    """Resources of a host: ``gpu``, ``cpus``, ``memory_mb``."""
    kinds: tuple[SlotKind, ...] = ()
    """Kinds of slots; empty: a lease has a whole node."""

    def to_json(self) -> str:
        """Return the division as JSON, for a command line."""
        kinds = [{**asdict(kind), "nodes": sorted(kind.nodes)} for kind in self.kinds]
        return json.dumps({"total": dict(self.total), "kinds": kinds})

    @classmethod
    def from_json(cls, text: str) -> Division:
        """Return the division in JSON. Raises ValueError if it is another text."""
        try:
            value = json.loads(text)
            kinds = tuple(
                SlotKind(k["name"], k["amounts"], k["beside"], frozenset(k["nodes"]))
                for k in value["kinds"]
            )
            return cls(value["total"], kinds)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--slots is not the JSON of a division: {error}.") from None

    def kinds_of(self, host: str) -> tuple[SlotKind, ...]:
        """Return the kinds of slots of a host; empty: it is leased as a whole."""
        return tuple(kind for kind in self.kinds if kind.covers(host))

    def slots(self, host: str) -> list[str]:
        """Return the names of the slots of a host, or the host if it has none."""
        kinds = self.kinds_of(host)
        return [
            slot_name(host, kind.name, number)
            for kind in kinds
            for number in range(capacity(self.total, kind.amounts))
        ] or ([] if kinds else [host])


WHOLE_NODES = Division()
"""No slots."""


@dataclass
class VirtualHost:
    """One host of the cluster."""

    name: str
    """Its name."""
    number: int
    """Its number among the hosts, from 0."""
    division: Division
    """What it has."""
    units: int = 1
    """Units into which the trace divides it."""
    idle_units: int = 0
    """Units that main jobs do not use."""

    def __post_init__(self) -> None:
        self.kinds = self.division.kinds_of(self.name)
        self._amounts = {kind.name: kind.amounts for kind in self.kinds}

    @property
    def main_jobs(self) -> dict[str, int]:
        """Amounts that main jobs have."""
        busy = self.units - self.idle_units
        return {name: -(-total * busy // self.units) for name, total in self.division.total.items()}

    def used(self, slots: Iterable[str]) -> dict[str, int]:
        """Return the amounts that main jobs and the leases of these slots have."""
        used = self.main_jobs
        for slot in slots:
            for name, amount in self._amounts[kind_of(slot)].items():
                used[name] = used.get(name, 0) + amount
        return used

    def facts(
        self, leases: Mapping[str, str], idle_since: Mapping[str, float], now: float
    ) -> list[NodeFacts]:
        """Return the facts about each slot.

        Args:
            leases: slot → its lease, as long as processes of it are left.
            idle_since: slot → time since which it is idle, epoch seconds.
            now: epoch seconds.
        """
        busy = self.idle_units < self.units
        use = HostResources(self.division.total, self.used(leases), (MAIN_JOB,) if busy else ())
        leased = {slot: LeasedSlot(lease, runs=True) for slot, lease in leases.items()}
        state = "mixed" if busy or leases else "idle"
        host = NodeFacts(self.name, state, idle=not busy)
        return slot_facts(host, use, self.kinds, leased, idle_since, now)

    def preempted(self, staying: Sequence[str]) -> list[str]:
        """Return the slots whose leases have to leave, so that main jobs have what they need.

        Args:
            staying: slots of leases that have not been asked to leave, the newest lease last. The
                newest ones leave first.
        """
        remaining = list(staying)
        chosen: list[str] = []
        while short := self._short(remaining):
            taking = [slot for slot in remaining if short & self._amounts[kind_of(slot)].keys()]
            if not taking:
                break
            remaining.remove(taking[-1])
            chosen.append(taking[-1])
        return chosen

    def devices(self, slot: str, devices: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """Return the numbers of the GPUs of a new lease: the lowest that no lease of the host has.
        Numbers go on from host to host, as if the hosts shared this machine's GPUs.

        Args:
            slot: slot of the lease.
            devices: slot → numbers, of the other leases of the host.
        """
        count = self.division.total.get(GPU, 0)
        in_use = {number for numbers in devices.values() for number in numbers}
        first = self.number * count
        free = [number for number in range(first, first + count) if number not in in_use]
        return tuple(free[: self._amounts[kind_of(slot)].get(GPU, 0)])

    def _short(self, slots: Iterable[str]) -> set[str]:
        """Return the resources of which main jobs and these slots have more than there is."""
        total = self.division.total
        return {name for name, used in self.used(slots).items() if used > total.get(name, 0)}
