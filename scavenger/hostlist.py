"""Node lists in Slurm's form: ``n[1-3,07],login1`` (scontrol(1), "show hostnames").

Pure. Slurm prints such lists; messages and commands of all schedulers use them too. A name that
does not have this form is left unchanged.

ClusterShell's NodeSet is a set: it sorts the names, and reads "@" and "!" as groups and operations.
Here lists keep their order, and such a text is a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from scavenger.interface import SchedulerError

MAX_NODES = 200_000
"""Maximum number of nodes in a list. It is larger than any machine, so a longer list is damaged."""
_PIECE = re.compile(r"[^\[\],\s]*(?:\[[0-9,-]+\][^\[\],\s]*)+|[^\[\],\s]+")
_BRACKET = re.compile(r"\[([0-9,-]+)\]")
_NUMBER = re.compile(r"^(.*?)(\d+)$")


class HostlistError(SchedulerError):
    """The text is not a node list."""


@lru_cache(maxsize=4096)
def expand(text: str) -> tuple[str, ...]:
    """Return the node names in ``text``, in its order. Several brackets in a name expand to all
    their combinations.

    Raises HostlistError if ``text`` is not a node list or has more than MAX_NODES nodes.
    """
    names: list[str] = []
    position = 0
    for match in _PIECE.finditer(text):
        if text[position : match.start()].strip(", \t") != "":
            break
        names += _expand_piece(match[0], text)
        position = match.end()
        if len(names) > MAX_NODES:
            raise HostlistError(f"A list of more than {MAX_NODES} nodes: {text[:60]!r}.")
    if text[position:].strip(", \t\n") != "":
        raise HostlistError(f"This is no list of nodes: {text[:60]!r}.")
    return tuple(names)


def _expand_piece(piece: str, whole: str) -> list[str]:
    if "[" not in piece:
        return [piece]
    parts = _BRACKET.split(piece)  # text, ranges, text, ranges, …, text
    names = [parts[0]]
    for ranges, tail in zip(parts[1::2], parts[2::2], strict=True):
        endings = [number + tail for number in _numbers(ranges, whole)]
        if len(names) * len(endings) > MAX_NODES:
            raise HostlistError(f"A list of more than {MAX_NODES} nodes: {whole[:60]!r}.")
        names = [name + ending for name in names for ending in endings]
    return names


def _numbers(ranges: str, whole: str) -> list[str]:
    out: list[str] = []
    for part in ranges.split(","):
        low, dash, high = part.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise HostlistError(f"This is no list of nodes: {whole[:60]!r}.")
        if not dash:
            out.append(low)
            continue
        first, last = int(low), int(high)
        if last < first or last - first > MAX_NODES:
            raise HostlistError(f"This is no list of nodes: {whole[:60]!r}.")
        width = len(low) if low[0] == "0" or len(low) == len(high) else 0
        out += (
            [f"{number:0{width}d}" for number in range(first, last + 1)]
            if width
            else [str(n) for n in range(first, last + 1)]
        )
    return out


def fold(names: Iterable[str]) -> str:
    """Return the short form of the set ``names``, sorted. :func:`expand` is the inverse."""
    plain: list[str] = []
    groups: dict[tuple[str, int], list[int]] = {}
    for name in set(names):
        match = _NUMBER.match(name)
        if match is None:
            plain.append(name)
        else:
            digits = match[2]
            width = len(digits) if digits[0] == "0" and len(digits) > 1 else 0
            groups.setdefault((match[1], width), []).append(int(digits))
    folded = plain
    for (prefix, width), numbers in groups.items():
        numbers.sort()
        runs: list[list[int]] = []
        for number in numbers:
            if (
                runs
                and number == runs[-1][1] + 1
                and len(f"{number:0{width}d}") == len(f"{runs[-1][0]:0{width}d}")
            ):
                runs[-1][1] = number
            else:
                runs.append([number, number])
        texts = [f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in runs]
        folded.append(
            f"{prefix}{texts[0]}" if len(numbers) == 1 else f"{prefix}[{','.join(texts)}]"
        )
    return ",".join(sorted(folded))


MAX_LENGTH = 80
"""Maximum length of a node list within a sentence, characters."""


def named(names: Iterable[str], max_length: int = MAX_LENGTH) -> str:
    """Return ``names`` for a sentence, such as ``n[1-40]``. If that is longer than ``max_length``
    characters, the names that do not fit are replaced by their number.
    """
    every = sorted(set(names), key=_natural)
    text = fold(every)
    if len(text) <= max_length or len(every) == 1:
        return text
    # Bisection: a list with one more name is no shorter.
    fits, too_many = 1, len(every)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if len(fold(every[:middle])) <= max_length:
            fits = middle
        else:
            too_many = middle
    return f"{fold(every[:fits])} and {len(every) - fits} more"


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that puts n2 before n10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)
