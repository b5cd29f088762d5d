"""``--array``: one submission, a job for each index. Pure.

Decides which indices exist and where ``{index}`` is replaced.
"""

from __future__ import annotations

import re

import msgspec

from malletrain.protocol import env
from malletrain.protocol.messages import JobSpec
from malletrain.submission.error import SpecError

PLACE = "{index}"
MOST_JOBS = 1000
ARRAY_HELP = "indices and ranges of them with commas between, such as 1-10, 0-20:5 or 1,4,9"
_PART = re.compile(r"\s*([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?\s*")


def indices(text: str, most: int = MOST_JOBS, what: str = "jobs") -> tuple[int, ...]:
    """Return the indices of ``--array``, in their order, without duplicates.

    Args:
        text: indices and ranges of them.
        most: maximum number of indices.
        what: what an index stands for, in error messages.

    Raises:
        SpecError: the text is not an array, or has too many indices.
    """
    indices_: dict[int, None] = {}
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise SpecError(f'"{text}" is no array; accepted is {ARRAY_HELP}.', "array")
        first = int(match[1])
        last, step = int(match[2] or first), int(match[3] or 1)
        if last < first or step < 1:
            raise SpecError(
                f'"{part.strip()}" goes from no index to none; accepted is {ARRAY_HELP}.', "array"
            )
        if len(indices_) + (last - first) // step >= most:
            raise SpecError(f'"{text}" is more than {most:,} {what}.', "array")
        indices_.update(dict.fromkeys(range(first, last + 1, step)))
    return tuple(indices_)


def one_of(spec: JobSpec, index: int) -> JobSpec:
    """Return the job for one index. The number replaces ``{index}`` in its arguments and
    variables, is appended to its name, and is passed to the script in a variable.
    """
    number = str(index)
    name = spec.name
    return msgspec.structs.replace(
        spec,
        name=f"{name[: 63 - len(number)]}-{number}",
        args=tuple(arg.replace(PLACE, number) for arg in spec.args),
        env={
            **{key: value.replace(PLACE, number) for key, value in spec.env.items()},
            env.ARRAY_INDEX: number,
        },
    )
