"""What the ranks of a stream tell each other at each step: who has a portion more, and where each
one's readers stand.

Decides how that travels: sent when a batch is handed out, looked at when the step is done, so that
nobody waits for it. What follows from it is :mod:`malletrain.training.stream`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from malletrain.training.stream_deal import Cursor

_NUMBERS = 4


class StepWord:
    """What all ranks said at one step."""

    def __init__(self, rows: Sequence[Any], work: Any = None) -> None:
        self._rows = rows
        self._work = work

    def _numbers(self) -> list[list[int]]:
        if self._work is not None:
            self._work.wait()
            self._rows, self._work = [each.tolist() for each in self._rows], None
        return list(self._rows)

    def all_have_more(self) -> bool:
        """Whether every rank has a portion more."""
        return all(more for more, *_ in self._numbers())

    def cursors(self) -> dict[int, Cursor]:
        """The cursor of the reader that each rank's portion came from, by list of the deal."""
        numbers = self._numbers()
        return {
            reader * len(numbers) + rank: (index, records)
            for rank, (_, reader, index, records) in enumerate(numbers)
            if reader >= 0
        }


def say(group: Any, more: bool, reader: int = -1, index: int = 0, records: int = 0) -> StepWord:
    """Tell all ranks of ``group`` (None: this one alone) how this one stands. Collective, but
    nobody waits.

    Args:
        group: of :func:`malletrain.training.side_group.new_side_group`.
        more: this rank has a portion more.
        reader, index, records: the reader of the portion just handed out, and its cursor.
    """
    mine = [int(more), reader, index, records]
    if group is None:
        return StepWord([mine])
    import torch

    numbers = [torch.empty(_NUMBERS, dtype=torch.int64) for _ in range(group.size())]
    return StepWord(numbers, group.allgather([numbers], [torch.tensor(mine)]))
