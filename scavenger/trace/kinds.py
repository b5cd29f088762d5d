"""Kinds of slots of a trace: single GPUs on some hosts, whole nodes elsewhere.

Decides which host has slots of which kind: the first kind that covers the host and fits on it. A
host that no kind covers is one slot, of kind :data:`WHOLE`; one that is too small for the kinds
that cover it has none. A host has slots of one kind.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scavenger.hostlist import HostlistError, expand
from scavenger.interface import slot_name
from scavenger.trace import files
from scavenger.trace.amounts import UNIT, AmountTrace, has_amounts, parse
from scavenger.trace.checks import TraceError
from scavenger.trace.trace import Trace

WHOLE = "node"
"""Kind of the hosts that are one slot, and the word for such a slot."""
_SLOT = re.compile(r"(?:(?P<name>[A-Za-z][\w-]*)=)?(?P<units>node|[0-9]+)(?:@(?P<hosts>.+))?")


@dataclass(frozen=True)
class TraceKind:
    """A kind of slots."""

    name: str
    """Name of the kind."""
    units: int | None = 1
    """Units of a host that a slot has; None: all of them."""
    hosts: frozenset[str] | None = None
    """Hosts that have such slots; None: all hosts."""

    @classmethod
    def parse(cls, text: str) -> TraceKind:
        """Return the kind in ``[NAME=]N|node[@HOSTS]``, such as ``gpu=1@g[001-064]``. Default
        names are ``unit`` and ``node``.

        Raises:
            ValueError: the text has another form; the message says which one is needed.
        """
        match = _SLOT.fullmatch(text.strip())
        if match is None or match["units"].strip("0") == "":
            raise ValueError(
                f"{text}: give [KIND=]N or [KIND=]node and, if not all hosts have such slots, "
                "@HOSTS, such as gpu=1@g[001-064]; N is a number of units from 1."
            )
        units = None if match["units"] == WHOLE else int(match["units"])
        try:
            hosts = frozenset(expand(match["hosts"])) if match["hosts"] else None
        except HostlistError as error:
            raise ValueError(f"{text}: {error}") from None
        return cls(match["name"] or (WHOLE if units is None else UNIT), units, hosts)

    def covers(self, host: str) -> bool:
        """Return whether the host has such slots, if it is large enough."""
        return self.hosts is None or host in self.hosts


@dataclass(frozen=True)
class DividedTrace:
    """A trace of slots of several kinds."""

    trace: Trace
    """Idle slots over time."""
    kind_of: Mapping[str, str]
    """Slot → its kind."""
    parts: Mapping[str, float]
    """Kind → the part of a host that one of its slots is, by the hosts that hold most."""


def divide(trace: AmountTrace, kinds: Sequence[TraceKind], where: str = "trace") -> DividedTrace:
    """Return the trace of the slots of all hosts.

    Args:
        trace: idle amounts of the hosts.
        kinds: kinds of slots.
        where: name of the file, for messages.

    Raises:
        TraceError: two kinds have one name, or no host has a slot of a kind.
    """
    twice = [name for name, count in Counter(kind.name for kind in kinds).items() if count > 1]
    if twice:
        raise TraceError(where, [f"Two kinds of slots are named {', '.join(twice)}."])
    names: list[str] = []
    kind_of: dict[str, str] = {}
    slots: list[tuple[int, int]] = []
    most: Counter[str] = Counter()
    for host, size in zip(trace.names, trace.sizes, strict=True):
        covering = [kind for kind in kinds if kind.covers(host)] or [TraceKind(WHOLE, None)]
        kind = next((kind for kind in covering if (kind.units or 0) <= size), covering[0])
        slots.append((len(names), kind.units or size))
        own = [host]
        if kind.units is not None:
            own = [slot_name(host, kind.name, number) for number in range(size // kind.units)]
        names += own
        kind_of.update(dict.fromkeys(own, kind.name))
        most[kind.name] = max(most[kind.name], len(own))
    absent = [kind for kind in kinds if not most[kind.name]]
    if absent:
        raise TraceError(where, [_absence(kind, trace) for kind in absent])
    parts = {name: 1.0 / count for name, count in most.items()}
    return DividedTrace(trace.divided(names, slots), kind_of, parts)


def _absence(kind: TraceKind, trace: AmountTrace) -> str:
    sizes = [size for host, size in zip(trace.names, trace.sizes, strict=True) if kind.covers(host)]
    if not sizes:
        return f"No host of kind {kind.name} is in the trace."
    if (kind.units or 0) > max(sizes):
        return (
            f"No host has the {kind.units} units of a slot of kind {kind.name}; the largest of "
            f"its hosts has {max(sizes)}."
        )
    return f"No host is left for kind {kind.name}: kinds before it have them all."


def read_kinds(
    path: str | os.PathLike[str],
    kinds: Sequence[TraceKind],
    *,
    names: Sequence[str] | None = None,
) -> DividedTrace:
    """Read a trace with or without amounts, and divide its hosts. Without amounts every host is one
    slot.

    Args:
        path: the file.
        kinds: kinds of slots.
        names: the machine's nodes, if some may have no event; for traces without amounts.

    Raises:
        TraceError: the file is not valid, or :func:`divide` refuses the kinds.
    """
    text = files.read_text(path)
    if has_amounts(text):
        return divide(parse(text, where=str(path)), kinds, str(path))
    trace = files.parse(text, names=names, where=str(path))
    whole = [TraceKind(kind.name, None, kind.hosts) for kind in kinds]
    return divide(AmountTrace.of(trace), whole, str(path))
