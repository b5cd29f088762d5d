"""Detects objects of a script that act on the modules of a snapshot and are not saved. Decides
which these are; those in another object that is saved are left alone.

:class:`UnsavedOptimizers`: optimizers that the script has not passed, such as one that replaces a
passed one when layers are unfrozen. It refuses to continue a run whose optimizer has lost its state
(momentum). An optimizer without state, such as plain SGD, loses nothing. An optimizer whose state
the script restores itself is accepted. Only an optimizer that makes updates in two different steps
counts, for as long as it exists: one that the script makes new in each step, such as that of an
inner loop, or uses to search for the initial learning rate, has no state that a later step needs.

:class:`UnsavedAverages`: averages of the weights (``torch.optim.swa_utils.AveragedModel``) that the
script updates. After a change of nodes such an average begins anew, with the weights of that
moment, so the user is told. An average of a module that is not saved either is left alone, and so
is one that a saved module contains. Nothing is said if the average could be in another object: in
one with a ``state_dict()`` of its own, or in a dict with more than numbers and texts.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from malletrain.training import report
from malletrain.training.epochs import CountedEpochs
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


_averaged: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The module that each average of this process was last updated from."""


@functools.cache
def _watch_updates() -> None:
    from torch import nn
    from torch.optim.swa_utils import AveragedModel

    original = AveragedModel.update_parameters

    @functools.wraps(original)
    def update_parameters(average: Any, model: Any) -> Any:
        if isinstance(model, nn.Module):
            _averaged[average] = weakref.ref(model)
        return original(average, model)

    AveragedModel.update_parameters = update_parameters  # type: ignore[assignment, method-assign]


class UnsavedAverages:
    """The averages of the modules among a script's objects.

    Args:
        caller: name of the class that was given the objects, for the message.
        objects: the script's objects, by name.
    """

    def __init__(self, caller: str, objects: Mapping[str, Any]) -> None:
        self._caller = caller
        self._objects = objects
        self._checked: weakref.WeakSet[Any] = weakref.WeakSet()
        """Averages that were checked."""
        if self._modules():
            _watch_updates()

    def tell_unsaved(self) -> None:
        """Tell the user once which average is not saved. Never raises."""
        try:
            self._tell_unsaved()
        except Exception:  # a diagnosis of a script's objects must not stop its snapshots
            return

    def _tell_unsaved(self) -> None:
        new = [(a, m()) for a, m in list(_averaged.items()) if a not in self._checked]
        self._checked.update(average for average, _ in new)
        if not new or any(map(_may_contain_weights, self._objects.values())):
            return
        modules = self._modules()
        names = {id(p): name for name, module in modules.items() for p in module.parameters()}
        saved = {id(part) for module in modules.values() for part in module.modules()}
        for average, model in new:
            averaged = [names[id(p)] for p in _parameters(model) if id(p) in names]
            # Without its counter, an average begins anew at its next update.
            if averaged and id(average) not in saved:
                report.tell(
                    f"{self._caller} was not given the average of {averaged[0]!r} (AveragedModel): "
                    "after a change of nodes it begins anew, unless the script restores it. Pass "
                    f"it, too: {self._caller}(average=…, …).",
                    once=f"average of {averaged[0]}",
                )

    def _modules(self) -> dict[str, Any]:
        targets = {name: unwrapped(value) for name, value in self._objects.items()}
        return {n: t for n, t in targets.items() if callable(getattr(t, "parameters", None))}


def _parameters(module: Any) -> list[Any]:
    return list(module.parameters()) if module is not None else []


def _may_contain_weights(value: Any) -> bool:
    """Return whether the state of ``value``, of a script's objects, may have weights that are not
    parameters of it, now or later.
    """
    from torch import nn

    target = unwrapped(value)
    if isinstance(target, nn.Module):
        own = (nn.Module.state_dict, nn.Module.get_extra_state)
        classes = {type(part) for part in target.modules()}
        return any((c.state_dict, c.get_extra_state) != own for c in classes)
    if isinstance(target, dict):
        return not _is_plain(target)
    return not (
        isinstance(target, CountedEpochs) or type(target).__module__.partition(".")[0] == "torch"
    )


def _is_plain(value: Any) -> bool:
    """Return whether ``value`` has only numbers and texts, and no empty place for another value."""
    if isinstance(value, dict):
        return bool(value) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_plain, value))
    return isinstance(value, int | float | complex | str | bytes)
