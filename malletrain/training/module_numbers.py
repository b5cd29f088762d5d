"""Saves what ``state_dict()`` does not include: plain numbers in attributes of modules that change
during training (the counter of an average's warm-up, a decreasing temperature), and which
parameters are frozen.

Decides which attributes belong to the state: those that differ from their value at the start of the
script. A value that the script sets and does not change, such as a size or a probability, is taken
from the script at every start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from malletrain.training.objects import (
    is_numpy_number,
    plain_attributes,
    plain_name,
    unwrapped,
)

Numbers = dict[str, dict[str, Any]]
"""Values by name of the module, then by "path of the submodule.attribute"."""


class ModuleNumbers:
    """The plain numbers of the modules among a script's objects.

    Args:
        objects: the script's objects, by name; others than modules are ignored.
        without: names of attributes that belong to a library.
    """

    def __init__(self, objects: Mapping[str, Any], without: Collection[str] = ()) -> None:
        self._objects = objects
        self._without = set(without)
        self._initial: Numbers = {}
        self.begin()

    def begin(self) -> None:
        """Take the current values as those at the start of the script."""
        self._initial = {name: self._values_of(module) for name, module in self._modules().items()}

    def changed(self) -> Numbers:
        """Return the values that differ from those at the start of the script."""
        changed: Numbers = {}
        for name, module in self._modules().items():
            initial = self._initial.get(name, {})
            changed_values = {path: value for path, value in self._values_of(module).items()
                   if path not in initial or _differ(initial[path], value)}  # fmt: skip
            if changed_values:
                changed[name] = changed_values
        return changed

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the values of ``saved``, a result of :meth:`changed`, in the modules."""
        for name, module in self._modules().items():
            values = saved.get(name, {})
            targets: dict[str, Any] = {plain_name(path): p for path, p in module.named_modules()}
            targets.update((plain_name(path), p) for path, p in module.named_parameters())
            for key, value in values.items():
                path, _, attribute = key.rpartition(".")
                if path in targets:
                    own = getattr(targets[path], attribute, None)
                    setattr(targets[path], attribute, _as_kind_of(own, value))

    def _modules(self) -> dict[str, Any]:
        targets = {name: unwrapped(value) for name, value in self._objects.items()}
        return {name: t for name, t in targets.items() if hasattr(t, "named_modules")}

    def _values_of(self, module: Any) -> dict[str, Any]:
        names = {id(vars(part)): plain_name(path) for path, part in module.named_modules()}
        values = {
            f"{names[id(attributes)]}.{name}": _plain(attributes[name])
            for attributes, name in plain_attributes(module)
            if name not in self._without
        }
        for path, parameter in module.named_parameters():
            values[f"{plain_name(path)}.requires_grad"] = parameter.requires_grad
        return values


def _plain(value: Any) -> Any:
    """Return a number of numpy as one of Python, which loads without unpickling code."""
    return value.item() if is_numpy_number(value) else value


def _as_kind_of(own: Any, value: Any) -> Any:
    """Return ``value`` as a number of numpy if the script's ``own`` is one, without rounding it."""
    if not is_numpy_number(own):
        return value
    import numpy

    same_kind = type(own)(value)
    return numpy.asarray(value)[()] if _differ(same_kind.item(), value) else same_kind


def _differ(first: Any, value: Any) -> bool:
    return bool(first != value) and not (first != first and value != value)  # NaN is like NaN
