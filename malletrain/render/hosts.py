"""What is idle on each host, for sites whose leases are slots: a sentence for each host and kind,
from the rules of its slots. Decides wording only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from malletrain.protocol.views import NodeView
from scavenger.interface import host_of, kind_of


def host_sentences(rows: Iterable[NodeView]) -> list[tuple[str, str]]:
    """Return (host, sentence) for each host and kind of slots among ``rows``, in their order.

    A slot counts as leased, as one that can be leased (all of its rules are passed), or as left
    alone, with the reason that the first rule gives that it did not pass.
    """
    slots: dict[tuple[str, str], list[NodeView]] = {}
    for row in rows:
        if kind := kind_of(row.node):
            slots.setdefault((host_of(row.node), kind), []).append(row)
    return [(host, _sentence(kind, members)) for (host, kind), members in slots.items()]


def _sentence(kind: str, slots: Iterable[NodeView]) -> str:
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for slot in slots:
        if slot.lease:
            counts["leased"] += 1
        elif refusal := next((why for _, passed, why in slot.rules if not passed), ""):
            reasons[refusal] += 1
        else:
            counts["can be leased"] += 1
    parts = [f"{counts[word]} {word}" for word in ("leased", "can be leased") if counts[word]]
    parts += [f"{number} left alone: {why}" for why, number in reasons.items()]
    total = counts.total() + reasons.total()
    return f"{total} {kind} slot{'s' if total != 1 else ''}, {'; '.join(parts)}"
