"""Pieces of a state from rank to rank, as a transfer plan says.

Decides how many pieces are under way at a time. Every process goes through its own pieces in the
order of the plan, which is the same everywhere: the first piece that is not there yet is always
under way at both ends, so that nobody waits in a circle. Tensors on GPUs go by the group's NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from malletrain.elastic.group import Group
from malletrain.elastic.sharded.chunks import Chunk
from malletrain.elastic.sharded.transfer_plan import Layout, Piece, TransferPlan
from malletrain.training.torch_private import boxes_of

AT_ONCE = 8
"""Pieces under way at a time, of each process."""
Parts = Mapping[str, Sequence[tuple[Chunk, torch.Tensor]]]
"""What a process holds of each tensor: boxes with their numbers."""


def parts_of(tensors: Mapping[str, Any]) -> dict[str, list[tuple[Chunk, torch.Tensor]]]:
    """What this process holds of sharded ``tensors``."""
    found = {}
    for key, tensor in tensors.items():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        boxes = (
            [Chunk(*box) for box in boxes_of(tensor)]
            if hasattr(tensor, "to_local")
            else [Chunk((0,) * local.ndim, tuple(local.shape))]
        )
        found[key] = [(box, local.detach()) for box in boxes if box.elements]
    return found


def layout_of(parts: Parts) -> dict[str, tuple[Chunk, ...]]:
    """Where ``parts`` are."""
    return {key: tuple(chunk for chunk, _ in boxes) for key, boxes in parts.items()}


def carry_out(group: Group, plan: TransferPlan, sources: Parts, targets: Parts) -> None:
    """Fill ``targets`` from the ``sources`` of all ranks of ``group``. Called on every rank with
    the same plan. Raises what :meth:`Group.apart` raises.
    """
    rank = group.place.rank
    for piece in plan.copies:
        if piece.target == rank:
            _box(targets, piece).copy_(_box(sources, piece))
    mine = [piece for piece in plan.moves if rank in (piece.source, piece.target)]
    if mine:
        group.apart(lambda: _exchange(rank, mine, sources, targets))


def _exchange(rank: int, mine: Iterable[Piece], sources: Parts, targets: Parts) -> None:
    pieces = iter(mine)
    with torch.no_grad():
        while batch := list(islice(pieces, AT_ONCE)):
            operations, staged = [], []
            for piece in batch:
                sends = piece.source == rank
                box = _box(sources if sends else targets, piece)
                if sends:
                    operations.append(dist.P2POp(dist.isend, box.contiguous(), piece.target))
                    continue
                room = box if box.is_contiguous() else torch.empty_like(box).contiguous()
                if room is not box:
                    staged.append((box, room))
                operations.append(dist.P2POp(dist.irecv, room, piece.source))
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            for box, room in staged:
                box.copy_(room)


def _box(parts: Parts, piece: Piece) -> torch.Tensor:
    for chunk, tensor in parts[piece.key]:
        if chunk.common(piece.chunk) == piece.chunk:
            return tensor[piece.chunk.within(chunk)]
    raise AssertionError(f"No part of {piece.key} here has {piece.chunk}.")


def combined(several: Iterable[Parts]) -> dict[str, list[tuple[Chunk, torch.Tensor]]]:
    """All of them together."""
    found: dict[str, list[tuple[Chunk, torch.Tensor]]] = {}
    for parts in several:
        for key, boxes in parts.items():
            found.setdefault(key, []).extend(boxes)
    return found


def combined_layout(several: Iterable[Layout]) -> dict[str, tuple[Chunk, ...]]:
    """All of them together."""
    found: dict[str, tuple[Chunk, ...]] = {}
    for layout in several:
        for key, boxes in layout.items():
            found[key] = (*found.get(key, ()), *boxes)
    return found
