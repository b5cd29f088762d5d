"""The attributes of modules that change while a script trains and that ``state_dict()`` does not
include. Decides which attributes these are: those that differ from their value at the start of the
script.

:class:`ModuleNumbers` saves plain numbers, flags and strings (the counter of an average's warm-up,
a decreasing temperature), and which parameters are frozen. A value that the script sets and does
not change, such as a size or a probability, is taken from the script at every start.

:class:`ModuleAttributes` tells the user of the others: lists, dicts and deques, such as outputs
collected over an epoch, arrays of numpy, and tensors that are neither parameters nor buffers, such
as a center or a queue. What these hold may be the data of one rank, so it cannot be saved in the
same way.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from malletrain.training import report
from malletrain.training.objects import (
    is_numpy_number,
    plain_attributes,
    plain_name,
    unwrapped,
)

Numbers = dict[str, dict[str, Any]]
"""Values by name of the module, then by "path of the submodule.attribute"."""
_MAX_NAMES = 3
"""Maximum number of attributes that the message names."""
_MAX_BYTES = 1 << 16
"""Maximum size of an array that is read at each snapshot, bytes."""


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
                   if path not in initial or differ(initial[path], value)}  # fmt: skip
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
    return numpy.asarray(value)[()] if differ(same_kind.item(), value) else same_kind


def differ(first: Any, value: Any) -> bool:
    """Return whether two plain values differ."""
    return bool(first != value) and not (first != first and value != value)  # NaN is like NaN


class ModuleAttributes:
    """The attributes of the modules among a script's objects that no state includes.

    Args:
        caller: name of the class that was given the objects, for the message.
        objects: the script's objects, by name; others than modules are ignored.
        without: names of attributes that belong to a library.
    """

    def __init__(
        self, caller: str, objects: Mapping[str, Any], without: Collection[str] = ()
    ) -> None:
        self._caller = caller
        self._objects = objects
        self._without = set(without)
        self._reported = False
        self._initial: dict[str, tuple[Any, ...]] = {}
        self.begin()

    def begin(self) -> None:
        """Take the current attributes as those at the start of the script."""
        self._initial = self._read()

    def changed(self) -> list[str]:
        """Return the names of the attributes that differ from those at the start of the script."""
        return [path for path, mark in self._read().items() if self._initial.get(path) != mark]

    def tell_changed(self) -> None:
        """Tell the user once which attributes have changed. Never raises."""
        names = [] if self._reported else self.changed()
        if not names:
            return
        self._reported = True
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        report.tell(
            f"{self._caller} does not save {', '.join(names[:_MAX_NAMES])}{more}: after a change "
            "of nodes it is as the script makes it. Register a tensor that belongs to the model as "
            "a buffer. Do not collect the outputs of an epoch in a list: add them up over all "
            "ranks at each step, in a buffer or a number. A cache needs nothing.",
            once="attributes",
        )

    def _read(self) -> dict[str, tuple[Any, ...]]:
        """Return the mark of each attribute; none, from now on, if they cannot be read."""
        try:
            return dict(self._marks())
        except Exception:  # a diagnosis of a script's objects must not stop its snapshots
            self._reported = True
            return {}

    def _marks(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield the name of each attribute, and what differs when its content does."""
        from torch import nn

        common = vars(nn.Module()).keys()
        for name, value in self._objects.items():
            module = unwrapped(value)
            if not hasattr(module, "named_modules"):
                continue
            for path, part in module.named_modules():
                # A hook before the forward pass may compute a weight from others each time.
                if part._forward_pre_hooks:  # noqa: SLF001 (no other name)
                    continue
                for attribute, content in vars(part).items():
                    if attribute in common or attribute in self._without:
                        continue
                    mark = content_mark(content)
                    if mark is not None:
                        yield ".".join(p for p in (name, plain_name(path), attribute) if p), mark


def content_mark(content: Any) -> tuple[Any, ...] | None:
    """Return what differs when the content of a list, dict, array or tensor does; None for others,
    and for a tensor that is trained.
    """
    from torch import Tensor

    from malletrain.training.torch_private import in_place_changes

    if isinstance(content, Tensor):
        return None if content.requires_grad else (id(content), in_place_changes(content))
    if type(content).__name__ == "ndarray" and content.nbytes <= _MAX_BYTES:
        return content.shape, zlib.crc32(content.tobytes())
    if type(content) in (list, deque):
        return len(content), id(content[-1]) if content else 0
    return (len(content),) if type(content) is dict else None
