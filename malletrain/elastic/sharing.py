"""Gives every rank of a new group the same state: that of the rank that is furthest.

Decides which rank's state counts and which ranks need it. :mod:`malletrain.elastic.transfer` moves
it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from malletrain.elastic import transfer
from malletrain.elastic.group import Group
from malletrain.elastic.training import Standing, Training


def source_and_needy(table: Sequence[Standing]) -> tuple[int, list[int]]:
    """Returns (rank whose state counts, ranks that must get it) by the progress of each rank. Among
    the ranks that are furthest, the source is one that has closed its epoch, if any, and then the
    lowest.
    """
    source = max(range(len(table)), key=lambda rank: (table[rank], table[rank].epoch_closed, -rank))
    if not table[source].has_state:
        return 0, list(range(1, len(table)))
    return source, [rank for rank in range(len(table)) if table[rank] != table[source]]


def share(training: Training, group: Group) -> None:
    """Give every rank the state of the rank that is furthest. If no rank has state, it is that of
    the snapshot, or else the initial state of rank 0.

    Raises what :meth:`Group.wait` raises, StateError or SnapshotError.
    """
    place = group.place
    own_standing = training.standing()
    table = [own_standing]
    if group.several:
        row = torch.tensor(
            [
                own_standing.has_state,
                own_standing.updates,
                own_standing.steps,
                own_standing.whole,
                own_standing.epoch_closed,
            ],
            dtype=torch.int64,
        )
        rows = [torch.empty_like(row) for _ in range(place.size)]
        group.wait(dist.all_gather(rows, row, async_op=True))
        table = [
            Standing(bool(has_state), updates, steps, bool(whole), bool(closed))
            for has_state, updates, steps, whole, closed in (row.tolist() for row in rows)
        ]
    source, needy = source_and_needy(table)
    if place.rank == source and not own_standing.has_state:
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
    had_state = training.has_state
    # State that this process has is not overwritten piece by piece: if the source is lost during
    # the transfer, this state may be the one that counts.
    skeleton, tensors = training.state.destinations(packed, in_place=not had_state)
    transfer.move(group, chain, tensors)
    training.take_over(skeleton, tensors, had_state)
