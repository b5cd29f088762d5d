"""``#MALLETRAIN`` lines at the head of a script: options of ``malletrain submit``, like ``#SBATCH``
lines for sbatch. Pure.

Decides which lines are directives: those that begin with the word ``#MALLETRAIN``, or with
``# MALLETRAIN`` and an option, before the first line that is neither empty nor a comment. The
command line interprets their options.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from malletrain.submission.error import SpecError

_LINE = re.compile(r"#(?:MALLETRAIN|[ \t]+MALLETRAIN(?=\s+-))(?:\s+(.*))?\s*\Z")
"""A blank after the ``#`` is allowed if an option follows, because Python formatters insert one.
``#MALLETRAIN`` alone has no options.
"""


@dataclass(frozen=True)
class Directive:
    """One directive line."""

    line: int
    """Its number in the script, from 1."""
    words: tuple[str, ...]
    """Its options, split as by a shell; text after a ``#`` is a comment."""


def directives(text: str, where: str) -> tuple[list[Directive], list[int]]:
    """Return the directives of a script, and the numbers of lines that look like directives but
    come too late.

    Args:
        text: the script.
        where: its name, for error messages.

    Raises:
        SpecError: a line has an unmatched quotation mark, or ends with a backslash.
    """
    directives_: list[Directive] = []
    late: list[int] = []
    in_head = True
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        in_head = in_head and (not stripped or stripped.startswith("#"))
        match = _LINE.match(line.rstrip())
        if match is None:
            continue
        if not in_head:
            late.append(number)
            continue
        try:
            words = tuple(shlex.split(match[1] or "", comments=True))
        except ValueError as error:
            problem = (
                "backslash at the end" if "escaped" in str(error) else "unmatched quotation mark"
            )
            raise SpecError(f"{where} line {number}: {problem}: {line.strip()[:80]}") from None
        directives_.append(Directive(number, words))
    return directives_, late
