"""How many files and connections the daemon's process may have open. Decides how many it asks for.

A shell and systemd give 1,024 unless told otherwise, and each agent and each client needs one: the
next agents would not be let in, and would not know why. Programs may raise that as far as the hard
limit by themselves (setrlimit(2)).
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
