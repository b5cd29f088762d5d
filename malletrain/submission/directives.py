"""Lines at the head of a script that are options of its submission: ``#MALLETRAIN`` lines, with
options of ``malletrain submit``, and ``#SBATCH`` lines, read by ``malletrain map``. Pure.

Directives are lines that begin with the word ``#MALLETRAIN``, or with ``# MALLETRAIN`` and an
option, before the first line that is neither empty nor a comment. The command line interprets their
options.

Decides which of sbatch's options mean something for the tasks of a farm, and what. The others are
named, so that nobody believes that they are kept. Lines are read up to the first that is neither
empty nor a comment, as by sbatch (https://slurm.schedmd.com/sbatch.html).
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from malletrain.submission.error import SpecError
from malletrain.submission.farm import new_stamp

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


def foreign_directives(text: str) -> str:
    """Return ``#SBATCH`` or ``#PBS`` if a script has such lines at its head, and no directives of
    MalleTrain beside them; else an empty text.
    """
    head = itertools.takewhile(
        lambda line: not line.strip() or line.startswith("#"), text.splitlines()
    )
    lines = list(head)
    if any(_LINE.match(line.rstrip()) for line in lines):
        return ""
    matches = (re.match(r"(#SBATCH|#PBS)\s+-", line) for line in lines)
    return next((match[1] for match in matches if match), "")


SBATCH_SHORT_OPTIONS = {
    "a": "array",
    "c": "cpus-per-task",
    "D": "chdir",
    "e": "error",
    "G": "gpus",
    "J": "job-name",
    "n": "ntasks",
    "N": "nodes",
    "o": "output",
    "p": "partition",
    "t": "time",
    "A": "account",
    "q": "qos",
    "C": "constraint",
    "L": "licenses",
    "M": "clusters",
    "d": "dependency",
    "b": "begin",
    "w": "nodelist",
    "x": "exclude",
}
"""sbatch's short options with a value → the long ones."""
SBATCH_FLAGS = frozenset(
    (
        "contiguous",
        "exclusive",
        "hold",
        "ignore-pbs",
        "no-requeue",
        "overcommit",
        "oversubscribe",
        "parsable",
        "quiet",
        "reboot",
        "requeue",
        "spread-job",
        "test-only",
        "use-min-nodes",
        "verbose",
        "wait",
    )
)
"""sbatch's options without a value, or whose value follows an equals sign only."""
_ENTRY = re.compile(r"""(?:[^,'"]|'[^']*'|"[^"]*"|['"])+""")
"""An entry of a list in which a comma in quotes is no separator. sbatch has removed the quotes of
the shell before: ``--export="A='x,y'"``.
"""
GPUS = frozenset(("gres", "gpus", "gpus-per-task", "gpus-per-node"))
ALONE = frozenset((("nodes", "1"), ("ntasks", "1"), ("ntasks-per-node", "1")))
"""Options that say what holds for a task anyway."""
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "": 2**20}
"""Unit of a size in sbatch's options → bytes."""


@dataclass(frozen=True)
class BatchOptions:
    """What the head of a batch script says."""

    values: dict[str, object] = field(default_factory=dict)
    """Option of ``malletrain map`` → its value, as the command line converts it."""
    ignored: tuple[str, ...] = ()
    """Options of sbatch that are not used, as they are written."""


def batch_options(text: str, where: str, user: str = "") -> BatchOptions:
    """Return the options of a batch script.

    Args:
        text: the script.
        where: its name, for error messages.
        user: name of the user, for ``%u`` in ``--output``.

    Raises:
        SpecError: a line, or the value of an option that is used, cannot be read.
    """
    values: dict[str, object] = {}
    ignored: dict[str, None] = {}
    cores, per_core, whole_node = 1, 0, ""
    for line, name, value in _options(text, where):
        try:
            if name == "array":
                values["array"] = value
            elif name == "cpus-per-task":
                values["cpus"] = cores = int(value)
            elif name == "mem":
                values["memory_bytes"] = memory_of(value)
                whole_node = "" if values["memory_bytes"] else f"--mem={value}"
            elif name == "mem-per-cpu":
                per_core = memory_of(value)
            elif name == "time":
                values["time_s"] = time_of(value)
            elif name in GPUS:
                gpus, others = gpus_of(name, value)
                if gpus is not None:
                    values["gpus"] = gpus
                if others:
                    ignored[f"--{name}={others}"] = None
            elif name == "job-name":
                values["name"] = value
            elif name == "output" and value != "/dev/null":
                values["log"], left_out = log_of(value, user, new_stamp())
                for symbol in left_out:
                    ignored[f"{symbol} in --output={value}"] = None
            elif name == "chdir":
                values["workdir"] = value
            elif name == "export":
                entries = [re.sub("['\"]", "", entry) for entry in _ENTRY.findall(value)]
                words = [word for word in entries if word not in ("ALL", "NONE", "NIL")]
                values["env"] = tuple(words)
                if len(words) < len(entries):
                    ignored[f"--export={entries[0]}"] = None
            elif (name, value) not in ALONE:
                ignored[f"--{name}={value}" if value else f"--{name}"] = None
        except ValueError:
            raise SpecError(
                f"{where} line {line}: --{name} is {value!r}, which sbatch would not read either."
            ) from None
    if per_core and "memory_bytes" not in values:
        values["memory_bytes"] = per_core * cores
    if whole_node:  # all memory of the node: one task at a time
        del values["memory_bytes"]
        if values.get("gpus"):
            ignored[whole_node] = None
        elif values.pop("cpus", None):
            ignored[f"--cpus-per-task={cores} beside {whole_node}"] = None
    return BatchOptions(values, tuple(ignored))


