"""Raises the number of files and connections that the daemon's process may have open.

The default of shells and systemd is 1,024, and each agent and each client needs one: further agents
would be refused without a reason. A process may raise its own limit up to the hard limit
(setrlimit(2)).
"""

from __future__ import annotations

import resource

WANTED = 65_536
"""More than there are nodes on any machine."""


def allow_many(number: int = WANTED) -> int:
    """Raise the soft limit of this process, as far as ``number`` and the hard limit. Returns what
    it is then; it is never lowered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return soft
