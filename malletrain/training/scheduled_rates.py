"""Detects learning rates that a restore does not bring back: an optimizer within an object that a
script passes, such as a scheduler, has another rate after the restore than when the snapshot was
taken. The state of the optimizer, of a class of the script's own, has another rate.

Decides which objects the messages name: each once in a job. Rates that are tensors are left out,
and objects whose optimizer cannot be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from malletrain.training import report
from malletrain.training.objects import unwrapped
from malletrain.training.ranks import rank_and_world

_RELATIVE_DIFFERENCE = 1e-9
"""Relative difference of two rates that are the same: a script may compute a rate in several
ways.
"""


class ScheduledRates:
    """The learning rates of the optimizers within a script's objects. No method raises.

    Args:
        objects: the script's objects, by name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._named: set[str] = set()
        """Names of the objects that the user of this job was told about."""

    def state(self) -> dict[str, Any]:
        """Return the state for :meth:`restore`."""
        return {"rates": self._rates(), "named": sorted(self._named)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Tell the user of optimizers whose learning rates are not those of ``state``."""
        self._named = set(state.get("named", ()))
        rates = state.get("rates", {})
        for name, current in self._rates().items():
            saved = rates.get(name, current)
            groups = [
                group
                for group, (old, new) in enumerate(zip(saved, current, strict=False))
                if not math.isclose(old, new, rel_tol=_RELATIVE_DIFFERENCE)
            ]
            if groups and len(saved) == len(current) and name not in self._named:
                self._named.add(name)
                self._tell(name, groups[0], saved[groups[0]], current[groups[0]])

    def _tell(self, name: str, group: int, saved: float, current: float) -> None:
        if rank_and_world()[0] == 0:
            report.notice(
                f"The learning rate of the optimizer in {name!r} (parameter group {group}) was "
                f"{saved:g} when the snapshot was taken, and is {current:g} after the restore: the "
                "optimizer's state had another one. Its state_dict() must read the parameter "
                "groups anew each time, and its load_state_dict() must set all their options."
            )

    def _rates(self) -> dict[str, list[float]]:
        """Return the rates by name of the object; those of each optimizer once."""
        by_name: dict[str, list[float]] = {}
        optimizers: set[int] = set()
        for name, value in self._objects.items():
            try:
                optimizer = unwrapped(value).optimizer
                groups = optimizer.param_groups
                rates = [group["lr"] for group in groups] if isinstance(groups, list) else []
            except Exception:  # of the script's class: its snapshots must not fail
                continue
            is_new = id(optimizer) not in optimizers
            optimizers.add(id(optimizer))
            if rates and is_new and all(isinstance(rate, int | float) for rate in rates):
                by_name[name] = [float(rate) for rate in rates]
        return by_name
