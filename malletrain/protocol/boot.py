"""The boot name ``DAEMON-NUMBER`` of one start of the daemon. The daemon's part of it is the id of
its database, so it survives restarts and moves. Standard library only.
"""

from __future__ import annotations


def boot_name(daemon: str, number: int) -> str:
    """Return the name of the daemon's ``number``-th start."""
    return f"{daemon[:8]}-{number}"


def daemon_of(boot: str) -> str:
    """Return the daemon's part of a boot name; empty if there is none."""
    return boot.rpartition("-")[0]
