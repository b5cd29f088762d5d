"""Every rank of a new group comes to hold the same state: that of the one that is furthest.

Decides whose state counts and who needs it. How it travels is :mod:`malletrain.elastic.transfer`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from malletrain.elastic import transfer
from malletrain.elastic.group import Group
from malletrain.elastic.training import Standing, Training


def source_and_needy(table: Sequence[Standing]) -> tuple[int, list[int]]:
    """(rank whose state counts, ranks that must get it) by what each rank stands at. The lowest
    rank of those that are furthest gives, one that has closed its epoch before one that has not.
    """
    source = max(range(len(table)), key=lambda rank: (table[rank], table[rank].epoch_closed, -rank))
    if not table[source].has_state:
        return 0, list(range(1, len(table)))
    return source, [rank for rank in range(len(table)) if table[rank] != table[source]]


def share(training: Training, group: Group) -> None:
    """Have every rank hold the state of the one that is furthest; without any, the snapshot's or
    that of rank 0 as the script made it.

    Raises what :meth:`Group.wait` raises, StateError or SnapshotError.
    """
    place = group.place
    mine = training.standing()
    table = [mine]
    if group.several:
        row = torch.tensor(
            [mine.has_state, mine.updates, mine.steps, mine.whole, mine.epoch_closed],
            dtype=torch.int64,
        )
        rows = [torch.empty_like(row) for _ in range(place.size)]
        group.wait(dist.all_gather(rows, row, async_op=True))
        table = [
            Standing(bool(has_state), updates, steps, bool(whole), bool(closed))
            for has_state, updates, steps, whole, closed in (row.tolist() for row in rows)
        ]
    source, needy = source_and_needy(table)
    if place.rank == source and not mine.has_state:
        training.restore_snapshot()
    chain = [source, *needy]
    if needy and place.rank in chain:
        _move(training, group, chain)
    training.settled()


def _move(training: Training, group: Group, chain: list[int]) -> None:
    if group.place.rank == chain[0]:
        packed, tensors = training.pack()
        transfer.send_bytes(group, chain, packed)
        transfer.move(group, chain, tensors)
        return
    packed = transfer.send_bytes(group, chain, b"")
    had = training.has_state
    # What is here already is not overwritten piece by piece: should the source be lost meanwhile,
    # it is what counts.
    skeleton, tensors = training.state.destinations(packed, in_place=not had)
    transfer.move(group, chain, tensors)
    training.take_over(skeleton, tensors, had)
