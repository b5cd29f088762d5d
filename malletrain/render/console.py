"""Properties of the terminal: width, colour, pipe. Decides how much a terminal can show, not what
is shown.
"""

from __future__ import annotations

import os
from typing import IO

from rich.console import Console

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
    if not result.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        result.width = PIPE_WIDTH
    return result
