"""Messages between the ranks of a stream at each step: whether a rank has a further portion, and
the cursors of its readers.

Decides when a message is sent and read: it is sent when a batch is yielded and read when the step
is done, so that no rank waits for it. :mod:`malletrain.training.stream` acts on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from malletrain.training.stream_deal import Cursor

_NUMBERS = 4


class StepWord:
    """The messages of all ranks at one step."""

    def __init__(self, rows: Sequence[Any], work: Any = None) -> None:
        self._rows = rows
        self._work = work

    def _numbers(self) -> list[list[int]]:
        if self._work is not None:
            self._work.wait()
            self._rows, self._work = [row.tolist() for row in self._rows], None
        return list(self._rows)

    def all_have_more(self) -> bool:
        """Return whether every rank has a further portion."""
        return all(more for more, *_ in self._numbers())

    def cursors(self) -> dict[int, Cursor]:
        """Return the cursor of each rank's current reader, by index of its list in the deal."""
        numbers = self._numbers()
        return {
            reader * len(numbers) + rank: (index, records)
            for rank, (_, reader, index, records) in enumerate(numbers)
            if reader >= 0
        }


def send_progress(
    group: Any, more: bool, reader: int = -1, index: int = 0, records: int = 0
) -> StepWord:
    """Send this rank's progress to all ranks of ``group``. Collective, but asynchronous.

    Args:
        group: group of :func:`malletrain.training.side_group.new_side_group`; None for one rank.
        more: whether this rank has a further portion.
        reader: number of the reader of the portion just yielded; -1 for none.
        index: list index in that reader's cursor.
        records: number of records in that reader's cursor.

    Returns:
        The messages of all ranks. Reading them waits for the ranks.
    """
    row = [int(more), reader, index, records]
    if group is None:
        return StepWord([row])
    import torch

    numbers = [torch.empty(_NUMBERS, dtype=torch.int64) for _ in range(group.size())]
    return StepWord(numbers, group.allgather([numbers], [torch.tensor(row)]))
