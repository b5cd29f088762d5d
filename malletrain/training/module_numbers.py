"""Saves what ``state_dict()`` does not include: plain numbers in attributes of modules that change
during training (the counter of an average's warm-up, a decreasing temperature), and which
parameters are frozen.

Decides which attributes belong to the state: those that differ from their value at the start of the
script. A value that the script sets and does not change, such as a size or a probability, is taken
from the script at every start.

Left out are numbers that may describe a tensor which is in no state either, such as
``max_seq_len_cached`` beside the tables of a rotary embedding. A process that starts has the tensor
as the script makes it, and with the number it would read rows that are not there. A flag or whole
number may describe

* a buffer with ``persistent=False`` of the same module, if that has changed;
* a tensor in another attribute of the same module that had another shape at the start or was not
  there, if the number is a flag or a size of that tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from malletrain.training import report
from malletrain.training.objects import plain_attributes, plain_name, unwrapped
from malletrain.training.ranks import rank_and_world

Numbers = dict[str, dict[str, Any]]
"""Values by name of the module, then by "path of the submodule.attribute"."""

_BEGINNING = 1024
"""Number of elements by which the contents of a buffer are compared. Caches are filled from their
beginning.
"""
_MAX_ITEMS = 16
"""Maximum number of items of a list that are looked at."""


@dataclass(frozen=True)
class _Tensor:
    """An attribute of a module with a tensor, or with a list of them, that is in no state."""

    shape: tuple[int, ...]
    """Its sizes; those of all tensors of a list."""
    is_list: bool = False
    is_buffer: bool = False
    beginning: bytes = b""
    """The first elements of a buffer, else empty."""


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
        self._initial_tensors: dict[str, dict[str, dict[str, _Tensor]]] = {}
        """Tensors in no state, by name of the module, path of the submodule, and attribute."""
        self.begin()

    def begin(self) -> None:
        """Take the current values as those at the start of the script."""
        modules = self._modules().items()
        self._initial = {name: self._values_of(module) for name, module in modules}
        self._initial_tensors = {
            name: {
                plain_name(path): _unsaved_tensors(part) for path, part in module.named_modules()
            }
            for name, module in modules
        }

    def changed(self) -> Numbers:
        """Return the values that differ from those at the start of the script, without those that
        describe a tensor which is in no state. Tell the user about these.
        """
        changed: Numbers = {}
        for name, module in self._modules().items():
            initial = self._initial.get(name, {})
            changed_values = {path: value for path, value in self._values_of(module).items()
                   if path not in initial or _differ(initial[path], value)}  # fmt: skip
            self._leave_out(name, module, changed_values)
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
                    setattr(targets[path], attribute, value)

    def _modules(self) -> dict[str, Any]:
        targets = {name: unwrapped(value) for name, value in self._objects.items()}
        return {name: t for name, t in targets.items() if hasattr(t, "named_modules")}

    def _values_of(self, module: Any) -> dict[str, Any]:
        names = {id(vars(part)): plain_name(path) for path, part in module.named_modules()}
        values = {
            f"{names[id(attributes)]}.{name}": attributes[name]
            for attributes, name in plain_attributes(module)
            if name not in self._without
        }
        for path, parameter in module.named_parameters():
            values[f"{plain_name(path)}.requires_grad"] = parameter.requires_grad
        return values

    def _leave_out(self, name: str, module: Any, values: dict[str, Any]) -> None:
        """Remove those of ``values`` that may describe a tensor which is in no state."""
        parts: dict[str, Any] = {}
        present: dict[str, dict[str, _Tensor]] = {}
        for key in [key for key, value in values.items() if type(value) in (int, bool)]:
            parts = parts or {plain_name(path): part for path, part in module.named_modules()}
            path, _, attribute = key.rpartition(".")
            if path not in parts:
                continue  # whether a parameter is frozen
            if path not in present:
                present[path] = _unsaved_tensors(parts[path])
            initial = self._initial_tensors.get(name, {}).get(path, {})
            described = [
                tensor_name
                for tensor_name, tensor in present[path].items()
                if _describes(values[key], tensor, initial.get(tensor_name))
            ]
            if described:
                del values[key]
                _tell_left_out(".".join(p for p in (name, path) if p), attribute, described[0])


def _tell_left_out(module: str, number: str, tensor: str) -> None:
    if rank_and_world()[0] == 0:
        report.tell(
            f"{module}.{number} is not saved, because it may describe {module}.{tensor}, which is "
            "in no state: after a change of nodes both are as the script makes them. A cache needs "
            f"nothing. If {number} counts, make it a buffer (register_buffer({number!r}, "
            "torch.tensor(0))), or keep it in a dict that is passed, too.",
            once="numbers beside tensors",
        )


def _describes(value: int, tensor: _Tensor, before: _Tensor | None) -> bool:
    """Return whether the flag or whole number ``value`` may describe ``tensor``, which was
    ``before`` at the start of the script.
    """
    collects_outputs = before is not None and before.is_list
    if tensor == before or collects_outputs:
        return False
    return tensor.is_buffer or type(value) is bool or (value > 1 and value in tensor.shape)


def _unsaved_tensors(part: Any) -> dict[str, _Tensor]:
    """Return the tensors of the module ``part`` itself that are in no state, by attribute."""
    from torch import nn

    from malletrain.training.torch_private import unsaved_buffers

    common = vars(nn.Module()).keys()
    tensors = {
        name: _Tensor(shape, is_list=isinstance(value, list | tuple))
        for name, value in vars(part).items()
        if name not in common and (shape := _sizes_of(value)) is not None
    }
    for name, buffer in unsaved_buffers(part).items():
        shape = tuple(buffer.shape)
        tensors[name] = _Tensor(shape, is_buffer=True, beginning=_beginning(buffer))
    return tensors


def _sizes_of(value: Any) -> tuple[int, ...] | None:
    """Return the sizes of a tensor, or of all tensors of a list; None for something else, and for
    an output that has a gradient.
    """
    from torch import Tensor

    is_list = type(value) in (list, tuple)
    tensors = [
        item
        for item in (value[:_MAX_ITEMS] if is_list else [value])
        if isinstance(item, Tensor) and not item.requires_grad and not item.is_nested
    ]
    return tuple(size for t in tensors for size in t.shape) if tensors or is_list else None


def _beginning(buffer: Any) -> bytes:
    """Return the first elements of ``buffer``; nothing if they cannot be read."""
    import torch

    try:
        first = buffer.detach().reshape(-1)[:_BEGINNING].contiguous().cpu()
        return bytes(first.view(torch.uint8).numpy().tobytes())
    except (RuntimeError, TypeError):  # quantized, sparse, or without memory
        return b""


def _differ(first: Any, value: Any) -> bool:
    return bool(first != value) and not (first != first and value != value)  # NaN is like NaN