_GPUS_OF_TYPE = re.compile(r"(?:[A-Za-z_][\w.-]*:)?([0-9]{1,6})")
_GRES_GPUS = re.compile(r"(?:gres[:/])?gpu(?::[A-Za-z_][\w.-]*)?(?::([0-9]{1,6}))?")


def gpus_of(name: str, value: str) -> tuple[int | None, str]:
    """Return the GPUs that a list of an option of :data:`GPUS` asks for, of all types together, and
    its other entries. None: it has no entry for GPUs.

    Args:
        name: long name of the option.
        value: its value, a list with commas: ``gpu:a100:1,gpu:v100:1`` or ``a100:1``.
    """
    pattern = _GRES_GPUS if name == "gres" else _GPUS_OF_TYPE
    entries = [(entry, pattern.fullmatch(entry)) for entry in value.split(",")]
    counts = [int(match[1] or 1) for _, match in entries if match]
    return sum(counts) if counts else None, ",".join(
        entry for entry, match in entries if match is None
    )


def time_of(text: str) -> float:
    """Return the seconds of ``--time``: minutes, m:s, h:m:s, d-h, d-h:m or d-h:m:s; 0 for no
    limit.

    Raises:
        ValueError: it is none of these.
    """
    if text in ("UNLIMITED", "INFINITE", "-1", "0"):
        return 0.0
    match = re.fullmatch(
        r"(?:([0-9]{1,4})-)?([0-9]{1,7})(?::([0-9]{1,5}))?(?::([0-9]{1,5}))?", text
    )
    if match is None:
        raise ValueError(text)
    days, *parts = (int(part) if part is not None else None for part in match.groups())
    first, second, third = (part or 0 for part in parts)
    if days is not None:  # d-h:m:s
        return float(days * 86400 + first * 3600 + second * 60 + third)
    if parts[2] is not None:  # h:m:s
        return float(first * 3600 + second * 60 + third)
    return float(first * 60 + second)


def memory_of(text: str) -> int:
    """Return the bytes of ``--mem``; without a unit it is in MiB.

    Raises:
        ValueError: it is no size.
    """
    match = re.fullmatch(r"([0-9]{1,12})([KMGT]?)B?", text.upper())
    if match is None:
        raise ValueError(text)
    return int(match[1]) * UNITS[match[2]]


LOG_PATTERNS = {
    "%": "%",
    "a": "{index}",
    "A": "{name}-STAMP",
    "j": "{name}-STAMP-{index}",
    "J": "{name}-STAMP-{index}",
    "x": "{name}",
    "n": "0",
    "t": "0",
    "s": "batch",
}
"""sbatch's replacement symbols (its manual page, "filename pattern") → what they are for a task:
the index of the array is its own, the job is the farm, and it has one node and one process. ``%u``
is the user. STAMP distinguishes the submissions of a farm, as the id of a job does, so that the
logs of one do not replace those of another."""
LEFT_OUT_OF_LOGS = frozenset("Nb")
"""Symbols that are left out: the node is not known before, and no part of an index is."""


def log_of(text: str, user: str, stamp: str) -> tuple[str, list[str]]:
    """Return the pattern of a farm's logs for that of ``--output``, and the symbols in it that are
    left out.

    Args:
        text: the value of ``--output``.
        user: name of the user.
        stamp: text that no other submission has (:func:`malletrain.submission.farm.new_stamp`).

    Raises:
        ValueError: it has a symbol that sbatch does not have.
    """
    own = {symbol: text.replace("STAMP", stamp) for symbol, text in LOG_PATTERNS.items()}
    symbols = own | {"u": user.replace("{", "{{").replace("}", "}}")}
    left_out: list[str] = []

    def replacement(match: re.Match[str]) -> str:
        width, symbol = match[1], match[2]
        if symbol in LEFT_OUT_OF_LOGS:
            left_out.append(f"%{symbol}")
            return ""
        if symbol not in symbols:
            raise ValueError(match[0])
        if width and symbol in "aAjJ":
            left_out.append(f"the width of {match[0]}")
        return symbols[symbol]

    if "\\" in text:  # sbatch replaces nothing then
        return text.replace("\\", "").replace("{", "{{").replace("}", "}}"), left_out
    escaped = text.replace("{", "{{").replace("}", "}}")
    return re.sub(r"%([0-9]*)(.?)", replacement, escaped), left_out


def _options(text: str, where: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, long name and value of each option."""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            return
        match = re.match(r"#SBATCH\s+(.*)", line)
        if match is None:
            continue
        if text.splitlines(keepends=True)[number - 1].endswith("\r\n"):
            raise SpecError(
                f"{where} has the line ends of Windows, with which no shell runs it, and sbatch "
                f"refuses it too. Convert it: dos2unix {where}"
            )
        try:
            words = shlex.split(match[1], comments=True)
        except ValueError as error:
            raise SpecError(f"{where} line {number}: {error}: {stripped[:80]}") from None
        while words:
            word = words.pop(0)
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
            elif word.startswith("-") and len(word) > 1:
                name, value = SBATCH_SHORT_OPTIONS.get(word[1], word[1]), word[2:].removeprefix("=")
                equals = value
            else:
                raise SpecError(f"{where} line {number}: {word} is no option of sbatch.")
            follows = not equals and name not in SBATCH_FLAGS and bool(words)
            if follows and not words[0].startswith("-"):
                value = words.pop(0)
            yield number, name, value
