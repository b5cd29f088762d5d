"""Gloo process groups whose collectives can all be aborted, even if the script or torch itself
waits for them.

Scripts, FSDP and DTensor call collectives and wait for each. Decides only two things: such a wait
goes through :meth:`malletrain.elastic.group.Group.wait`, which ends when a peer is lost, and a
collective of all ranks first passes :meth:`malletrain.elastic.group.Group.fence`. gloo carries out
the collectives.
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
        """Returns whether all collectives are complete."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        """Returns the future of the last collective."""
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
