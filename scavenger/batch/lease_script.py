"""The batch script of a lease, for all batch schedulers: the site's template with the agent's
environment and command inserted.

Input from outside never passes through a shell unquoted. Decides how a command is written in a
script, not how the script is submitted.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from scavenger.interface import SchedulerError

PLACE = "#MALLETRAIN-LEASE"
"""The line of a batch script that is replaced by the environment and the command of the lease."""
MAX_OUTPUTS = 200
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


HOME_OUTPUT_DIR = ".local/state/malletrain/leases"
"""Directory for the output of other users' leases, relative to their home directories. Files are
kept for two days.
"""
_KEEP = f"""words="${{HOME:+$HOME/{HOME_OUTPUT_DIR}}}"
if [ -n "$words" ] && mkdir -p "$words" 2>/dev/null \\
        && ( : >>"$words/$MALLETRAIN_LEASE.out" ) 2>/dev/null; then
    find "$words" -name '*.out' -mtime +1 -delete 2>/dev/null
    MALLETRAIN_OUTPUT="$words/$MALLETRAIN_LEASE.out"
    exec >>"$MALLETRAIN_OUTPUT" 2>&1
fi
unset words"""
_KEEP_IN = """output=%s
if ( : >>"$output" ) 2>/dev/null; then exec >>"$output" 2>&1; fi
unset output"""


class Part(NamedTuple):
    """The command that one lease runs."""

    node: str
    """Node on which the lease runs."""
    argv: Sequence[str]
    """The command."""
    env: Mapping[str, str]
    """Environment variables to export."""
    output: Path | None = None
    """File for its output, if the job does not write one."""
    keep_at_home: bool = False
    """Whether its output is stored in HOME_OUTPUT_DIR."""


def lease_script(template: str, part: Part) -> bytes:
    """Return ``template`` with its PLACE line replaced by the lease: exported variables, and the
    command as positional parameters.

    Raises SchedulerError if a value cannot be passed on.
    """
    return fill(template, _exports(part.env) + _words(part))


def shared_script(template: str, node: str, parts: Sequence[Part]) -> bytes:
    """Return ``template`` with its PLACE line replaced by a choice among several leases. The script
    runs the lease of its node, or ends if there is none.

    Args:
        template: batch script of a lease.
        node: shell expression for the name of the node, such as ``$SLURMD_NODENAME``.
        parts: the commands of the leases.
    """
    return fill(template, choice(node, parts))


def choice(node: str, parts: Sequence[Part]) -> list[str]:
    """Return the lines that choose one of several leases by the node."""
    first_env, *other_envs = (part.env for part in parts)
    common = {k: v for k, v in first_env.items() if all(env.get(k) == v for env in other_envs)}
    lines = [*_exports(common), f'case "{node}" in']
    for part in parts:
        own_env = {k: v for k, v in part.env.items() if k not in common}
        lines += [f"{quote(part.node)})", *_exports(own_env), *_words(part), ";;"]
    return [*lines, f'*) echo "No lease is for {node}." >&2; exit 1;;', "esac"]


def fill(template: str, lines: Sequence[str]) -> bytes:
    """Return ``template`` with its PLACE line replaced by ``lines``. Raises SchedulerError."""
    head, marker, tail = template.partition(f"\n{PLACE}\n")
    if not marker:
        raise SchedulerError(
            f"The batch script of the leases has no line {PLACE}, where the agent's command is "
            "put; add it before exec."
        )
    text = "\n".join([head, *lines, tail])
    if "\0" in text:
        raise SchedulerError(
            "The command or environment of a lease contains a NUL character, which cannot be "
            "passed on."
        )
    return text.encode("utf-8", "surrogateescape")


def _exports(env: Mapping[str, str]) -> list[str]:
    for name in env:
        if not _VARIABLE.fullmatch(name):
            raise SchedulerError(f"{name!r} is no name of an environment variable.")
    return [f"export {name}={quote(value)}" for name, value in env.items()]


def _words(part: Part) -> list[str]:
    output_lines = (
        [_KEEP]
        if part.keep_at_home
        else [_KEEP_IN % quote(str(part.output))]
        if part.output is not None
        else []
    )
    return [*output_lines, "set -- " + " ".join(quote(word) for word in part.argv)]


def owner_prefix(submit_as: Sequence[str], owner: str | None) -> list[str]:
    """Return the prefix of a command that must run as ``owner`` (None: as this process's user):
    ``submit_as`` with {owner} filled in.
    """
    return [word.replace("{owner}", owner) for word in submit_as] if owner is not None else []


def forget_outputs(folder: Path | None, max_outputs: int = MAX_OUTPUTS) -> str:
    """Delete the outputs of all but the newest ``max_outputs`` leases. What cannot be read or
    deleted now stays, because polls must go on. Return a sentence about that; empty if there is
    none.
    """
    if folder is None:
        return ""
    try:
        with os.scandir(folder) as entries:
            outputs = [folder / entry.name for entry in entries if entry.name.endswith(".out")]
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"The outputs of leases in {folder} cannot be listed: {error.strerror}."
    trouble = ""
    for path in sorted(outputs, key=_modified, reverse=True)[max_outputs:]:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            trouble = (
                f"Old outputs of leases in {folder} cannot be deleted and accumulate: "
                f"{error.strerror}."
            )
    return trouble


def quote(text: str) -> str:
    """Quote ``text`` for a POSIX shell. Carriage returns are written with printf, because sbatch
    and qsub refuse scripts that contain them before line breaks.
    """
    return shlex.quote(text).replace("\r", "'\"$(printf '\\015')\"'")


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
