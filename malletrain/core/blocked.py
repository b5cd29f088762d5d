"""Decides which nodes a job drops when connections between its nodes are blocked. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

MAX_SHOWN = 3


def left_out(members: Sequence[str], blocked: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the members to drop so that all connections between the others work. A greedy choice
    keeps their number small.

    Args:
        members: nodes in rank order. Of equal candidates the later one is dropped.
        blocked: (from, to) of each blocked connection.
    """
    pairs, dropped = {pair for pair in blocked if set(pair) <= set(members)}, []
    while pairs:
        ends = Counter(node for pair in pairs for node in pair)
        worst = max(members, key=lambda node: (ends[node], members.index(node)))
        dropped.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return tuple(dropped)


def sentence(blocked: Sequence[tuple[str, str, str]]) -> str:
    """Return a description for users of the blocked connections, (from, to, reason) of each."""
    ways = [f"{a} cannot connect to {b} ({why})" for a, b, why in blocked[:MAX_SHOWN]]
    remainder = (
        f", and {len(blocked) - MAX_SHOWN} more such ways" if len(blocked) > MAX_SHOWN else ""
    )
    return f"{'; '.join(ways)}{remainder}. Are ports between the nodes blocked by a firewall?"
