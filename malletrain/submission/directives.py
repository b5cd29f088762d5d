"""``#MALLETRAIN`` lines at the head of a script: options of ``malletrain submit``, as ``#SBATCH``
lines are of sbatch. Pure.

Decides which lines count: those that begin with ``#MALLETRAIN`` and a blank, before the first line
that is neither empty nor a comment. What their words mean is the command line's business.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from malletrain.submission.error import SpecError

_LINE = re.compile(r"#(?:MALLETRAIN|[ \t]+MALLETRAIN(?=\s+-))(?:\s+(.*))?\s*\Z")
"""With a blank after the ``#`` too where an option follows, for formatters of Python put one there.
"""


@dataclass(frozen=True)
class Directive:
    """One line."""

    line: int
    """Its number in the script, from 1."""
    words: tuple[str, ...]
    """Its options, as a shell would split them; what follows a ``#`` is a comment."""


def directives(text: str, where: str) -> tuple[list[Directive], list[int]]:
    """The directives of a script, and the lines that look like one and stand too late.

    Args:
        text: the script.
        where: its name, for sentences.

    Raises:
        SpecError: a line whose quotes do not match.
    """
    directives_: list[Directive] = []
    late: list[int] = []
    head = True
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        head = head and (not stripped or stripped.startswith("#"))
        match = _LINE.match(line.rstrip())
        if match is None:
            continue
        if not head:
            late.append(number)
            continue
        try:
            words = tuple(shlex.split(match[1] or "", comments=True))
        except ValueError:
            raise SpecError(
                f"{where} line {number}: a quotation mark has no second one: {line.strip()[:80]}"
            ) from None
        directives_.append(Directive(number, words))
    return directives_, late
