"""The name of a start of the daemon, ``DAEMON-NUMBER``, and of the daemon in it: its database's, so
that it stays over restarts and moves. Standard library only.
"""

from __future__ import annotations


def boot_name(daemon: str, number: int) -> str:
    """How the daemon calls its ``number``-th start."""
    return f"{daemon[:8]}-{number}"


def daemon_of(boot: str) -> str:
    """The daemon's name out of that of a start; empty where there is none in it."""
    return boot.rpartition("-")[0]
