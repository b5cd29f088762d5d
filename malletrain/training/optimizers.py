"""Detects optimizers that train the modules of a snapshot and are not saved: optimizers that the
script has not passed, such as one that replaces a passed one when layers are unfrozen.

Decides which optimizers these are, and refuses to continue a run whose optimizer has lost its state
(momentum). An optimizer without state, such as plain SGD, loses nothing. An optimizer whose state
the script restores itself is accepted. Only an optimizer that makes updates in two different steps
counts, for as long as it exists: one that the script makes new in each step, such as that of an
inner loop, or uses to search for the initial learning rate, has no state that a later step needs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from malletrain.training import report
from malletrain.training.objects import unwrapped
from malletrain.training.ranks import rank_and_world
from malletrain.training.schedulers import reachable

_ADVICE = "Make it before Snapshot and pass it: Snapshot(optimizer=…, …)."

_watches: weakref.WeakSet[UnsavedOptimizers] = weakref.WeakSet()


@functools.cache
def _register_hook() -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_before_update)


def _before_update(optimizer: Any, *_: Any) -> None:
    watches = list(_watches)
    if not any(watch.saves(optimizer) for watch in watches):
        for watch in watches:
            watch.note_update(optimizer)


class UnsavedOptimizers:
    """The optimizers that train the modules among a script's objects.

    Args:
        objects: the script's objects, by name.
        refusal: type of the exception to raise.
    """

    def __init__(self, objects: Mapping[str, Any], refusal: Callable[[str], Exception]) -> None:
        self._objects = objects
        self._refusal = refusal
        self._passed: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers among the objects, or inside of them."""
        self._not_passed: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that were neither when they were searched for."""
        self._began_without_state: weakref.WeakSet[Any] = weakref.WeakSet()
        """Other optimizers that had no state at their first update here."""
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()
        """Other optimizers that have made an update."""
        self._updated: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that have made one since the last step."""
        self._earlier: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that have made one in an earlier step."""
        self._unsaved: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that train the modules, have made updates in two steps, and have state."""
        self._saved_kinds: set[str] = set()
        """Classes of such optimizers in the restored snapshot, until one of that class makes an
        update.
        """
        trained = ("named_parameters", "param_groups")
        if any(hasattr(unwrapped(o), name) for o in objects.values() for name in trained):
            _register_hook()
            _watches.add(self)

    def kinds(self) -> list[str]:
        """Return the state for :meth:`resumed`."""
        kinds = {type(optimizer).__name__ for optimizer in list(self._unsaved)}
        return sorted(kinds | self._saved_kinds)

    def resumed(self, kinds: Collection[str]) -> None:
        """Set the classes of the unsaved optimizers that had state at the snapshot."""
        self._saved_kinds = set(kinds)

    def saves(self, optimizer: Any) -> bool:
        """Return whether ``optimizer`` is one of the objects, or inside one of them."""
        if optimizer in self._passed:
            return True
        if optimizer in self._not_passed:
            return False
        from torch import Tensor, nn

        inside = reachable(self._objects, type(optimizer), (nn.Module, Tensor))
        passed = id(optimizer) in inside
        (self._passed if passed else self._not_passed).add(optimizer)
        return passed

    def note_update(self, optimizer: Any) -> None:
        """Note an update of an optimizer that no snapshot saves."""
        if optimizer not in self._others:
            self._others.add(optimizer)
            if not _has_state(optimizer):
                self._began_without_state.add(optimizer)
        self._updated.add(optimizer)

    def after_step(self) -> None:
        """Tell the user about unsaved optimizers. Raises the error if the run continues without the
        state that one had.
        """
        if not self._updated:
            return
        updated, self._updated = list(self._updated), weakref.WeakSet()
        for optimizer in updated:
            name, kind = self._name_trained_by(optimizer), type(optimizer).__name__
            if name is None:
                continue
            if kind in self._saved_kinds:
                self._saved_kinds.discard(kind)
                if optimizer in self._began_without_state:
                    raise self._refusal(
                        f"This run goes on with an optimizer ({kind}) that trains {name!r} and has "
                        f"lost its state: Snapshot was not given it. {_ADVICE}"
                    )
            if optimizer not in self._earlier:
                self._earlier.add(optimizer)
            elif _has_state(optimizer):
                self._unsaved.add(optimizer)
                if rank_and_world()[0] == 0:
                    report.tell(
                        f"Snapshot was not given the optimizer ({kind}) that trains {name!r}: "
                        "after a change of nodes its state (momentum) is lost, and the run is "
                        f"refused unless the script restores it. {_ADVICE}",
                        once=f"optimizer of {name}",
                    )

    def _name_trained_by(self, optimizer: Any) -> str | None:
        """Return the name of a module of which ``optimizer`` trains a parameter; None if none."""
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, value in self._objects.items():
            module = unwrapped(value)
            if hasattr(module, "named_parameters") and any(
                id(p) in trained for p in module.parameters()
            ):
                return name
        return None


def _has_state(optimizer: Any) -> bool:
    """Return whether the optimizer has a tensor for each parameter, such as a momentum."""
    return any(
        getattr(value, "ndim", 0) > 0
        for state in list(optimizer.state.values())
        if isinstance(state, dict)
        for value in state.values()
    )
