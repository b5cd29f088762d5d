"""What a snapshot is made of: the script's objects, taken as plain states and put back.

Decides what can be saved, what its state is without its wrappings, and what is said when a state
does not fit. It touches no disk (:mod:`malletrain.training.snapshot_file`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from malletrain.training import report, rng
from malletrain.training.snapshot_file import SnapshotError

_SPREAD = "its state is spread over the ranks"
_NOT_SAVABLE = {
    "FullyShardedDataParallel": f"{_SPREAD} (use torch.distributed.checkpoint)",
    "FSDPModule": f"{_SPREAD} (use torch.distributed.checkpoint)",
    "ZeroRedundancyOptimizer": _SPREAD,
}
_INSIDE_COMPILED = "_orig_mod"
"""Where torch.compile keeps the module; torch has no public name for it."""


def check_object(owner: str, name: str, value: Any) -> None:
    """Look whether the state of ``value`` can be saved.

    Args:
        owner: who asks, for the message.
        name: what the script calls the object.
        value: the object.

    Raises:
        TypeError: when it cannot.
    """
    for cls in type(value).__mro__:
        if cls.__name__ in _NOT_SAVABLE:
            raise TypeError(
                f"{owner}: {name} is a {cls.__name__}, which rank 0 cannot save alone: "
                f"{_NOT_SAVABLE[cls.__name__]}."
            )
    if isinstance(value, dict):
        return
    if not (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    ):
        raise TypeError(
            f"{owner}: {name} is a {type(value).__name__} without state_dict() and "
            "load_state_dict(). Pass objects that have them, "
            "or a dict of plain values."
        )


def unwrapped(value: Any) -> Any:
    """The module inside DDP, DataParallel and torch.compile, in whatever order they were
    applied.
    """
    while True:
        names = {cls.__name__ for cls in type(value).__mro__}
        if names & {"DistributedDataParallel", "DataParallel"}:
            value = value.module
        elif "OptimizedModule" in names:
            value = getattr(value, _INSIDE_COMPILED)
        else:
            return value


def states(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each of ``objects``, by name."""
    taken: dict[str, Any] = {}
    for name, value in objects.items():
        target = unwrapped(value)
        taken[name] = dict(target) if isinstance(target, dict) else target.state_dict()
    return taken


def put_back(objects: Mapping[str, Any], payload: Mapping[str, Any], name: str) -> None:
    """Have ``objects``, and the random number generators, be as a snapshot says.

    Args:
        objects: the script's, by name; dicts are updated in place.
        payload: the snapshot.
        name: its path, for messages.

    Raises:
        SnapshotError: when a state does not fit its object.
    """
    saved = payload["objects"]
    for key, value in objects.items():
        if key not in saved:
            report.tell(
                f"Snapshot {name} holds nothing called {key!r}; it starts as the script made it."
            )
            continue
        target = unwrapped(value)
        try:
            if isinstance(target, dict):
                target.update(saved[key])
            else:
                target.load_state_dict(saved[key])
        except (
            RuntimeError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            IndexError,
        ) as error:
            reason = " ".join(str(error).split())  # torch writes several lines
            raise SnapshotError(
                f"The state of {key!r} in snapshot {name} does not fit the script's "
                f"{type(target).__name__}: {reason} "
                "If the script changed on purpose, give Snapshot another path."
            ) from error
    for key in saved:
        if key not in objects:
            report.tell(
                f"Snapshot {name} also holds {key!r}, which this script does not use; it is "
                "left out of later snapshots."
            )
    rng.load(payload.get("rng", {}))


def parameters(objects: Mapping[str, Any]) -> int:
    """Parameters of all modules among ``objects``; 0 when that cannot be said."""
    modules = [
        value
        for value in map(unwrapped, objects.values())
        if callable(getattr(value, "parameters", None))
    ]
    try:
        return sum(int(p.numel()) for module in modules for p in module.parameters())
    except Exception:  # something with parameters() that are not tensors
        return 0
