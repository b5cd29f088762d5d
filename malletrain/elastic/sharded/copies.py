"""Copies of each rank's shards, kept in the memory of this node and of the next one.

Decides whose copy a process keeps: that of the rank at the same place of the node before, beside
its own, because its own shards go on training. When a node is lost the next one still has what was
on it. Two steps' copies are there for the time of one step. What is done with them after a loss is
:mod:`malletrain.elastic.sharded.sharing`'s.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from malletrain.elastic.group import Group
from malletrain.elastic.sharded.chunks import Chunk
from malletrain.elastic.sharded.moving import Parts, combined
from malletrain.elastic.sharded.standing import Version
from malletrain.elastic.transfer import pieces
from malletrain.training.sharded_state import take_apart


@dataclass(frozen=True)
class ShardCopy:
    """A copy in host memory."""

    version: Version
    """Of the state."""
    parts: Parts
    """This rank's shards and its neighbour's."""
    description: bytes
    """What belongs to the state beside its shards."""


def exchange(group: Group, version: Version, live: Parts, description: bytes) -> ShardCopy:
    """Copy this rank's shards, and exchange the copies with the neighbours. Called on every rank
    after the same step. Raises what :meth:`Group.apart` raises.

    Args:
        group: of all ranks.
        version: of the state.
        live: this rank's shards of it.
        description: what belongs to it beside the shards.
    """
    own: Parts = {
        key: [(chunk, tensor.to("cpu", copy=True).contiguous()) for chunk, tensor in boxes]
        for key, boxes in live.items()
    }
    size, rank = group.place.size, group.place.rank
    apart = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) % size or 1
    theirs: list[Parts] = []
    # A call that was left behind must not go on in the next group.
    ends = (rank + apart) % size, (rank - apart) % size, dist.group.WORLD
    group.apart(lambda: theirs.append(_swap(own, *ends)))
    return ShardCopy(version, combined([own, theirs[0]]), description)


def _swap(own: Parts, to: int, source: int, world: Any) -> Parts:
    header = pickle.dumps({key: [(c, t.dtype) for c, t in boxes] for key, boxes in own.items()})
    length, their_length = torch.tensor([len(header)]), torch.zeros(1, dtype=torch.int64)
    _both([length], to, [their_length], source, world)
    header_tensor = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    their_header = torch.empty(int(their_length), dtype=torch.uint8)
    _both([header_tensor], to, [their_header], source, world)
    theirs: dict[str, list[tuple[Chunk, torch.Tensor]]] = {
        key: [(chunk, torch.empty(chunk.sizes, dtype=dtype)) for chunk, dtype in boxes]
        for key, boxes in pickle.loads(their_header.numpy().tobytes()).items()
    }
    _both(_flat(own), to, _flat(theirs), source, world)
    return theirs


def _flat(parts: Parts) -> list[torch.Tensor]:
    return list(pieces([tensor for key in sorted(parts) for _, tensor in parts[key]]))


def _both(
    mine: list[torch.Tensor], to: int, theirs: list[torch.Tensor], source: int, world: Any
) -> None:
    works = [dist.isend(piece, to, world) for piece in mine]
    works += [dist.irecv(piece, source, world) for piece in theirs]
    for work in works:
        if work is not None:
            work.wait()


def digest(objects: Mapping[str, Any]) -> str:
    """A hash over every number of ``objects``, whatever the layout. Called on all ranks."""
    skeletons, tensors = take_apart(objects)
    sha = hashlib.sha256()
    plain: list[torch.Tensor] = []
    sha.update(repr(_without_tensors(skeletons, plain)).encode())
    for key in sorted(tensors):
        tensor = tensors[key]
        plain.append(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)
    for tensor in plain:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return None
    if isinstance(value, dict):
        return {key: _without_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item, tensors) for item in value]
    return value
