"""Detects averages of the weights (``torch.optim.swa_utils.AveragedModel``) that a script updates
and that are not saved: after a change of nodes such an average begins anew, with the weights of
that moment.

Decides which averages these are, and tells the user. An average of a module that is not saved
either is left alone, and so is one that a saved module contains. Nothing is said if the average
could be in another object: in one with a ``state_dict()`` of its own, or in a dict with more than
numbers and texts.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

from malletrain.training import report
from malletrain.training.epochs import CountedEpochs
from malletrain.training.objects import unwrapped

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
        owner: name of the class that was given the objects, for the message.
        objects: the script's objects, by name.
    """

    def __init__(self, owner: str, objects: Mapping[str, Any]) -> None:
        self._owner = owner
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
                    f"{self._owner} was not given the average of {averaged[0]!r} (AveragedModel): "
                    "after a change of nodes it begins anew, unless the script restores it. Pass "
                    f"it, too: {self._owner}(average=…, …).",
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
