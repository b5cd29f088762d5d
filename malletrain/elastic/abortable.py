"""gloo's groups with collectives that can all be given up, also those that the script or torch
itself waits for.

Scripts, FSDP and DTensor call collectives and wait for each. Decides only that such a wait is
:meth:`malletrain.elastic.group.Group.wait`'s, which ends when a peer is lost, and that a collective
of all ranks is begun when :meth:`malletrain.elastic.group.Group.fence` lets it. What a collective
does is gloo's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from malletrain.elastic import group as groups
from malletrain.training.torch_private import adopt_backend

BACKEND = "malletrain_abortable"
_SAME = (
    *("allgather", "_allgather_base", "allgather_coalesced", "allreduce", "allreduce_coalesced"),
    *("alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv", "recv_anysource"),
    *("reduce", "reduce_scatter", "_reduce_scatter_base", "scatter", "send"),
)
_RENAMED = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""Newer names of a process group for what a backend calls otherwise."""
_COALESCED = {
    "all_gather_single_coalesced": "_allgather_base",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}
"""Several at once, (outputs, inputs, options): done one by one."""
_OF_TWO = {"recv", "recv_anysource", "send"}
_WITHOUT_FUTURE = {"_reduce_scatter_base", "recv", "recv_anysource", "send"}
"""What gloo does when it is waited for, or cannot say that it is done."""


class AbortableWork(dist.Work):
    """Collectives under way; who waits for them is let go when a peer is lost."""

    def __init__(self, works: list[Any], owner: groups.Group | None, has_future: bool) -> None:
        super().__init__()
        self._works = works
        self._owner = owner
        self._has_future = has_future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait. Raises Interrupted when they are given up or fail."""
        for work in self._works:
            if self._owner is None:
                work.wait()
            elif self._has_future:
                self._owner.wait(work)
            else:
                self._owner.apart(work.wait)
        return True

    def is_completed(self) -> bool:
        """Whether all are done."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        """The future of the last one."""
        return self._works[-1].get_future()


class AbortableGroup(dist.ProcessGroup):
    """A process group of gloo that belongs to a round."""

    def __init__(self, gloo: Any, rank: int, size: int, owner: groups.Group | None) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub knows one of two forms
        self._gloo = gloo
        self._owner = weakref.ref(owner) if owner is not None else lambda: None
        self._of_all_ranks = owner is not None and owner.forming
        adopt_backend(self, gloo)

    def _begin(self, name: str, calls: list[tuple[Any, ...]], named: dict[str, Any]) -> Any:
        owner = self._owner()
        if owner is not None and self._of_all_ranks and name not in _OF_TWO:
            owner.fence(name.strip("_"))
        works = [getattr(self._gloo, name)(*call, **named) for call in calls]
        return AbortableWork(works, owner, name not in _WITHOUT_FUTURE)


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: AbortableGroup, *args: Any, **kwargs: Any) -> Any:
        return self._begin(name, [args], kwargs)

    return call


def _one_by_one(name: str) -> Callable[..., Any]:
    def call(self: AbortableGroup, outputs: Any, inputs: Any, *options: Any) -> Any:
        calls = [(out, tensor, *options) for out, tensor in zip(outputs, inputs, strict=True)]
        return self._begin(name, calls, {})

    return call


for _name in _SAME:
    setattr(AbortableGroup, _name, _passed_on(_name))
for _name, _there in _RENAMED.items():
    setattr(AbortableGroup, _name, _passed_on(_there))
for _name, _there in _COALESCED.items():
    setattr(AbortableGroup, _name, _one_by_one(_there))


def _connect(store: Any, rank: int, size: int, timeout: timedelta) -> AbortableGroup:
    owner = groups.newest()
    gloo = groups.connect(store, rank, size, timeout, owner)
    return AbortableGroup(gloo, rank, size, owner)


dist.Backend.register_backend(BACKEND, _connect, devices=["cpu"])
