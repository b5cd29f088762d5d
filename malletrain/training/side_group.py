"""A separate process group for MalleTrain's own collectives.

The group always uses gloo on the CPU, so its messages never wait in the queue of a GPU and never
change the order of the script's collectives. Does not decide the content of the messages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from malletrain.training.report import tell

T = TypeVar("T")


def new_side_group() -> Any:
    """Create a gloo group of all ranks; return None for one rank. Collective: every rank calls it
    at the same point of the script.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.new_group(backend="gloo") if distributed.get_world_size() > 1 else None


class Team:
    """All ranks of a process group, for joint operations. If one rank fails, every rank raises the
    error of the first failed rank.

    Args:
        group: group of :func:`new_side_group`; None for one rank.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank, self.world = 0, 1
        if group is not None:
            import torch.distributed as dist

            self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` on every rank.

        Returns:
            On rank 0 the results by rank; on other ranks an empty list.

        Raises:
            Exception: the error of the first failed rank, on every rank.
        """
        result, error = _attempt(work)
        if self.group is None:
            if error is not None:
                raise error
            return [result]
        import torch.distributed as dist

        results: list[Any] = [None] * self.world
        dist.gather_object(
            (result, _sendable(error)), results if self.rank == 0 else None, group=self.group
        )
        verdict = [next((e for _, e in results if e is not None), None) if self.rank == 0 else None]
        dist.broadcast_object_list(verdict, group=self.group)
        if verdict[0] is not None:
            raise verdict[0]
        return [value for value, _ in results] if self.rank == 0 else []

    def from_rank_0(self, work: Callable[[], T]) -> T:
        """Call ``work`` on rank 0, and return its result, or raise its error, on every rank."""
        box: list[Any] = [None]
        if self.rank == 0:
            result, error = _attempt(work)
            box = [(result, _sendable(error))]
        if self.group is not None:
            import torch.distributed as dist

            dist.broadcast_object_list(box, group=self.group)
        value, error = box[0]
        if error is not None:
            raise error
        answer: T = value
        return answer


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # the other ranks receive it and raise it as well
        return None, error


def _sendable(error: Exception | None) -> Exception | None:
    """Return ``error`` as an exception that can be pickled and has a readable message."""
    from malletrain.training.snapshot_file import SnapshotError

    if error is None or isinstance(error, SnapshotError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, error.filename)
    return RuntimeError(f"{type(error).__name__}: {error}")


class Agreement:
    """Sends a request of rank 0 to all ranks, so that all act on it at the same step: broadcasts
    one number per step.

    Rank 0 broadcasts at each step, and all ranks read the number at the next step, so that no rank
    waits for the message. :mod:`malletrain.training.snapshot` defines the numbers.

    Args:
        group: group of :func:`malletrain.training.side_group.new_side_group`; None for one rank,
            whose requests apply at once.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._pending_broadcast: tuple[Any, Any] | None = None
        self._broken = False

    def exchange(self, request: int) -> int:
        """Send this step's ``request`` (only rank 0's is used).

        Returns:
            The request of the step before, the same on every rank; 0 at the first step, and after a
            rank was lost.
        """
        if self._group is None:
            return request
        if self._broken:
            return 0
        try:
            previous = self._receive()
            self._send(request)
        except Exception as error:  # the script's own next collective fails, too
            self._broken = True
            tell(f"A rank cannot be reached, so the ranks cannot take snapshots together: {error}")
            return 0
        return previous

    def _receive(self) -> int:
        if self._pending_broadcast is None:
            return 0
        work, number = self._pending_broadcast
        work.wait()
        return int(number.item())

    def _send(self, request: int) -> None:
        import torch
        import torch.distributed as dist

        number = torch.tensor([request], dtype=torch.int64)
        source = dist.get_global_rank(self._group, 0)
        self._pending_broadcast = dist.broadcast(number, source, self._group, async_op=True), number
