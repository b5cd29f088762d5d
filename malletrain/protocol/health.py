"""The plan of health checks that an agent gets. Decides its shape only."""

from __future__ import annotations

import msgspec


class HealthPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The health checks that the agents of a site run on their nodes."""

    check: tuple[str, ...] = ()
    """The site's command and its arguments; empty: there is none."""
    interval_s: float = 600.0
    """Time between two checks, seconds."""
    timeout_s: float = 60.0
    """Seconds after which a check counts as hanging."""
    gpus: bool = True
    """Whether to ask nvidia-smi, if there are GPUs and it is installed."""


def written(plan: HealthPlan) -> str:
    """Return the plan as text, for an environment variable."""
    return msgspec.json.encode(plan).decode()


def read(text: str) -> HealthPlan:
    """Return the plan in the text of :func:`written`. Raises ValueError."""
    return msgspec.json.decode(text, type=HealthPlan)
