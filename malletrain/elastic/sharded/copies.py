"""Copies of each rank's shards, in the memory of its own node and of the next one, and the versions
of the state from which a group can continue with them.

:func:`exchange` decides which copies a process keeps: one of its own shards, which change as it
trains, and one of the shards of the rank with the same local rank on the previous node. If a node
is lost, the next one still has its shards. For the duration of one step there are copies of two
steps.

:func:`candidates` decides the order in which versions are tried, the newest first: those that the
group's processes train, and those of which they have copies.
:mod:`malletrain.elastic.sharded.sharing` checks whether a version is complete, and decides how
copies are used after a loss.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from malletrain.elastic import peer_pickles
from malletrain.elastic.group import Group
from malletrain.elastic.peer_pickles import exchanged
from malletrain.elastic.sharded.chunks import Chunk
from malletrain.elastic.sharded.moving import Parts, combined
from malletrain.elastic.transfer import pieces
from malletrain.training.sharded_state import take_apart


@exchanged
@dataclass(frozen=True, order=True)
class Version:
    """A version of the state. States of one version are equal."""

    updates: int
    """Number of optimizer updates."""
    steps: int
    """Number of steps that count."""
    history: str
    """Identifier of the history. It changes each time the run goes back to an earlier state."""

    def follows(self, other: Version) -> bool:
        """Return whether this is the version after one update of ``other``."""
        return self.updates == other.updates + 1 and self.history == other.history


@exchanged
@dataclass(frozen=True)
class ShardStanding:
    """The progress of a process, and the copies that it has."""

    live: Version | None
    """Version that it trains; None for a joiner."""
    whole: bool
    """Its last step was not interrupted between two of its updates."""
    pending: bool
    """It has all gradients of the next update, and has not made the update."""
    copies: tuple[Version, ...]
    """Versions of its copies."""


def candidates(table: Sequence[ShardStanding]) -> list[Version]:
    """Return the versions of which any process has a part, the newest first."""
    versions = {row.live for row in table if row.live is not None}
    return sorted(versions | {version for row in table for version in row.copies}, reverse=True)


def source_of(table: Sequence[ShardStanding], version: Version) -> int:
    """Return the rank that sends the state without its shards: one that finished its step, if
    any.
    """
    live = [rank for rank, row in enumerate(table) if row.live == version]
    whole = [rank for rank in live if table[rank].whole]
    copy_holders = [rank for rank, row in enumerate(table) if version in row.copies]
    return next(iter((*whole, *live, *copy_holders)))


def holdings(table: Sequence[ShardStanding], version: Version) -> list[bool]:
    """Return, for each attempt to find all parts of a version, whether processes that train it
    offer their copies of it as well. Such a process may have the only copy of the shards of a lost
    peer, if the other processes are an update ahead.
    """
    trained_and_copied = any(row.live == version and version in row.copies for row in table)
    return [False, True] if trained_and_copied else [False]


@dataclass(frozen=True)
class ShardCopy:
    """Copies of shards of one version of the state, in host memory."""

    version: Version
    """Version of the state."""
    parts: Parts
    """The shards of this rank and of its neighbour."""
    description: bytes
    """The state without its shards, pickled."""


def exchange(group: Group, version: Version, live: Parts, description: bytes) -> ShardCopy:
    """Copy this rank's shards, and exchange the copies with the neighbours. Called on every rank
    after the same step. Raises what :meth:`Group.call_abandonable` raises.

    Args:
        group: the default group.
        version: version of the state.
        live: shards of this rank.
        description: the state without its shards, pickled.
    """
    own: Parts = {
        key: [(chunk, tensor.to("cpu", copy=True).contiguous()) for chunk, tensor in boxes]
        for key, boxes in live.items()
    }
    size, rank = group.place.size, group.place.rank
    distance = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) % size or 1
    received: list[Parts] = []
    # The group is passed, so that an abandoned call cannot continue in the next group.
    ends = (rank + distance) % size, (rank - distance) % size, dist.group.WORLD
    by_name = group.layout.by_name
    group.call_abandonable(lambda: received.append(_swap(own, *ends, by_name)))
    return ShardCopy(version, combined([own, received[0]]), description)


def _swap(own: Parts, to: int, source: int, world: Any, by_name: bool) -> Parts:
    boxes_of_key = {key: [(c, t.dtype) for c, t in boxes] for key, boxes in own.items()}
    header = peer_pickles.dumps(boxes_of_key, by_name)
    length, their_length = torch.tensor([len(header)]), torch.zeros(1, dtype=torch.int64)
    _send_and_receive([length], to, [their_length], source, world)
    header_tensor = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    their_header = torch.empty(int(their_length), dtype=torch.uint8)
    _send_and_receive([header_tensor], to, [their_header], source, world)
    received: dict[str, list[tuple[Chunk, torch.Tensor]]] = {
        key: [(chunk, torch.empty(chunk.sizes, dtype=dtype)) for chunk, dtype in boxes]
        for key, boxes in pickle.loads(their_header.numpy().tobytes()).items()
    }
    _send_and_receive(_flat(own), to, _flat(received), source, world)
    return received


def _flat(parts: Parts) -> list[torch.Tensor]:
    return list(pieces([tensor for key in sorted(parts) for _, tensor in parts[key]]))


def _send_and_receive(
    outgoing: list[torch.Tensor], to: int, incoming: list[torch.Tensor], source: int, world: Any
) -> None:
    works = [dist.isend(piece, to, world) for piece in outgoing]
    works += [dist.irecv(piece, source, world) for piece in incoming]
    for work in works:
        if work is not None:
            work.wait()


def digest(objects: Mapping[str, Any]) -> str:
    """Return a hash over the whole state of ``objects``, which does not depend on its layout.
    Called on all ranks.
    """
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
