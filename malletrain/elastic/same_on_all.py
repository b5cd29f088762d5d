"""Detects what differs between the ranks of a live job and must not, because another process may
become any rank at each change.

* **Learning rates.** If a script computes the rate from a counter of its own, the counter starts at
  its first value in a process that joins, and the models of the ranks diverge. :func:`rate_of`
  decides what is compared, :func:`rates_error` the error message. Rates that are tensors on a GPU
  are not read, because that would wait for the GPU.
* **Objects of the run that only some ranks change**, such as an average of the weights or the best
  loss that rank 0 alone updates. When that rank leaves, another process becomes rank 0 and
  continues with a value that was never updated. :class:`ChangedObjects` decides which objects have
  changed between two steps, :func:`module_error` and :func:`dict_notice` the messages. Buffers are
  not compared: DistributedDataParallel copies those of rank 0 to the others.

The comparison is part of the collective that all ranks call once per step anyway
(:mod:`malletrain.elastic.group`): a rank contributes one number for each (:func:`both`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from malletrain.training.epoch_begin import is_equal
from malletrain.training.torch_private import in_place_changes, versions

RATE_KEYS = ("lr", "weight_decay", "momentum", "betas")
"""The entries of a parameter group that schedulers change."""
UNKNOWN = -math.inf
"""Number of a rank that has nothing to compare yet, such as one without an update; it equals every
other.
"""
_RELATIVE_TOLERANCE = 1e-9
"""Maximum relative difference of equal rates: libraries of different processors round differently.
"""
_MAX_OBJECTS = 48
"""Maximum number of objects that are compared: a float is exact for a number of so many bits."""


def _numbers(optimizer: torch.optim.Optimizer) -> Iterator[float]:
    for group in optimizer.param_groups:
        for key in RATE_KEYS:
            value = group.get(key)
            for number in value if isinstance(value, tuple | list) else (value,):
                if isinstance(number, torch.Tensor) and number.device.type == "cpu":
                    number = number.item()
                if isinstance(number, int | float):
                    yield float(number)


def rate_of(optimizer: torch.optim.Optimizer, before: float = 0.0) -> float:
    """Return one number that depends on all rates of an update. ``before``: the number of the
    update before it in the same step.
    """
    for factor, number in enumerate(_numbers(optimizer), 1):
        before += number * factor
    return before


def both(number: float) -> tuple[float, float]:
    """Return what a rank contributes to a maximum over all ranks: its number, such as its rate, and
    the negated one from which the maximum gives the lowest.
    """
    return (UNKNOWN, UNKNOWN) if number == UNKNOWN else (number, -number)


def differ(highest: float, negated_lowest: float) -> bool:
    """Return whether the numbers of the ranks differ, given the maxima of :func:`both`."""
    return highest != UNKNOWN and highest + negated_lowest > _RELATIVE_TOLERANCE * abs(highest)


def rates_error(optimizers: list[torch.optim.Optimizer], rank: int) -> str:
    """Return the error message for the author of the script."""
    rates = ", ".join(
        f"{float(g['lr']):g}" for o in optimizers for g in o.param_groups if "lr" in g
    )
    return (
        f"The ranks made their last update at different learning rates (rank {rank}: {rates} now), "
        "so that their models now differ. A counter of the script's own starts at its first value "
        "in a process that joins: compute the rate from run.steps_done, keep the counter in a "
        "dict that you pass to elastic.Run, and pass the scheduler to elastic.Run."
    )


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
