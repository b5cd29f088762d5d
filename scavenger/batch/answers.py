"""Whether an answer of the main scheduler can be read: one made of lines is there to its end, and
what it makes a reader stumble over is the answer's fault.

The commands of the main scheduler end every line, and some sites have scripts in their place that
end well although what they ask does not. Of a line that was cut what is left can look like another
one: lease ``l1`` in the place of ``l12``. (JSON needs no such look: without its end it is none.)
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scavenger.batch.commands import shorten
from scavenger.interface import SchedulerError


def whole(text: str, command: str) -> str:
    """``text``, if its last line has an end. Raises SchedulerError, with ``command`` named in it,
    when it has not.
    """
    if text and not text.endswith("\n"):
        last = shorten(text[text.rfind("\n") + 1 :][-1000:], 120)
        raise SchedulerError(
            f'The answer of {command} cannot be understood: it stops at "{last}", within a line. '
            "Nothing was changed."
        )
    return text


@contextmanager
def understood(scheduler: str) -> Iterator[None]:
    """Inside, answers of ``scheduler`` are read. Raises SchedulerError for an error that nobody has
    thought of: a number of thousands of digits, a name that is no name.
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
