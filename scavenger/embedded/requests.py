"""Checks the requests of clients to an embedded cluster. Pure. The cluster decides whether a node
is free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LEASE_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


class ClusterRefused(ValueError):
    """An invalid request. The message says why."""


@dataclass(frozen=True)
class TakeRequest:
    """A request for a lease."""

    id: str
    """Name of the lease."""
    node: str
    """Virtual node."""
    argv: list[str]
    """Command to run."""
    env: dict[str, str]
    """Environment variables to add."""
    duration_s: float | None
    """Time limit, seconds; None: no limit."""


def read_take(entry: Any) -> TakeRequest:
    """Return one checked entry of a request of kind ``take``. Raises ClusterRefused."""
    fields = entry if isinstance(entry, Mapping) else {}
    lease_id = str(fields.get("id", ""))
    if not _LEASE_ID.fullmatch(lease_id):
        raise ClusterRefused(
            f"The lease id {lease_id[:100]!r} is not made of 1-100 letters, digits, '.', "
            "'_' and '-'."
        )
    argv, env, duration = fields.get("argv"), fields.get("env", {}), fields.get("duration_s")
    if not (isinstance(argv, list) and argv and all(isinstance(a, str) for a in argv)):
        raise ClusterRefused("The command must be a list of at least one string.")
    if not (isinstance(env, dict) and all(isinstance(v, str) for v in env.values())):
        raise ClusterRefused("The environment must be an object of strings.")
    if not (duration is None or (isinstance(duration, int | float) and duration > 0)):
        raise ClusterRefused(
            f"The time limit must be a positive number of seconds; got {duration!r}."
        )
    return TakeRequest(lease_id, str(fields.get("node")), argv, env, duration)
