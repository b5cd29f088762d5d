"""Sends a request of rank 0 to all ranks, so that all act on it at the same step.

Decides when the request is sent and read: rank 0 broadcasts one number at each step, and all ranks
read it at the next step, so that no rank waits for the message. :mod:`malletrain.training.snapshot`
defines the numbers.
"""

from __future__ import annotations

from typing import Any

from malletrain.training.report import tell


class Agreement:
    """Broadcasts one number per step from rank 0 to all ranks.

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
