"""The Python program that leases run, and under which name.

A virtual environment has its Python as ``python``, ``python3`` and ``python3.N``; which of them
runs this process depends on how the environment was made, and ``malletrain-lease.conf`` allows only
some of them.
"""

from __future__ import annotations

import sys
from pathlib import Path


def agent_program(executable: str = sys.executable, prefix: str = sys.prefix) -> tuple[str, ...]:
    """What starts an agent, before its options: ``PREFIX/bin/python`` where that is the Python of
    this process, else its own path.
    """
    usual = Path(prefix) / "bin" / "python"
    try:
        same = usual.samefile(executable)
    except OSError:
        same = False
    return (str(usual) if same else executable, "-m", "malletrain.agent")
