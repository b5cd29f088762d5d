"""Chooses the path under which leases run the daemon's Python.

A virtual environment has its Python as ``python``, ``python3`` and ``python3.N``; which of them
runs this process depends on how the environment was made, and ``malletrain-lease.conf`` allows only
some of them.
"""

from __future__ import annotations

import sys
from pathlib import Path


def agent_program(executable: str = sys.executable, prefix: str = sys.prefix) -> tuple[str, ...]:
    """Return the command that starts an agent, without its options. It begins with
    ``PREFIX/bin/python`` if that is the Python of this process, else with the path of that.
    """
    default = Path(prefix) / "bin" / "python"
    try:
        is_same = default.samefile(executable)
    except OSError:
        is_same = False
    return (str(default) if is_same else executable, "-m", "malletrain.agent")
