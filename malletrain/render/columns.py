"""Tables that fit their terminal: which columns are shown at a width, and how wide.

A number or an id is shown whole or not at all. What does not fit is dropped, the least important
column first; text is shortened with an ellipsis; a sentence (a note) gets lines of its own below
its row. What the columns are is decided in :mod:`malletrain.render.tables`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

GAP = 2
"""Blanks between two columns."""
NOTE_LEAST = 40
"""A note stands in the line of its row where so many columns are left for it."""
INDENT = 4
"""Blanks before a note on a line of its own."""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    head: str
    """Its heading."""
    right: bool = False
    """Aligned to the right, as numbers are."""
    drop: int = 0
    """0: always shown; of the others the highest is dropped first where the table is too wide."""
    least: int = 0
    """0: never shortened; else text that may be shortened to so many columns."""
    middle: bool = False
    """Shortened in the middle, as names are told apart by their ends."""
    note: bool = False
    """Sentences: the last column where there is room, else below each row, always whole."""


def fit(columns: Sequence[Column], natural: Sequence[int], width: int) -> dict[int, int]:
    """Which columns are shown on ``width`` and how wide each is: index → width.

    Args:
        columns: the columns; a note among them is the last.
        natural: the width that each would like to have, its heading's included.
        width: of the terminal. A note that is left out goes below its row.
    """
    shown = {k: _least(column, natural[k]) for k, column in enumerate(columns) if not column.note}
    while _total(shown) > width:
        droppable = [k for k in shown if columns[k].drop]
        if not droppable:
            break
        del shown[max(droppable, key=lambda k: columns[k].drop)]
    spare = width - _total(shown)
    texts = [k for k in shown if columns[k].least]
    while spare > 0 and (small := [k for k in texts if shown[k] < natural[k]]):
        shown[min(small, key=lambda k: shown[k])] += 1
        spare -= 1
    last = len(columns) - 1
    if columns[last].note and len(shown) == last and all(shown[k] == natural[k] for k in shown):
        remaining = spare - (GAP if shown else 0)
        if remaining >= min(natural[last], NOTE_LEAST):
            shown[last] = min(remaining, natural[last])
    return shown


def _least(column: Column, natural: int) -> int:
    return min(natural, max(column.least, cell_len(column.head))) if column.least else natural


def _total(shown: dict[int, int]) -> int:
    return sum(shown.values()) + GAP * max(0, len(shown) - 1)


def shorten(text: Text, width: int, *, middle: bool = False) -> Text:
    """``text`` on ``width`` columns, what is left out shown by an ellipsis.

    Its end is left out by whole words, so that no number in it is cut; or its ``middle``.
    """
    if text.cell_len <= width:
        return text
    made = text.copy()
    if not middle or width < 3:
        made.truncate(width, overflow="ellipsis")
        blank = made.plain.rfind(" ")
        return made if blank < 0 else made[: blank + 1] + "…"
    right = width // 2
    end = len(text)
    while cell_len(text.plain[end - 1 :]) <= right:
        end -= 1
    made.truncate(width - right, overflow="ellipsis")
    return made + text[end:]


class FittedTable:
    """A table that fits the terminal it is printed on, whatever its width.

    Args:
        columns: see :class:`Column`; at most one note, the last.
        header: whether the headings are shown.
        rule: whether a line is drawn below them.
        alike: begins a note that stands below the last of several rows that all have it, such as
            "these {rows}: "; without it each has its own.
    """

    def __init__(
        self, *columns: Column, header: bool = True, rule: bool = True, alike: str = ""
    ) -> None:
        self.columns = columns
        self.header = header
        self.rule = rule
        self.alike = alike
        self.rows: list[tuple[Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        """One row; a cell a column."""
        self.rows.append(tuple(Text(c) if isinstance(c, str) else c for c in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, last = self.columns, len(self.columns) - 1
        natural = [
            max(
                [cell_len(column.head) if self.header else 0]
                + [row[k].cell_len for row in self.rows]
            )
            for k, column in enumerate(columns)
        ]
        shown = fit(columns, natural, options.max_width)
        if self.header:
            heads = [Text(column.head, "bold") for column in columns]
            yield self._line(heads, shown)
        if self.header and self.rule:
            yield Text("─" * min(_total(shown), options.max_width), "dim")
        below = columns[last].note and last not in shown
        run = 0
        for n, row in enumerate(self.rows):
            if last in shown and columns[last].note:
                yield from self._beside(console, row, shown)
                continue
            yield self._line(row, shown)
            if not below or not row[last].plain:
                continue
            run += 1
            if self.alike and self.rows[n + 1 :] and self.rows[n + 1][last] == row[last]:
                continue
            note = Text(self.alike.format(rows=run) if run > 1 else "") + row[last]
            yield from indented(console, note if self.alike else row[last], options.max_width)
            run = 0

    def _line(self, cells: Sequence[Text], shown: dict[int, int]) -> Text:
        line = Text(overflow="fold")
        for k, width in shown.items():
            column = self.columns[k]
            cell = shorten(cells[k], width, middle=column.middle) if column.least else cells[k]
            blanks = " " * (width - cell.cell_len)
            line.append(" " * GAP if line.plain else "")
            line.append_text(Text.assemble(blanks, cell) if column.right else cell + Text(blanks))
        line.rstrip()
        return line

    def _beside(
        self, console: Console, row: tuple[Text, ...], shown: dict[int, int]
    ) -> Iterator[Text]:
        """A row with its note in the last column, on as many lines as the note takes."""
        last = len(row) - 1
        pieces = row[last].wrap(console, shown[last]) if row[last].plain else [Text()]
        for k, piece in enumerate(pieces):
            cells = row[:last] if k == 0 else tuple(Text() for _ in row[:last])
            piece.rstrip()
            yield self._line((*cells, piece), shown)


def indented(console: Console, note: Text, width: int) -> Iterator[Text]:
    """A note on lines of its own."""
    for piece in note.wrap(console, max(1, width - INDENT)):
        piece.rstrip()
        yield Text(" " * INDENT) + piece
