"""The umask and the limits of processes (``ulimit``) that the setup of a farm sets. The setup runs
once on a node, in a shell of its own, which writes them to a file
(:func:`malletrain.agent.software.task_environment_command`).

Decides who gets them: the launcher takes the umask, as the files that it creates for tasks are the
job's; the limits are for tasks only, because the launcher may need more than a task.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

_LINE = re.compile(r".*\((?:[^()]*, )?-(\w)\) +(\S+)")
"""A line of ``ulimit -a``: ``open files (-n) 1024``, ``core file size (blocks, -c) 0``."""
SUFFIX = ".limits"
"""Suffix of the file, after the name of that of the variables."""


def take_over(path: str) -> tuple[str, ...]:
    """Take the umask in the file, and return the words before the command of a task that set its
    limits; empty if they are those of this process.

    Args:
        path: the file, with the output of ``umask; ulimit -S -a``. It may be missing: agents of
            earlier versions write none.
    """
    try:
        with open(path) as file:
            mask, limits = _read(file.read())
        own = subprocess.run(
            ["bash", "-p", "-c", "umask; ulimit -S -a"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
        own_mask, own_limits = _read(own.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return ()
    if mask != own_mask:
        os.umask(mask & 0o077)  # the owner's own access is never masked
    changed = [f"ulimit -S -{o} {v}" for o, v in limits.items() if own_limits.get(o, v) != v]
    # -p: without the file that BASH_ENV names.
    return ("bash", "-p", "-c", f'{" && ".join(changed)} && exec "$@"', "bash") if changed else ()


def is_there(program: str, search_path: str | None, workdir: str) -> bool:
    """Return whether a program can be found, as ``exec`` does.

    Args:
        program: its name or path.
        search_path: ``PATH``; None for the system's default.
        workdir: directory of relative paths.
    """
    if os.sep in program:
        return os.path.exists(os.path.join(workdir, program))
    directories: Sequence[str] = (search_path or os.defpath).split(os.pathsep)
    return any(os.path.exists(os.path.join(workdir, each, program)) for each in directories)


def _read(text: str) -> tuple[int, dict[str, str]]:
    """Return the umask, and the value of each limit by the option that sets it."""
    mask, _, lines = text.partition("\n")
    return int(mask, 8), {
        match[1]: match[2] for line in lines.splitlines() if (match := _LINE.fullmatch(line))
    }
