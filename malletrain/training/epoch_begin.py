"""Undoes the code at the beginning of an epoch when a resumed run executes it a second time.

That code is what a script does between the request of an epoch and the iteration of its batches. A
run that resumes in the middle of an epoch executes it again, on objects that it has already
changed: a scheduler that steps there would step twice, and a sum that is reset there would lose the
first part of the epoch. :class:`EpochBegin` removes every effect of the second execution: when the
batches are iterated, the objects of the run have the state that they had before that code. While
the code executes, the random generators have the states of its first execution, so that it draws
the same numbers.

The copies of the objects need as much memory as the parameters, at a time without gradients.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from malletrain.training import rng
from malletrain.training.epochs import CountedEpochs
from malletrain.training.objects import load_state, plain_attributes, state_of, unwrapped
from malletrain.training.report import tell
from malletrain.training.sampler import ElasticSampler

Undo = Callable[[], None]
_BATCH_SIZES = ("global_batch_size", "next_global_batch_size")
"""Entries of a sampler's state that the script may change."""


class EpochBegin:
    """Watches the beginnings of the epochs of one run, and undoes what is executed again.

    Args:
        objects: returns the script's objects, by name.
    """

    def __init__(self, objects: Callable[[], Mapping[str, Any]]) -> None:
        self._objects = objects
        self._undo: list[Undo] = []
        """What sets the objects back; empty unless the code runs again."""
        self._rng: dict[str, Any] = {}
        """States of the random generators (:mod:`malletrain.training.rng`) at the beginning of the
        epoch; empty if unknown.
        """
        self._beginning: CountedEpochs | None = None
        """The sampler an epoch of which is beginning; None once its batches are iterated."""
        self._newest = -1
        """Number of the newest epoch whose code has run; -1 for none."""
        self._loaded = -1
        """Number of that epoch in the loaded state; -1 if none was loaded since the last epoch
        began.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` takes: plain numbers, lists and tensors."""
        return {"begun_epoch": self._newest, "epoch_rng": self._rng}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another process, or of a snapshot."""
        self._newest = self._loaded = int(state.get("begun_epoch", -1))
        self._rng = dict(state.get("epoch_rng", {}))

    def separate(self, seeds: rng.RankSeeds) -> None:
        """Give a rank with seeds of its own other random numbers in that code than rank 0, from
        which the loaded states come.
        """
        if self._rng:
            now = rng.state()
            rng.load(self._rng)
            seeds.separate()
            self._rng = rng.state()
            rng.load(now)

    def epoch_begins(self, epochs: CountedEpochs, begun: bool) -> None:
        """The script is about to run that code. ``begun``: whether a step of the epoch is done."""
        again = begun or self._loaded == epochs.epoch
        self._loaded, self._undo, self._beginning = -1, [], epochs
        if not again:
            self._rng = rng.state()
            return
        constant_batch = getattr(epochs, "script_batch_size", 0) is not None
        now = rng.state()
        self._undo = [*undo_of(self._objects(), constant_batch), lambda: rng.load(now)]
        rng.load(self._rng)

    def batches_begin(self, epochs: CountedEpochs) -> None:
        """The script iterates batches of ``epochs``. The code at the beginning of the epoch ends
        with that, unless the batches are not those of the beginning epoch: in that code a script
        may iterate another sampler, and after the steps of an epoch its training data once more, to
        evaluate.
        """
        if epochs is not self._beginning:
            return
        self._beginning, self._newest = None, epochs.epoch
        undo, self._undo = self._undo, []
        for set_back in undo:
            set_back()


def undo_of(objects: Mapping[str, Any], constant_batch: bool) -> list[Undo]:
    """Return functions that set ``objects`` back to their present state: modules, dicts,
    schedulers and other objects with a state, the options of optimizers, the batch of samplers.

    Args:
        objects: the script's objects, by name.
        constant_batch: whether the global batch is the same at any number of ranks. If not, a
            script may set the learning rate for the present number of ranks. Then the options of
            optimizers are set back only if a scheduler has made a step.
    """
    options: list[Undo] = []
    others: list[Callable[[], bool]] = []
    for name, value in objects.items():
        target = unwrapped(value)
        try:
            if isinstance(getattr(target, "param_groups", None), list):
                options.append(_undo_options(target))
            elif isinstance(target, ElasticSampler) or not isinstance(target, CountedEpochs):
                others.append(_undo_one(name, target))
        except Exception as error:  # of the script's object: a copy must not stop the training
            tell(
                f"{name!r} cannot be copied ({error}). If the script changes it between the "
                "request of an epoch and the loop over its batches, and the nodes change within "
                "the epoch, the change is made twice. To prevent that, write "
                "`if sampler.position == 0:` before the change.",
                once=f"copy of {name}",
            )

    def set_back() -> None:
        changed = [_try_undo(undo) for undo in others]
        if constant_batch or any(changed):
            for undo in options:
                undo()

    return [set_back]


def _try_undo(undo: Callable[[], bool]) -> bool:
    """Set one object back. An error of the script's object must not stop the training.

    Returns:
        The result of ``undo``; False after an error.
    """
    try:
        return undo()
    except Exception as error:
        tell(
            "An object cannot be set back to its state at the beginning of the epoch "
            f"({error}). What the script changes between the request of an epoch and the loop over "
            "its batches is changed twice if the nodes change within the epoch. To prevent that, "
            "write `if sampler.position == 0:` before the change.",
            once="undo of the beginning of an epoch",
        )
        return False


def _undo_one(name: str, target: Any) -> Callable[[], bool]:
    """Return a function that sets one object back. Its result is whether the object is a scheduler
    that has made a step, or another object with a changed ``state_dict``.
    """
    if isinstance(target, dict):
        return _undo_dict(target)
    if hasattr(target, "named_parameters"):
        return _undo_module(target)
    if isinstance(target, ElasticSampler):
        return _undo_batch(target)
    return _undo_state(name, target)


def _undo_dict(values: dict[Any, Any]) -> Callable[[], bool]:
    before, copies = dict(values), _copy(values)

    def undo() -> bool:
        values.clear()
        for key, value in before.items():
            values[key] = value if is_equal(value, copies[key]) else copies[key]
        return False

    return undo


def _undo_options(optimizer: Any) -> Undo:
    groups = optimizer.param_groups
    before = [{k: _copy(v) for k, v in g.items() if k != "params"} for g in groups]
    own_state = getattr(optimizer, "state", {})  # a wrapper may have none
    state = {p: dict(entry) for p, entry in own_state.items() if isinstance(entry, dict)}

    def undo() -> None:
        for group, options in zip(optimizer.param_groups, before, strict=False):
            group.update(options)
        own_state.update(state)

    return undo


def _undo_module(module: Any) -> Callable[[], bool]:
    import torch

    tensors = [*module.parameters(), *module.buffers()]
    copies = [tensor.detach().clone() for tensor in tensors]
    trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    attributes = [(own, name, own[name]) for own, name in plain_attributes(module)]

    def undo() -> bool:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        for parameter, is_trained in trained:
            parameter.requires_grad_(is_trained)
        for own, name, value in attributes:
            own[name] = value
        return False

    return undo


def _undo_batch(sampler: ElasticSampler) -> Callable[[], bool]:
    before = _batch_sizes(sampler)

    def undo() -> bool:
        if _batch_sizes(sampler) != before:
            rest = {k: v for k, v in sampler.state_dict().items() if k not in _BATCH_SIZES}
            sampler.load_state_dict({**rest, **before})
        return False

    return undo


def _batch_sizes(sampler: ElasticSampler) -> dict[str, Any]:
    return {key: value for key, value in sampler.state_dict().items() if key in _BATCH_SIZES}


def _undo_state(name: str, target: Any) -> Callable[[], bool]:
    before = _copy(state_of(target))

    def undo() -> bool:
        if is_equal(state_of(target), before):
            return False
        load_state(target, before, f"The state of {name!r} at the beginning of the epoch")
        return True

    return undo


def _copy(value: Any) -> Any:
    if hasattr(value, "detach"):
        return value.detach().clone()
    if hasattr(value, "shape") and hasattr(value, "copy"):  # numpy's
        return value.copy()
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(item) for item in value)
    if isinstance(value, (dict, list, set, deque)):  # a Counter, an OrderedDict
        return copy.deepcopy(value)
    return value


def is_equal(first: Any, value: Any) -> bool:
    """Return whether two values are equal: numbers, texts, tensors, arrays, lists and dicts."""
    if first is value:
        return True
    if type(first) is not type(value):
        return False
    if type(first) is dict:
        return first.keys() == value.keys() and all(is_equal(v, value[k]) for k, v in first.items())
    if type(first) in (list, tuple):
        return len(first) == len(value) and all(map(is_equal, first, value))
    try:
        if hasattr(first, "shape"):
            return bool(first.shape == value.shape and (first == value).all())
        return bool(first == value)
    except Exception:  # raised by the script's values: tensors on two devices, data frames
        return False
