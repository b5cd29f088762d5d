"""Raises the number of files and connections that the daemon's process may have open.

The default of shells and systemd is 1,024, and each agent and each client needs one. At the limit
further agents are refused without a message. A process may raise its own limit up to the hard limit
(setrlimit(2)).
"""

from __future__ import annotations

import resource

MIN_DESCRIPTORS = 65_536
"""Number of descriptors; more than the nodes of any machine."""


def allow_many(number: int = MIN_DESCRIPTORS) -> int:
    """Raise the soft limit of this process to ``number``, or to the hard limit if that is lower.
    Never lowers it. Returns the new soft limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    new_limit = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < new_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
        return new_limit
    return soft
