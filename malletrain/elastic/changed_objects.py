"""Detects objects of the run that only some ranks change, such as an average of the weights or the
best loss that rank 0 alone updates. When that rank leaves, another process becomes rank 0 and
continues with a value that was never updated.

Decides which objects have changed between two steps, and the messages. The comparison is part of
the collective that all ranks call once per step anyway (:mod:`malletrain.elastic.group`). Buffers
are not compared: DistributedDataParallel copies those of rank 0 to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from malletrain.elastic.rates import UNKNOWN
from malletrain.training.epoch_begin import is_equal
from malletrain.training.torch_private import in_place_changes, versions

_MAX_OBJECTS = 48
"""Maximum number of objects that are compared: a float is exact for a number of so many bits."""


class ChangedObjects:
    """The modules and dicts of one run that change from one step to the next.

    Args:
        modules: returns the modules of the run, by name.
        dicts: the plain dicts of the run, by name.
    """

    def __init__(
        self,
        modules: Callable[[], Mapping[str, torch.nn.Module]],
        dicts: Mapping[str, dict[str, Any]],
    ) -> None:
        self._modules = modules
        self._dicts = dict(dicts)
        self._marks: dict[str, Any] = {}
        """For each object, by its name, a value that differs after the object has changed; empty
        if unknown.
        """

    def forget(self) -> None:
        """Compare nothing with the time before: the group has changed, or a step was discarded."""
        self._marks = {}

    def since_last(self) -> float:
        """Return a number that has a bit for each object that has changed since the last call;
        UNKNOWN if there is none to compare with.
        """
        before, self._marks = self._marks, self._read()
        if before.keys() != self._marks.keys():
            return UNKNOWN
        changed = [not is_equal(before[name], mark) for name, mark in self._marks.items()]
        return float(
            sum(is_changed << bit for bit, is_changed in enumerate(changed[:_MAX_OBJECTS]))
        )

    def names(self, first: float, second: float) -> tuple[list[str], list[str]]:
        """Return the names of the (modules, dicts) in which two numbers of :meth:`since_last`
        differ.
        """
        bits = int(first) ^ int(second)
        names = [name for bit, name in enumerate(self._read()) if bits >> bit & 1]
        return [n for n in names if n not in self._dicts], [n for n in names if n in self._dicts]

    def _read(self) -> dict[str, Any]:
        marks: dict[str, Any] = {name: _mark(values) for name, values in self._dicts.items()}
        for name, module in self._modules().items():
            parameters = list(module.parameters())
            if parameters:
                ends = [parameters[0], parameters[-1]]
                marks[name] = [versions(ends), [_element(p) for p in ends]]
        return dict(sorted(marks.items()))


class _OnDevice:
    """A tensor that is not on the CPU. Two marks of one tensor are equal if nothing was written to
    it in between. Its values are not compared, because that would wait for the GPU in each step.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._changes = in_place_changes(tensor)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _OnDevice)
            and self._tensor is other._tensor
            and self._changes == other._changes
        )

    __hash__ = None  # type: ignore[assignment]


def _mark(value: Any) -> Any:
    """Return a value that differs after ``value``, an item of a dict, has changed."""
    if isinstance(value, torch.Tensor):
        return value if value.device.type == "cpu" else _OnDevice(value)
    if type(value) is dict:
        return {key: _mark(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mark(item) for item in value)
    return value


def _element(parameter: torch.Tensor) -> float | None:
    """Return one element, because a change through ``parameter.data`` does not increment the
    version; None on a GPU, because reading it would wait for the GPU.
    """
    if parameter.device.type != "cpu" or not parameter.numel():
        return None
    return float(parameter.detach()[tuple(size // 2 for size in parameter.shape)].real)


def module_error(modules: list[str]) -> str:
    """Return the error message for modules that only some ranks change."""
    names = ", ".join(map(repr, modules))
    return (
        f"Only some ranks changed {names} since the step before. In live mode another process may "
        "become rank 0, and it would continue with values that were never changed. Change objects "
        "of the run on all ranks: for example, update an average of the weights on each rank, "
        "because all ranks have the same weights."
    )


def dict_notice(dicts: list[str]) -> str:
    """Return the message for dicts that only some ranks change."""
    names = ", ".join(map(repr, dicts))
    return (
        f"Only some ranks changed the dict {names} between two steps. In live mode another process "
        "may become rank 0, and it continues with its own values. Broadcast what one rank "
        "computes, such as a loss, and change the dict on all ranks."
    )
