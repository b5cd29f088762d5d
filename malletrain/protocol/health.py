"""What an agent is told of the health checks of its node. Decides their shape only."""

from __future__ import annotations

import msgspec


class HealthPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the agents of a site look after their nodes' health."""

    check: tuple[str, ...] = ()
    """The site's command and its arguments; empty: there is none."""
    interval_s: float = 600.0
    """Seconds between two looks."""
    timeout_s: float = 60.0
    """Seconds after which a check counts as hanging."""
    gpus: bool = True
    """Whether nvidia-smi is asked where there are GPUs and it is installed."""


def written(plan: HealthPlan) -> str:
    """The plan as text, for an environment variable."""
    return msgspec.json.encode(plan).decode()


def read(text: str) -> HealthPlan:
    """The plan that :func:`written` wrote. Raises ValueError."""
    return msgspec.json.decode(text, type=HealthPlan)
