"""Checks that an answer of the main scheduler is complete, and turns errors in reading it into
SchedulerError.

The commands of the main scheduler end each line with a newline. Some sites replace them by scripts
that exit with status 0 even if the command inside fails. A truncated line can look like a valid
one: lease ``l1`` instead of ``l12``. (JSON needs no such check: truncated JSON is invalid.)
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scavenger.batch.commands import shorten
from scavenger.interface import SchedulerError


def require_complete(text: str, command: str) -> str:
    """Return ``text`` if its last line ends with a newline. Raises SchedulerError that names
    ``command`` if it does not.
    """
    if text and not text.endswith("\n"):
        last = shorten(text[text.rfind("\n") + 1 :][-1000:], 120)
        raise SchedulerError(
            f'The answer of {command} cannot be understood: it stops at "{last}", within a line. '
            "Nothing was changed."
        )
    return text


@contextmanager
def raising_scheduler_error(scheduler: str) -> Iterator[None]:
    """Context in which answers of ``scheduler`` are parsed. Turns unexpected errors of the parser
    (a number with thousands of digits, a malformed name) into SchedulerError.
    """
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise SchedulerError(
            f"An answer of {scheduler} cannot be understood: {type(error).__name__}, "
            f"{shorten(str(error), 120)} ({Path(where.filename).name}, line {where.lineno}). "
            "Nothing was changed."
        ) from error
