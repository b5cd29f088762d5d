"""The batch script of a lease, for every batch scheduler: a site's template with the agent's
environment and command put in.

Nothing that comes from outside passes through a shell unquoted. Decides how a command stands in a
script, not how the script is submitted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from scavenger.interface import SchedulerError

PLACE = "#MALLETRAIN-LEASE"
"""The line of a batch script that is replaced by the environment and the command of the lease."""
KEPT_OUTPUTS = 200
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


KEPT_AT_HOME = ".local/state/malletrain/leases"
"""Where leases of other users keep what they print, in their own home directories, for two days."""
_KEEP_AT_HOME = f"""words="${{HOME:+$HOME/{KEPT_AT_HOME}}}"
if [ -n "$words" ] && mkdir -p "$words" 2>/dev/null \\
        && ( : >>"$words/$MALLETRAIN_LEASE.out" ) 2>/dev/null; then
    find "$words" -name '*.out' -mtime +1 -delete 2>/dev/null
    exec >>"$words/$MALLETRAIN_LEASE.out" 2>&1
fi
unset words"""


def lease_script(
    template: str, argv: Sequence[str], env: Mapping[str, str], keep_at_home: bool = False
) -> bytes:
    """``template`` with the lease in place of its PLACE line: variables exported, the command as
    positional parameters. ``keep_at_home``: what it prints from there on is kept in KEPT_AT_HOME.

    Raises SchedulerError when something in it cannot be passed on.
    """
    before, found, after = template.partition(f"\n{PLACE}\n")
    if not found:
        raise SchedulerError(
            f"The batch script of the leases has no line {PLACE}, where the agent's command is "
            "put; add it before exec."
        )
    lines = []
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            raise SchedulerError(f"{name!r} is no name of an environment variable.")
        lines.append(f"export {name}={_quote(value)}")
    if keep_at_home:
        lines.append(_KEEP_AT_HOME)
    lines.append("set -- " + " ".join(_quote(word) for word in argv))
    text = "\n".join([before, *lines, after])
    if "\0" in text:
        raise SchedulerError(
            "The command or environment of a lease contains a NUL character, which cannot be "
            "passed on."
        )
    return text.encode("utf-8", "surrogateescape")


def owner_prefix(submit_as: Sequence[str], owner: str | None) -> list[str]:
    """What stands before a command that must run as ``owner`` (None: as this process's user):
    ``submit_as`` with {owner} filled in.
    """
    return [word.replace("{owner}", owner) for word in submit_as] if owner is not None else []


def forget_outputs(folder: Path | None, kept: int = KEPT_OUTPUTS) -> None:
    """Keep what the newest leases printed only."""
    if folder is None or not folder.is_dir():
        return
    files = sorted(folder.glob("*.out"), key=_modified, reverse=True)
    for path in files[kept:]:
        path.unlink(missing_ok=True)


def _quote(text: str) -> str:
    """For a POSIX shell. sbatch and qsub refuse a script with carriage returns before line breaks,
    so those are made by printf.
    """
    return shlex.quote(text).replace("\r", "'\"$(printf '\\015')\"'")


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
