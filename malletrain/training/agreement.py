"""What rank 0 wants, known to all ranks at the same step.

Decides how a wish travels: rank 0 sends one number at every step, and all ranks act on it at the
next one, so that nobody waits for a message on its way. What is wished is
:mod:`malletrain.training.snapshot`'s.
"""

from __future__ import annotations

from typing import Any

from malletrain.training.report import tell


class Agreement:
    """One number a step from rank 0 to all.

    Args:
        group: of :func:`malletrain.training.side_group.new_side_group`; None for one rank, whose
            wish counts at once.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._under_way: tuple[Any, Any] | None = None
        self._broken = False

    def exchange(self, wish: int) -> int:
        """Send this step's wish (rank 0's counts) and return that of the step before, on every
        rank alike; 0 at the first step, and after a rank was lost.
        """
        if self._group is None:
            return wish
        if self._broken:
            return 0
        try:
            before = self._arrived()
            self._send(wish)
        except Exception as error:  # the script's own next collective says the same, louder
            self._broken = True
            tell(f"A rank cannot be reached any more, so no snapshot is agreed upon: {error}")
            return 0
        return before

    def _arrived(self) -> int:
        if self._under_way is None:
            return 0
        work, word = self._under_way
        work.wait()
        return int(word.item())

    def _send(self, wish: int) -> None:
        import torch
        import torch.distributed as dist

        word = torch.tensor([wish], dtype=torch.int64)
        source = dist.get_global_rank(self._group, 0)
        self._under_way = dist.broadcast(word, source, self._group, async_op=True), word
