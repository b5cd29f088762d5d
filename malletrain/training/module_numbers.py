"""Saves and restores the plain numbers of modules, which ``state_dict()`` does not include:
numbers, flags and strings in attributes that change during training (the counter of an average's
warm-up, a decreasing temperature), and which parameters are frozen.

Decides which attributes belong to the state: those that differ from their value at the start of the
script. A value that the script sets and does not change, such as a size or a probability, is taken
from the script at every start. Two kinds of attributes are left out, because they may describe
tensors that no state includes, such as the length of a cached table or a flag that means "fitted":
attributes that are no plain number at the start, and of a submodule with unsaved tensors that have
changed its flags, and the numbers that are a size of such a tensor. The user is told which.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from malletrain.training import report
from malletrain.training.objects import plain_attributes, plain_name, unwrapped
from malletrain.training.ranks import rank_and_world
from malletrain.training.torch_private import in_place_changes

Numbers = dict[str, dict[str, Any]]
"""Values by name of the module, then by "path of the submodule.attribute"."""
_TRAINED = "requires_grad"
"""Attribute of parameters that is saved with the numbers."""
_MAX_NAMES = 3
"""Maximum number of attributes that the message names."""


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
        self._tensors: dict[str, dict[tuple[str, str], tuple[Any, int]]] = {}
        """(tensor, count of its in-place changes) of the unsaved tensors at the start, by name of
        the module, then by (path of the submodule, attribute).
        """
        self.begin()

    def begin(self) -> None:
        """Take the current values as those at the start of the script."""
        modules = self._modules()
        self._initial = {name: self._values_of(module) for name, module in modules.items()}
        self._tensors = {
            name: {key: (tensor, in_place_changes(tensor)) for key, tensor in self._unsaved(module)}
            for name, module in modules.items()
        }

    def changed(self, for_this_process: bool = False) -> Numbers:
        """Return the values that differ from those at the start of the script, without those that
        are left out. ``for_this_process``: this process will restore them and has the unsaved
        tensors, so that the numbers of their submodules are not left out.
        """
        changed: Numbers = {}
        left_out: list[str] = []
        for name, module in self._modules().items():
            initial = self._initial.get(name, {})
            values = {
                path: value
                for path, value in self._values_of(module).items()
                if path not in initial or _differ(initial[path], value)
            }
            sizes_in: dict[str, set[int]] = {}
            if values and not for_this_process:
                sizes_in = self._changed_sizes(name, module)
            for path, value in values.items():
                part, _, attribute = path.rpartition(".")
                describes = part in sizes_in and _may_describe(value, sizes_in[part])
                if attribute == _TRAINED or (path in initial and not describes):
                    changed.setdefault(name, {})[path] = value
                else:
                    left_out.append(f"{name}.{path.removeprefix('.')}")
        if left_out and not for_this_process and rank_and_world()[0] == 0:
            _tell_left_out(left_out)
        return changed

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the values of ``saved``, a result of :meth:`changed`, in the modules. Attributes that
        were no plain numbers at the start of this script stay as they are.
        """
        for name, module in self._modules().items():
            initial = self._initial.get(name, {})
            parts = {plain_name(path): part for path, part in module.named_modules()}
            parameters = {plain_name(path): p for path, p in module.named_parameters()}
            for key, value in saved.get(name, {}).items():
                path, _, attribute = key.rpartition(".")
                if attribute == _TRAINED and path in parameters:
                    parameters[path].requires_grad = value
                elif path in parts and key in initial:
                    setattr(parts[path], attribute, value)

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
            values[f"{plain_name(path)}.{_TRAINED}"] = parameter.requires_grad
        return values

    def _unsaved(self, module: Any) -> Iterator[tuple[tuple[str, str], Any]]:
        """Yield ((path of the submodule, attribute), tensor) for the tensors of a module that are
        neither parameters nor in its state.
        """
        from torch import Tensor

        for path, part in module.named_modules():
            # A hook before the forward pass may compute a weight from others each time.
            if getattr(part, "_forward_pre_hooks", None):
                continue
            transient = getattr(part, "_non_persistent_buffers_set", ())
            buffers = {k: b for k, b in part.named_buffers(recurse=False) if k in transient}
            for attribute, content in {**vars(part), **buffers}.items():
                # A tensor with gradients is an output of the last step.
                is_unsaved = isinstance(content, Tensor) and not content.requires_grad
                if is_unsaved and attribute not in self._without:
                    yield (plain_name(path), attribute), content

    def _changed_sizes(self, name: str, module: Any) -> dict[str, set[int]]:
        """Return the sizes of the unsaved tensors that differ from the start, by the path of their
        submodule.
        """
        initial, now = self._tensors.get(name, {}), dict(self._unsaved(module))
        sizes_in: dict[str, set[int]] = {}
        for key in initial.keys() | now.keys():
            if key not in initial or key not in now or _has_changed(*initial[key], now[key]):
                sizes_in.setdefault(key[0], set()).update(now[key].shape if key in now else ())
        return sizes_in


def _may_describe(value: Any, sizes: Collection[int]) -> bool:
    """Return whether a plain value may say something about tensors of these sizes: a flag, such as
    "fitted", or a number that is a size, such as the length of a cached table.
    """
    return isinstance(value, bool) or (isinstance(value, int) and value in sizes)


def _has_changed(initial: Any, count: int, tensor: Any) -> bool:
    """Return whether ``tensor`` has other values than ``initial`` had when its count of in-place
    changes was ``count``. It may be on another device now.
    """
    import torch

    if in_place_changes(initial) != count:
        return True
    if tensor is initial:
        return False
    if type(tensor) is not type(initial) or hasattr(tensor, "to_local"):
        return True  # the comparison of a sharded tensor needs all ranks
    try:
        return not torch.equal(initial.to(tensor.device, tensor.dtype), tensor)
    except (RuntimeError, NotImplementedError):  # without values, as on the meta device
        return True


def _differ(first: Any, value: Any) -> bool:
    return bool(first != value) and not (first != first and value != value)  # NaN is like NaN


def _tell_left_out(names: list[str]) -> None:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    report.tell(
        f"{', '.join(names[:_MAX_NAMES])}{more}: not saved, and after a change of nodes as the "
        "script makes it, because it may describe a tensor that is not saved, such as a cached "
        "table. If it belongs to the model, set it to a number in __init__ and register the "
        "tensors of its module that change as buffers.",
        once="numbers left out",
    )
