"""Moves the pieces of a state between ranks according to a transfer plan.

Decides how many pieces are in flight at a time. Every process handles its own pieces in the order
of the plan, which is equal on all ranks. So the first piece that has not arrived is always in
flight at both ends, and there is no deadlock. GPU tensors move by the group's NCCL.
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

MAX_MESSAGES_IN_FLIGHT = 8
"""Maximum number of messages of a process in flight: 64 MB if they are staged."""
Parts = Mapping[str, Sequence[tuple[Chunk, torch.Tensor]]]
"""The boxes of each tensor that a process has, with their elements, by the tensor's key."""


@dataclass
class Bundle:
    """Pieces that are sent as one message."""

    source: int
    """Rank that sends."""
    target: int
    """Rank that receives."""
    turn: int
    """Number of the message among those between the two ranks, from 0."""
    boxes: list[torch.Tensor] = field(default_factory=list)
    """The pieces in the memory of this rank."""
    size: int = 0
    """Size, bytes."""

    def _is_single_contiguous(self) -> bool:
        return len(self.boxes) == 1 and self.boxes[0].is_contiguous()

    def packed(self) -> torch.Tensor:
        """Return the message. A single contiguous box is sent without a copy."""
        if self._is_single_contiguous():
            return self.boxes[0]
        return torch.cat([_bytes_of(box.contiguous()) for box in self.boxes])

    def room(self) -> torch.Tensor:
        """Return the tensor into which the message is received."""
        if self._is_single_contiguous():
            return self.boxes[0]
        return torch.empty(self.size, dtype=torch.uint8, device=self.boxes[0].device)

    def unpack(self, room: torch.Tensor) -> None:
        """Copy a received message into the boxes."""
        if self._is_single_contiguous():
            return
        with torch.no_grad():
            at = 0
            for box in self.boxes:
                size = box.numel() * box.element_size()
                # The clone is aligned for the dtype; the slice may not be.
                part = room[at : at + size].clone().view(box.dtype)
                box.copy_(part.view(box.shape))
                at += size


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def parts_of(tensors: Mapping[str, Any]) -> dict[str, list[tuple[Chunk, torch.Tensor]]]:
    """Return the boxes of sharded ``tensors`` that this process has."""
    parts = {}
    # Cached, because computing boxes takes 0.1 ms and a model has few shapes.
    boxes_of_layout: dict[Any, list[Chunk]] = {}
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
    """Return the boxes of ``parts``, without their elements."""
    return {key: tuple(chunk for chunk, _ in boxes) for key, boxes in parts.items()}


def carry_out(group: Group, plan: TransferPlan, sources: Parts, targets: Parts) -> None:
    """Fill ``targets`` from the ``sources`` of all ranks. Called on every rank with the same plan.
    Raises what :meth:`Group.call_abandonable` raises.

    Args:
        group: the default group.
        plan: the transfer plan.
        sources: boxes that this rank has.
        targets: boxes that this rank fills.
    """
    rank = group.place.rank
    with torch.no_grad():
        for piece in plan.copies:
            if piece.target == rank:
                _box(targets, piece).copy_(_box(sources, piece))
        messages = bundles(rank, plan, sources, targets)
        if messages:
            group.call_abandonable(partial(_exchange, rank, messages, dist.group.WORLD))


def bundles(rank: int, plan: TransferPlan, sources: Parts, targets: Parts) -> list[Bundle]:
    """Return the messages that ``rank`` sends and receives, in order. Pieces between the same two
    ranks are combined up to PIECE_BYTES. Both ends compute the same messages, and all processes the
    same order.

    Args:
        rank: rank of this process.
        plan: the transfer plan.
        sources: boxes that this rank has.
        targets: boxes that this rank fills.
    """
    open_bundles: dict[tuple[int, int], Bundle] = {}
    turns: dict[tuple[int, int], int] = {}
    messages: list[Bundle] = []
    for piece in plan.moves:
        pair = piece.source, piece.target
        if rank not in pair:
            continue
        box = _box(sources if piece.source == rank else targets, piece)
        size = box.numel() * box.element_size()
        bundle = open_bundles.get(pair)
        if bundle is None or bundle.size + size > PIECE_BYTES:
            turn = turns[pair] = turns.get(pair, -1) + 1
            bundle = open_bundles[pair] = Bundle(*pair, turn)
            messages.append(bundle)
        bundle.boxes.append(box)
        bundle.size += size
    return sorted(messages, key=lambda b: (b.turn, b.source, b.target))


def _exchange(rank: int, bundles: Iterable[Bundle], world: Any) -> None:
    """Send and receive ``bundles``. ``world`` is passed so that an abandoned call cannot continue
    in the next group.
    """
    remaining = iter(bundles)
    while batch := list(islice(remaining, MAX_MESSAGES_IN_FLIGHT)):
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
    """Return the boxes of all ``several`` in one mapping."""
    merged: dict[str, list[tuple[Chunk, torch.Tensor]]] = {}
    for parts in several:
        for key, boxes in parts.items():
            merged.setdefault(key, []).extend(boxes)
    return merged
