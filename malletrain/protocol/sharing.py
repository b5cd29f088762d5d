"""The rules of a site for leases that share their host with other jobs. Decides their shape
only.
"""

from __future__ import annotations

from typing import Literal

import msgspec

IoPriority = Literal["normal", "low", "idle"]
"""I/O priority of processes, see ioprio_set(2). ``low``: the lowest best-effort level; ``idle``:
the idle class.
"""


class SharingRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the processes of a slot behave towards other jobs on its host."""

    niceness: int = 10
    """Added to the niceness of all processes of the lease."""
    io_priority: IoPriority = "low"
    """Their I/O priority."""
    bound_cpus: bool = True
    """Whether a lease that may use more processors than its slot has restricts itself."""
    bound_memory: bool = True
    """Whether a job that uses more memory than its slot has is ended."""


def written(rules: SharingRules) -> str:
    """Return the rules as text, for an environment variable."""
    return msgspec.json.encode(rules).decode()


def read(text: str) -> SharingRules:
    """Return the rules in the text of :func:`written`. Raises ValueError."""
    return msgspec.json.decode(text, type=SharingRules)
