"""Which nodes a job should drop when connections between its nodes are blocked. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

SHOWN = 3


def left_out(members: Sequence[str], blocked: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """The members without whom every way between the others is open, as few as is easily found.

    Args:
        members: in rank order; of equals the later goes.
        blocked: (from, to) of ways that are not open.
    """
    pairs, gone = {pair for pair in blocked if set(pair) <= set(members)}, []
    while pairs:
        ends = Counter(node for pair in pairs for node in pair)
        worst = max(members, key=lambda node: (ends[node], members.index(node)))
        gone.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return tuple(gone)


def sentence(blocked: Sequence[tuple[str, str, str]]) -> str:
    """The blocked ways for people: (from, to, why) of each."""
    ways = [f"{a} cannot connect to {b} ({why})" for a, b, why in blocked[:SHOWN]]
    more = f", and {len(blocked) - SHOWN} more such ways" if len(blocked) > SHOWN else ""
    return f"{'; '.join(ways)}{more}. Are ports between the nodes blocked by a firewall?"
