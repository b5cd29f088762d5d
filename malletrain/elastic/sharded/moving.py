"""Pieces of a state from rank to rank, as a transfer plan says.

Decides how many pieces are under way at a time. Every process goes through its own pieces in the
order of the plan, which is the same everywhere: the first piece that is not there yet is always
under way at both ends, so that nobody waits in a circle. Tensors on GPUs go by the group's NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from malletrain.elastic.group import Group
from malletrain.elastic.sharded.chunks import Chunk
from malletrain.elastic.sharded.transfer_plan import PIECE_BYTES, Piece, TransferPlan
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.training.torch_private import boxes_of

AT_ONCE = 8
"""Messages under way at a time, of each process: 64 MB where they are staged."""
Parts = Mapping[str, Sequence[tuple[Chunk, torch.Tensor]]]
"""What a process holds of each tensor: boxes with their numbers."""


@dataclass
class Bundle:
    """Pieces that travel as one message."""

    source: int
    """Rank."""
    target: int
    """Rank."""
    turn: int
    """Which message between the two it is."""
    boxes: list[torch.Tensor] = field(default_factory=list)
    """Where they are at this end."""
    size: int = 0
    """Bytes."""

    def _in_one(self) -> bool:
        return len(self.boxes) == 1 and self.boxes[0].is_contiguous()

    def packed(self) -> torch.Tensor:
        """The message; the numbers themselves where there is one contiguous box."""
        if self._in_one():
            return self.boxes[0]
        return torch.cat([_bytes_of(box.contiguous()) for box in self.boxes])

    def room(self) -> torch.Tensor:
        """Where the message arrives."""
        if self._in_one():
            return self.boxes[0]
        return torch.empty(self.size, dtype=torch.uint8, device=self.boxes[0].device)

    def unpack(self, room: torch.Tensor) -> None:
        """Put what arrived where it belongs."""
        if self._in_one():
            return
        with torch.no_grad():
            at = 0
            for box in self.boxes:
                size = box.numel() * box.element_size()
                # A copy of its own begins where the type may begin.
                part = room[at : at + size].clone().view(box.dtype)
                box.copy_(part.view(box.shape))
                at += size


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def parts_of(tensors: Mapping[str, Any]) -> dict[str, list[tuple[Chunk, torch.Tensor]]]:
    """What this process holds of sharded ``tensors``."""
    parts = {}
    boxes_of_layout: dict[Any, list[Chunk]] = {}  # a model has few shapes, and asking takes 0.1 ms
    for key, tensor in tensors.items():
        if not hasattr(tensor, "to_local"):
            boxes, local = [Chunk((0,) * tensor.ndim, tuple(tensor.shape))], tensor
        else:
            local, layout = tensor.to_local(), (id(tensor.device_mesh), tensor.placements)
            boxes = boxes_of_layout.get((layout, tensor.shape)) or boxes_of_layout.setdefault(
                (layout, tensor.shape), [Chunk(*box) for box in boxes_of(tensor)]
            )
        parts[key] = [(box, local.detach()) for box in boxes if box.elements]
    return parts


def layout_of(parts: Parts) -> dict[str, tuple[Chunk, ...]]:
    """Where ``parts`` are."""
    return {key: tuple(chunk for chunk, _ in boxes) for key, boxes in parts.items()}


def carry_out(group: Group, plan: TransferPlan, sources: Parts, targets: Parts) -> None:
    """Fill ``targets`` from the ``sources`` of all ranks of ``group``. Called on every rank with
    the same plan. Raises what :meth:`Group.apart` raises.
    """
    rank = group.place.rank
    with torch.no_grad():
        for piece in plan.copies:
            if piece.target == rank:
                _box(targets, piece).copy_(_box(sources, piece))
        messages = bundles(rank, plan, sources, targets)
        if messages:
            group.apart(partial(_exchange, rank, messages, dist.group.WORLD))


def bundles(rank: int, plan: TransferPlan, sources: Parts, targets: Parts) -> list[Bundle]:
    """What ``rank`` sends and receives, in its order: pieces between the same two processes as one
    message, up to the size of a piece. Both ends come to the same ones, and all processes to the
    same order.
    """
    open_ones: dict[tuple[int, int], Bundle] = {}
    turns: dict[tuple[int, int], int] = {}
    messages: list[Bundle] = []
    for piece in plan.moves:
        pair = piece.source, piece.target
        if rank not in pair:
            continue
        side = _box(sources if piece.source == rank else targets, piece)
        size = side.numel() * side.element_size()
        bundle = open_ones.get(pair)
        if bundle is None or bundle.size + size > PIECE_BYTES:
            turn = turns[pair] = turns.get(pair, -1) + 1
            bundle = open_ones[pair] = Bundle(*pair, turn)
            messages.append(bundle)
        bundle.boxes.append(side)
        bundle.size += size
    return sorted(messages, key=lambda b: (b.turn, b.source, b.target))


def _exchange(rank: int, bundles: Iterable[Bundle], world: Any) -> None:
    """``world``: the group. A call that was left behind must not go on in the next one."""
    remaining = iter(bundles)
    while batch := list(islice(remaining, AT_ONCE)):
        operations, arriving = [], []
        for bundle in batch:
            if bundle.source == rank:
                operations.append(dist.P2POp(dist.isend, bundle.packed(), bundle.target, world))
            else:
                room = bundle.room()
                arriving.append((bundle, room))
                operations.append(dist.P2POp(dist.irecv, room, bundle.source, world))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        reached(FaultPoint.SHARDS_ARRIVED)
        for bundle, room in arriving:
            bundle.unpack(room)


def _box(parts: Parts, piece: Piece) -> torch.Tensor:
    for chunk, tensor in parts[piece.key]:
        if chunk == piece.chunk:
            return tensor
        if chunk.common(piece.chunk) == piece.chunk:
            return tensor[piece.chunk.within(chunk)]
    raise AssertionError(f"No part of {piece.key} here has {piece.chunk}.")


def combined(several: Iterable[Parts]) -> dict[str, list[tuple[Chunk, torch.Tensor]]]:
    """All of them together."""
    merged: dict[str, list[tuple[Chunk, torch.Tensor]]] = {}
    for parts in several:
        for key, boxes in parts.items():
            merged.setdefault(key, []).extend(boxes)
    return merged
