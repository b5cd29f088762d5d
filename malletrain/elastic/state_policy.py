"""The policies for the state when the group changes: :class:`WholeState` for state that every rank
has in full, :class:`ShardedState` for sharded state.

:func:`share` gives every rank of a new group the same whole state, that of the rank that is
furthest; :func:`source_and_needy` decides which rank that is and which ranks need its state.
:mod:`malletrain.elastic.transfer` moves it. Sharded state is shared by
:mod:`malletrain.elastic.sharded.sharing`.

:class:`AbortableGroup` is a gloo process group whose collectives can all be aborted, even if the
script or torch itself waits for them. Scripts, FSDP and DTensor call collectives and wait for each.
It decides only two things: such a wait goes through :meth:`malletrain.elastic.group.Group.wait`,
which ends when a peer is lost, and a collective of all ranks first passes
:meth:`malletrain.elastic.group.Group.fence`. gloo carries out the collectives.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from malletrain.elastic import group as groups
from malletrain.elastic import transfer
from malletrain.elastic.group import PLAIN_BACKEND, Group, rehearse
from malletrain.elastic.link import Place
from malletrain.elastic.sharded import rehearsal
from malletrain.elastic.sharded import sharing as shards
from malletrain.elastic.sharded.assignment import StatePart, best_order
from malletrain.elastic.sharded.training import ShardedTraining
from malletrain.elastic.step_exchange import Invited
from malletrain.elastic.training import Standing, Training
from malletrain.training.torch_private import adopt_backend


def source_and_needy(table: Sequence[Standing]) -> tuple[int, list[int]]:
    """Return (rank whose state counts, ranks that must get it) by the progress of each rank. Among
    the ranks that are furthest, the source is one that has closed its epoch, if any, and then the
    lowest.
    """
    source = max(range(len(table)), key=lambda rank: (table[rank], table[rank].epoch_closed, -rank))
    if not table[source].has_state:
        return 0, list(range(1, len(table)))
    return source, [rank for rank in range(len(table)) if table[rank] != table[source]]


def reopens_epoch(table: Sequence[Standing]) -> bool:
    """Return whether the ranks go back to the last step of an epoch, by the progress of each rank:
    the code after that step has run on some of them, and may not have run on a lost peer.
    """
    furthest = [standing for standing in table if standing == max(table) and standing.has_state]
    return any(standing.epoch_run for standing in furthest) and not any(
        standing.epoch_closed for standing in furthest
    )


def share(training: Training, group: Group) -> None:
    """Give every rank the state of the rank that is furthest. If no rank has state, it is that of
    the snapshot, or else the initial state of rank 0.

    Raises what :meth:`Group.wait` raises, StateError or SnapshotError.
    """
    place = group.place
    table = _standings(training, group)
    if reopens_epoch(table):
        training.reopen_epoch()
        table = _standings(training, group)
    source, needy = source_and_needy(table)
    if place.rank == source and not table[source].has_state:
        training.restore_snapshot()
    chain = [source, *needy]
    if needy and place.rank in chain:
        _move(training, group, chain)
    training.settled()


def _standings(training: Training, group: Group) -> list[Standing]:
    """Return the progress of each rank."""
    own = training.standing()
    if not group.several:
        return [own]
    names = group.layout.standing
    row = torch.tensor([getattr(own, name) for name in names], dtype=torch.int64)
    rows = [torch.empty_like(row) for _ in range(group.place.size)]
    group.wait(dist.all_gather(rows, row, async_op=True))
    return [_standing_of(dict(zip(names, row.tolist(), strict=True))) for row in rows]


def _standing_of(numbers: dict[str, int]) -> Standing:
    """Return the progress that a rank sent, by the names of its fields. What an older version does
    not send has its default.
    """
    counters = ("updates", "steps")
    fields: dict[str, Any] = {n: v if n in counters else bool(v) for n, v in numbers.items()}
    return Standing(**fields)


def _move(training: Training, group: Group, chain: list[int]) -> None:
    if group.place.rank == chain[0]:
        packed, tensors = training.pack(group.layout.by_name)
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


BACKEND = "malletrain_abortable"
_FORWARDED = (
    *("allgather", "_allgather_base", "allgather_coalesced", "allreduce", "allreduce_coalesced"),
    *("alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv", "recv_anysource"),
    *("reduce", "reduce_scatter", "_reduce_scatter_base", "scatter", "send"),
)
_RENAMED = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""Newer methods of a process group, and the method of the backend that carries each out."""
_COALESCED = {
    "all_gather_single_coalesced": "_allgather_base",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}
"""Methods for several tensors, called with (outputs, inputs, options), and the method that is
called for each pair in turn.
"""
_POINT_TO_POINT = {"recv", "recv_anysource", "send"}
_WITHOUT_FUTURE = {"_reduce_scatter_base", "recv", "recv_anysource", "send"}
"""Operations that gloo runs only in ``wait()``, or whose end it does not report by a future."""


