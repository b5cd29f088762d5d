"""What an agent gets of its site's configuration: the health checks of its node, and the rules for
leases that share their host with other jobs. Decides their shape only.

As with messages, a field at its default is not sent, and an agent ignores a field that it does not
know, so that the agents of an earlier version start under a newer daemon. Every field has a
default, which later versions keep: it is what these agents act by.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

IoPriority = Literal["normal", "low", "idle"]
"""I/O priority of processes, see ioprio_set(2). ``low``: the lowest best-effort level; ``idle``:
the idle class.
"""


class HealthPlan(msgspec.Struct, frozen=True):
    """The health checks that the agents of a site run on their nodes."""

    check: tuple[str, ...] = ()
    """The site's command and its arguments; empty: there is none."""
    interval_s: float = 600.0
    """Time between two checks, seconds."""
    timeout_s: float = 60.0
    """Seconds after which a check counts as hanging."""
    gpus: bool = True
    """Whether to ask nvidia-smi, if there are GPUs and it is installed."""


class SharingRules(msgspec.Struct, frozen=True):
    """How the processes of a slot behave towards other jobs on its host."""

    niceness: int = 10
    """Added to the niceness of all processes of the lease."""
    io_priority: IoPriority = "low"
    """Their I/O priority."""
    bound_cpus: bool = True
    """Whether a lease that may use more processors than its slot has restricts itself."""
    bound_memory: bool = True
    """Whether a job that uses more memory than its slot has is ended."""


Rules = TypeVar("Rules", HealthPlan, SharingRules)


def written(rules: HealthPlan | SharingRules) -> str:
    """Return the rules that differ from the defaults as text, for an environment variable.

    ``omit_defaults`` of msgspec would compare by identity, and send a number from the configuration
    that is equal to the default.
    """
    defaults = type(rules)()
    changed = {
        name: getattr(rules, name)
        for name in rules.__struct_fields__
        if getattr(rules, name) != getattr(defaults, name)
    }
    return msgspec.json.encode(changed).decode()


def read(text: str, kind: type[Rules]) -> Rules:
    """Return the rules of this kind in the text of :func:`written`. Raises ValueError."""
    return msgspec.json.decode(text, type=kind)
