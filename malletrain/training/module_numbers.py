"""Plain numbers in attributes of modules that change while a script trains: the counter of an
average's warm-up, a temperature that is lowered; and which parameters are frozen. No
``state_dict()`` has them.

Decides which belong to the state: those that are not what the script began with. What the script
sets and leaves alone, such as a size or a probability, is the script's at every start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from malletrain.training.objects import plain_name, unwrapped

Numbers = dict[str, dict[str, Any]]
"""Values by name of the module, and by path of the part and name of the attribute in it."""


class ModuleNumbers:
    """Those of the modules among a script's objects.

    Args:
        objects: by name; what is no module is left out.
        without: names of attributes that are a library's own.
    """

    def __init__(self, objects: Mapping[str, Any], without: Collection[str] = ()) -> None:
        self._objects = objects
        self._without = set(without)
        self._first: Numbers = {}
        self.begin()

    def begin(self) -> None:
        """The values of now are those that the script begins with."""
        self._first = {name: self._of(module) for name, module in self._modules().items()}

    def changed(self) -> Numbers:
        """Those that are not what the script began with."""
        changed: Numbers = {}
        for name, module in self._modules().items():
            first = self._first.get(name, {})
            own = {path: value for path, value in self._of(module).items()
                   if path not in first or _differ(first[path], value)}  # fmt: skip
            if own:
                changed[name] = own
        return changed

    def put_back(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Have the modules have the values of ``saved``, which :meth:`changed` gave."""
        for name, module in self._modules().items():
            values = saved.get(name, {})
            parts: dict[str, Any] = {plain_name(path): p for path, p in module.named_modules()}
            parts.update((plain_name(path), p) for path, p in module.named_parameters())
            for key, value in values.items():
                path, _, attribute = key.rpartition(".")
                if path in parts:
                    setattr(parts[path], attribute, value)

    def _modules(self) -> dict[str, Any]:
        targets = {name: unwrapped(value) for name, value in self._objects.items()}
        return {name: t for name, t in targets.items() if hasattr(t, "named_modules")}

    def _of(self, module: Any) -> dict[str, Any]:
        names = {id(vars(part)): plain_name(path) for path, part in module.named_modules()}
        values = {
            f"{names[id(attributes)]}.{name}": attributes[name]
            for attributes, name in places(module)
            if name not in self._without
        }
        for path, parameter in module.named_parameters():
            values[f"{plain_name(path)}.requires_grad"] = parameter.requires_grad
        return values


def places(module: Any) -> list[tuple[dict[str, Any], str]]:
    """Where the plain numbers, texts and flags of a module and its parts are: (attributes of the
    part, name). Those that torch gives every module are not among them.
    """
    from torch import nn

    without = vars(nn.Module())
    return [
        (vars(part), name)
        for part in module.modules()
        for name, value in vars(part).items()
        if type(value) in (bool, int, float, str) and name not in without
    ]


def _differ(first: Any, value: Any) -> bool:
    return bool(first != value) and not (first != first and value != value)  # NaN is like NaN
