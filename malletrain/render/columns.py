"""Tables that fit their terminal: which columns are shown at a width, and how wide. Also the
terminal's own properties: width, colour, pipe.

A number or an id is shown whole or not at all. Columns that do not fit are dropped, the least
important first; text is shortened with an ellipsis; a sentence (a note) moves to separate lines
below its row. :mod:`malletrain.render.tables` decides the columns.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

PIPE_WIDTH = 200
"""Columns when the output is not a terminal: tables are then for ``grep`` and ``less -S``, so
nothing is cut off at 80.
"""


def console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """Return a console that honours NO_COLOR and COLUMNS and is plain text in a pipe.

    Numbers in text are not coloured, ``[brackets]`` in names are not read as markup and ``:words:``
    not as emoji.
    """
    result = Console(
        file=file, stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=False
    )
    columns = os.environ.get("COLUMNS", "")
    if not columns.isdigit() or not int(columns):  # 0: unknown, as a terminal without a size says
        if not result.is_terminal:
            result.width = PIPE_WIDTH
        elif columns.isdigit():
            result.width = shutil.get_terminal_size().columns
    return result


def redraws(terminal: Console) -> bool:
    """Return whether a live picture can be drawn on it. On a dumb terminal (``TERM=dumb``, as in
    Emacs) rich draws none.
    """
    return terminal.is_terminal and not terminal.is_dumb_terminal


GAP = 2
"""Number of blanks between two columns."""
MIN_NOTE_WIDTH = 40
"""Minimum width for a note on the line of its row."""
INDENT = 4
"""Number of blanks before a note on a separate line."""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    head: str
    """Its heading."""
    right: bool = False
    """Aligned to the right, as numbers are."""
    drop: int = 0
    """0: always shown; if the table is too wide, the column with the highest value is dropped
    first."""
    least: int = 0
    """Minimum width to which its text may be shortened; 0: never shortened."""
    middle: bool = False
    """Whether to shorten in the middle, for names that differ at their ends."""
    note: bool = False
    """Whether it holds sentences: shown in the last column if there is room, else below each row,
    never shortened."""


def fit(columns: Sequence[Column], natural: Sequence[int], width: int) -> dict[int, int]:
    """Return the columns that are shown at ``width`` and their widths: index → width.

    Args:
        columns: the columns; a note among them is the last.
        natural: the natural width of each, including its heading.
        width: width of the terminal. A note that does not fit goes below its row.
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
        if remaining >= min(natural[last], MIN_NOTE_WIDTH):
            shown[last] = min(remaining, natural[last])
    return shown


def _least(column: Column, natural: int) -> int:
    return min(natural, max(column.least, cell_len(column.head))) if column.least else natural


def _total(shown: dict[int, int]) -> int:
    return sum(shown.values()) + GAP * max(0, len(shown) - 1)


def shorten(text: Text, width: int, *, middle: bool = False) -> Text:
    """Return ``text`` shortened to ``width`` columns, with an ellipsis. Removes whole words at its
    end, so that no number is cut; or its ``middle``.
    """
    if text.cell_len <= width:
        return text
    shortened = text.copy()
    if not middle or width < 3:
        shortened.truncate(width, overflow="ellipsis")
        blank = shortened.plain.rfind(" ")
        return shortened if blank < 0 else shortened[: blank + 1] + "…"
    right = width // 2
    end = len(text)
    while cell_len(text.plain[end - 1 :]) <= right:
        end -= 1
    shortened.truncate(width - right, overflow="ellipsis")
    return shortened + text[end:]


class FittedTable:
    """A table that adapts to the width of the terminal.

    Args:
        columns: see :class:`Column`; at most one note, the last.
        header: whether the headings are shown.
        rule: whether a line is drawn below them.
        alike: prefix of a note that several rows share and that is shown once below the last of
            them, such as "these {rows}: "; if empty, each row shows its own.
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
        """Add a row with one cell per column."""
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
        """Yield a row with its note in the last column, on as many lines as the note needs."""
        last = len(row) - 1
        pieces = row[last].wrap(console, shown[last]) if row[last].plain else [Text()]
        for k, piece in enumerate(pieces):
            cells = row[:last] if k == 0 else tuple(Text() for _ in row[:last])
            piece.rstrip()
            yield self._line((*cells, piece), shown)


def indented(console: Console, note: Text, width: int) -> Iterator[Text]:
    """Yield a note on separate lines."""
    for piece in note.wrap(console, max(1, width - INDENT)):
        piece.rstrip()
        yield Text(" " * INDENT) + piece