class AbortableWork(dist.Work):
    """Collectives in progress. ``wait()`` returns when a peer is lost.

    Args:
        works: gloo's works.
        owner: group of the round; None outside of one.
        has_future: whether the works report their end by a future.
    """

    def __init__(self, works: list[Any], owner: groups.Group | None, has_future: bool) -> None:
        super().__init__()
        self._works = works
        self._owner = owner
        self._has_future = has_future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait. Raises Interrupted if the collectives are aborted or fail."""
        for work in self._works:
            if self._owner is None:
                work.wait()
            elif self._has_future:
                self._owner.wait(work)
            else:
                self._owner.call_abandonable(work.wait)
        return True

    def is_completed(self) -> bool:
        """Return whether all collectives are complete."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        """Return the future of the last collective."""
        return self._works[-1].get_future()


class AbortableGroup(dist.ProcessGroup):
    """A gloo process group that belongs to a round.

    Args:
        gloo: gloo's own group.
        rank: rank of this process in it.
        size: number of its ranks.
        owner: default group of the round; None outside of one.
    """

    def __init__(self, gloo: Any, rank: int, size: int, owner: groups.Group | None) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub knows one of two forms
        self._gloo = gloo
        self._owner = weakref.ref(owner) if owner is not None else lambda: None
        self._of_all_ranks = owner is not None and owner.forming
        adopt_backend(self, gloo)

    def _begin(self, name: str, calls: list[tuple[Any, ...]], named: dict[str, Any]) -> Any:
        owner = self._owner()
        if owner is not None and self._of_all_ranks and name not in _POINT_TO_POINT:
            owner.fence(name.strip("_"))
        works = [getattr(self._gloo, name)(*call, **named) for call in calls]
        return AbortableWork(works, owner, name not in _WITHOUT_FUTURE)


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: AbortableGroup, *args: Any, **kwargs: Any) -> Any:
        return self._begin(name, [args], kwargs)

    return call


def _one_by_one(name: str) -> Callable[..., Any]:
    def call(self: AbortableGroup, outputs: Any, inputs: Any, *options: Any) -> Any:
        calls = [(out, tensor, *options) for out, tensor in zip(outputs, inputs, strict=True)]
        return self._begin(name, calls, {})

    return call


for _name in _FORWARDED:
    setattr(AbortableGroup, _name, _forwarded(_name))
for _name, _backend_name in _RENAMED.items():
    setattr(AbortableGroup, _name, _forwarded(_backend_name))
for _name, _backend_name in _COALESCED.items():
    setattr(AbortableGroup, _name, _one_by_one(_backend_name))


def _connect(store: Any, rank: int, size: int, timeout: timedelta) -> AbortableGroup:
    owner = groups.newest()
    gloo = groups.connect(store, rank, size, timeout, owner)
    return AbortableGroup(gloo, rank, size, owner)


dist.Backend.register_backend(BACKEND, _connect, devices=["cpu"])


class WholeState:
    """The policy for state that every rank has in full."""

    sharded = False
    """Whether the state is sharded. If so, a single process needs a group as well, leavers hand
    over their shards, and torch exchanges the gradients.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._on_cpu = training.device.type == "cpu"
        self.backend = BACKEND if self._on_cpu else PLAIN_BACKEND
        """Backend of the groups. With GPUs it is the plain one, because torch would use the
        abortable one for all devices, instead of NCCL.
        """

    def rehearse(self) -> None:
        """Run the code of a change of the group once, without peers, so that it is warm when the
        other ranks wait for it.
        """
        rehearse()

    @property
    def joins(self) -> bool:
        """Whether this process calls :meth:`rehearse_at` when it knows its rank."""
        return False

    def rehearse_at(self, place: Place) -> None:
        """Run once, without peers, the code whose results are cached per rank."""

    def holding(self) -> str | None:
        """Return a description of the state of this process for :meth:`order`, which the members
        of the next round exchange; None if they exchange none.
        """
        return None

    def order(self, holdings: list[str]) -> list[int]:
        """Return the rank of each member of the next round, given their :meth:`holding`."""
        return list(range(len(holdings)))

    def hand_over(self, group: Group, invited: Callable[[int], Invited]) -> bool:
        """Move state from the leavers to the ranks that stay. Called on all ranks of a group before
        they leave it. Return False if the group is not to be left now.

        Args:
            group: the group that is about to be left.
            invited: returns what this process knows of the next round. If that round has the
                generation that it is called with, it waits until all members have checked in.
        """
        return True

    def share(self, group: Group) -> None:
        """Give all ranks of a new group the state that they need."""
        share(self._training, group)


class ShardedState(WholeState):
    """The policy for sharded state."""

    sharded = True

    def __init__(self, training: ShardedTraining) -> None:
        super().__init__(training)
        self._sharded = training

    def rehearse(self) -> None:
        if self._on_cpu:
            rehearsal.rehearse(self._sharded, self.backend)
        else:  # the sharded rehearsal is not tested on GPUs
            super().rehearse()

    @property
    def joins(self) -> bool:
        training = self._sharded
        return self._on_cpu and not training.has_state and not training.is_hsdp

    def rehearse_at(self, place: Place) -> None:
        rehearsal.rehearse_at(self._sharded, place)

    def holding(self) -> str:
        part = self._sharded.holding()
        return json.dumps(None if part is None else [part.part, part.parts, part.rows])

    def order(self, holdings: list[str]) -> list[int]:
        parts = [json.loads(text) for text in holdings]
        return best_order(
            [
                None if p is None else StatePart(p[0], p[1], tuple((n, b) for n, b in p[2]))
                for p in parts
            ]
        )

    def hand_over(self, group: Group, invited: Callable[[int], Invited]) -> bool:
        return shards.hand_over(self._sharded, group, invited)

    def share(self, group: Group) -> None:
        size = group.place.size
        in_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        shards.share_shards(self._sharded, group, in_node if self._sharded.is_hsdp else size)


def state_policy(training: Training) -> WholeState:
    """Return the policy for the state of ``training``."""
    if isinstance(training, ShardedTraining):
        return ShardedState(training)
    return WholeState(training)
