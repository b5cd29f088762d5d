"""The template of a farm's tasks: words of a command or a path in which names in braces stand for
values. Pure.

    {name}   the value of the task in that column      {index}   the task's number, from 0
    {}       the only column                           {{  }}    a brace

A column called ``index`` replaces the task's number. A closing brace on its own is a brace. Decides
what a name means and which names are unknown. Values are inserted as they are: no shell reads them,
and braces in a value have no meaning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

INDEX = "index"
"""Name of the task's number."""
OUTPUT = "output"
"""Name of the temporary result file in the command of a farm that has one."""

_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|\{")
_NOTHING: Mapping[str, str] = MappingProxyType({})


def expand(
    words: Sequence[str],
    columns: Sequence[str],
    values: Sequence[str],
    index: int,
    more: Mapping[str, str] = _NOTHING,
) -> list[str]:
    """Return the words with the values of one task.

    Args:
        words: words of the template.
        columns: names of the values.
        values: the task's values, one for each column.
        index: the task's number, from 0.
        more: further names, such as that of the result file, and what they stand for.

    Raises:
        ValueError: the template has an unknown name; :func:`problems` says which.
    """
    value_of = {INDEX: str(index), **more, **dict(zip(columns, values, strict=True))}
    if len(columns) == 1:
        value_of.setdefault("", values[0])

    def value(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        if match[1] is None or match[1] not in value_of:
            raise ValueError(problems(words, columns, tuple(more)))
        return value_of[match[1]]

    return [_FIELD.sub(value, word) for word in words]


def problems(words: Sequence[str], columns: Sequence[str], more: Sequence[str] = ()) -> str:
    """Return what is wrong with a template, as a sentence; empty if nothing is.

    Args:
        words: words of the template.
        columns: names of the values.
        more: further known names.
    """
    defined = [*dict.fromkeys([*columns, *more, INDEX])]
    names = ", ".join(f"{{{name}}}" for name in defined)
    for word in words:
        for match in _FIELD.finditer(word):
            name = match[1]
            if match[0] in ("{{", "}}") or name in defined or (name == "" and len(columns) == 1):
                continue
            if name is None:
                return (
                    f"'{_short(word)}' has an opening brace without a closing one; write {{{{ for "
                    "a brace."
                )
            if name == "":
                return (
                    f"{{}} in '{_short(word)}' means the only column, and the tasks have "
                    f"{len(columns)}; known are {names}."
                )
            return (
                f"{{{_short(name)}}} in '{_short(word)}' is no column of the tasks; known are "
                f"{names}. Write {{{{ and }}}} for braces."
            )
    return ""


def escaped(text: str) -> str:
    """Return a template that stands for this text as it is."""
    return text.replace("{", "{{").replace("}", "}}")


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:99]}…"
