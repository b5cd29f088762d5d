"""Learning rates at a restart: schedulers that act on a script's optimizers without being saved,
options of saved ones that the snapshot replaces, and rates that a script computes itself.

A scheduler is not saved if the script has not passed it to Snapshot (or elastic.Run), or if it has
replaced one that the script has passed. Decides which schedulers these are, and refuses an update
that would use another rate than without the restart. Schedulers of torch's classes and their
subclasses are registered when they are created; those that exist already are searched for once. The
number of steps of each is saved, so that a scheduler that the script itself brings to the same step
is accepted.

A job that is requeued with other arguments continues with the old ``T_max``, which is part of the
scheduler's state. Decides which options differ, and tells the user. It compares numbers, strings,
and lists, arrays and dicts of them. Other values, and values whose comparison fails, count as
equal. There is no message

* about a snapshot of the same job with the same arguments: there only the training itself, or the
  number of ranks, can have changed an option;
* with a sampler with a batch per rank: rates and numbers of steps may follow the number of ranks;
* about rates, if the number of ranks differs: the script may compute them from it.

:class:`LoopRates` detects rates that a script computes from a counter of its loop, such as
``epoch + i / len(loader)`` with the ``i`` of ``enumerate()``. If a run resumes in the middle of an
epoch, that counter starts again at 0, and the rate goes back. Decides whether the first update
after a restore uses such a rate.

:class:`ScheduledRates` detects optimizers within other objects of the script, such as schedulers,
whose rate after a restore differs from the saved one, because the optimizer's own state had another
one. Decides which of these objects the messages name: each once in a job. Rates that are tensors
are left out, and objects whose optimizer cannot be read.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from numbers import Number
from typing import Any

from malletrain.training import owner, report
from malletrain.training.objects import (
    SCRIPT_RATE,
    all_epochs_of,
    has_scheduler_state,
    has_schedulers,
    state_of,
    unwrapped,
)
from malletrain.training.ranks import rank_and_world
from malletrain.training.snapshot_file import SnapshotError

Progress = dict[str, dict[str, int]]
"""Number of steps (``last_epoch``) of the schedulers that are not saved, by name of the optimizer
and class.
"""

_RELATIVE_DIFFERENCE = 1e-9
"""Relative difference of two rates that are the same: a script may compute a rate in several
ways.
"""
_MAX_DEPTH = 8
"""Maximum depth of nested attributes in which schedulers are searched for, such as wrappers of
trainers and configurations.
"""
_PLAIN_TYPES = frozenset({bool, bytes, float, int, str, type(None)})
"""Values without parts. The state of a random number generator has hundreds."""
_numbers = itertools.count(1)
_created: dict[int, weakref.ref[Any]] = {}
"""Schedulers by number, in the order of their creation."""
_watches: weakref.WeakSet[Schedulers] = weakref.WeakSet()
_MAX_ITEMS = 1000
"""Maximum number of items of a value that is compared."""
_MAX_TEXT = 60
"""Maximum length of a value in the message, characters."""
_MIN_JUMP_RATIO = 3
"""Minimum ratio of a rate's move in the opposite direction to its last move, above which the rate
counts as gone back.
"""


def _register(scheduler: Any) -> None:
    _created[next(_numbers)] = weakref.ref(scheduler)


@functools.cache
def _register_all() -> None:
    """Register all present and future schedulers of torch, and a hook for every update."""
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def new(cls: type[Any], *_args: Any, **_kwargs: Any) -> Any:
        # not every subclass calls the base's __init__
        scheduler = super(LRScheduler, cls).__new__(cls)
        _register(scheduler)
        return scheduler

    LRScheduler.__new__ = new  # type: ignore[method-assign]
    for scheduler in gc.get_objects():
        if issubclass(type(scheduler), LRScheduler):
            _register(scheduler)
    register_optimizer_step_pre_hook(_before_update)


def _before_update(optimizer: Any, *_: Any) -> None:
    for watch in list(_watches):
        watch.before_update(optimizer)


@dataclass(frozen=True)
class _UnsavedScheduler:
    """A scheduler that the script has not passed."""

    kind: str
    """Name of its class."""
    scheduler: weakref.ref[Any]
    first_steps: int
    """Its number of steps when it was first seen."""

    @property
    def steps(self) -> int:
        """Number of steps that it has made; 0 if it no longer exists."""
        return _steps(self.scheduler())

    @property
    def moves(self) -> bool:
        """Whether it sets rates of this run; False for example for the scheduler of a search for
        the initial rate, before the run.
        """
        return self.steps > self.first_steps


class Schedulers:
    """The schedulers of the optimizers among a script's objects.

    Args:
        caller: name of the class to which they must be passed, for messages.
        objects: the script's objects, by name.
        refusal: type of the exception to raise.
        advice: sentence that says how to pass them.
    """

    def __init__(
        self,
        caller: str,
        objects: Mapping[str, Any],
        refusal: Callable[[str], Exception],
        advice: str = "",
    ) -> None:
        self._caller = caller
        self._advice = advice or f"Make it before {caller} and pass it: {caller}(scheduler=…, …)."
        self._objects = objects
        self._refusal = refusal
        self._optimizers = {
            name: optimizer
            for name, value in objects.items()
            if isinstance(getattr(optimizer := unwrapped(value), "param_groups", None), list)
        }
        self._saved_progress: Progress = {}
        """Saved numbers of steps, until the first update of each optimizer."""
        self._newest = -1
        """Number of the newest scheduler at the last search."""
        self._unsaved: dict[str, dict[int, _UnsavedScheduler]] = {}
        """Schedulers that were not passed, by name of their optimizer and number."""
        self._with_passed: set[str] = set()
        """Names of the optimizers that have a passed scheduler."""
        if self._optimizers:
            _register_all()
            _watches.add(self)

    def progress(self) -> Progress:
        """Return the state for :meth:`resumed`."""
        self._search()
        moved = {
            name: {entry.kind: entry.steps for entry in self._newest_of_kind(name) if entry.moves}
            for name in self._unsaved
        }
        return {**moved, **self._saved_progress}

    def resumed(self, progress: Progress) -> None:
        """Set the number of steps that the unsaved schedulers had made at the snapshot."""
        self._saved_progress = {name: dict(kinds) for name, kinds in progress.items()}

    def before_update(self, optimizer: Any) -> None:
        """Raise the error if this update of ``optimizer``, or a later one, would use a wrong
        rate.
        """
        name = self._name_of(optimizer)
        if name is None:
            return
        self._search()
        candidates = self._newest_of_kind(name)
        self._check_progress(name, {candidate.kind: candidate.steps for candidate in candidates})
        for candidate in candidates:
            if candidate.moves and name in self._with_passed:
                raise self._refusal(
                    f"{self._caller} was not given the scheduler {candidate.kind}, which sets the "
                    f"learning rate of {name!r} beside the one that was passed, or in its place. "
                    "After a change of nodes only the passed one would continue. Pass both, under "
                    "two names, or keep one and change it."
                )
            if rank_and_world()[0] == 0 and not has_scheduler_state(self._objects):
                report.tell(
                    f"{self._caller} was not given the scheduler ({candidate.kind}) of {name!r}: "
                    "after a change of nodes it begins anew, and the run is refused unless the "
                    f"script brings it to where it was. {self._advice}",
                    once=f"scheduler of {name}",
                )

    def _check_progress(self, name: str, now: dict[str, int]) -> None:
        """Check one optimizer before its first update. A scheduler that the script has replaced by
        one of another class is accepted; a missing one is not.
        """
        replaced = bool(now) or name in self._with_passed
        for kind, steps in self._saved_progress.pop(name, {}).items():
            if now.get(kind, steps if replaced else 0) < steps:
                raise self._refusal(
                    f"This run resumes after step {steps} of the scheduler {kind} of {name!r}, but "
                    "the script has it at an earlier step, or not at all, because "
                    f"{self._caller} was not given it. {self._advice}"
                )

    def _name_of(self, optimizer: Any) -> str | None:
        """Return the name of ``optimizer``, or of the passed optimizer that wraps it or is wrapped
        by it; None if there is none.
        """
        for name, own in self._optimizers.items():
            if own is optimizer:
                return name
        groups = {id(group) for group in getattr(optimizer, "param_groups", ())}
        for name, own in self._optimizers.items():
            if any(id(group) in groups for group in own.param_groups):
                return name
        return None

    def _search(self) -> None:
        """Search for the schedulers of the optimizers, if there are new ones."""
        newest = next(reversed(_created), 0)
        if newest == self._newest:
            return
        self._newest = newest
        passed = _schedulers_in(self._objects)
        before = {n: entry for named in self._unsaved.values() for n, entry in named.items()}
        self._unsaved, self._with_passed = {}, set()
        for number, reference in list(_created.items()):
            scheduler = reference()
            if scheduler is None:
                del _created[number]
                continue
            name = self._name_of(getattr(scheduler, "optimizer", None))
            if name is None:
                continue
            if id(scheduler) in passed:
                self._with_passed.add(name)
            else:
                new = _UnsavedScheduler(type(scheduler).__name__, reference, _steps(scheduler))
                self._unsaved.setdefault(name, {})[number] = before.get(number, new)

    def _newest_of_kind(self, name: str) -> list[_UnsavedScheduler]:
        """Return the newest scheduler of each class among those of an optimizer that were not
        passed.
        """
        entries = self._unsaved.get(name, {}).values()
        return list(
            {entry.kind: entry for entry in entries if entry.scheduler() is not None}.values()
        )


def _steps(scheduler: Any) -> int:
    steps = getattr(scheduler, "last_epoch", 0)  # -1: an inner scheduler that has not started
    return max(0, int(steps)) if isinstance(steps, int | float) else 0


def _schedulers_in(objects: Mapping[str, Any]) -> set[int]:
    """Return the ids of the schedulers in ``objects``, their items and their attributes. Attributes
    of modules and optimizers are not searched, because their state does not include a scheduler
    there.
    """
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    return reachable(objects, LRScheduler, (nn.Module, Optimizer, Tensor))


def reachable(
    objects: Mapping[str, Any], kind: type[Any], closed: tuple[type[Any], ...]
) -> set[int]:
    """Return the ids of the instances of ``kind`` in ``objects``, their items and their attributes.

    Args:
        objects: the script's objects, by name.
        kind: class of the instances.
        closed: classes whose attributes are not searched.
    """
    ids: set[int] = set()
    visited: set[int] = set()
    values = list(objects.values())
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for value in values:
            if id(value) in visited or isinstance(value, closed):
                continue
            visited.add(id(value))
            if isinstance(value, kind):
                ids.add(id(value))
            inner += (part for part in _parts(value) if type(part) not in _PLAIN_TYPES)
        values = inner
    return ids


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    elif not isinstance(value, type):
        yield from getattr(value, "__dict__", {}).values()


_RATES = {"base_lrs", "max_lrs", "eta_min"}
"""Options that are learning rates."""
_OPTIONS = {
    *("T_max", "T_0", "T_mult", "total_steps", "total_iters", "step_size", "gamma", "milestones"),
    *("_milestones", "start_factor", "end_factor", "factor", "power", "total_size", "step_ratio"),
    *("patience", "cooldown", "threshold"),
}
"""Other attributes of torch's schedulers that the script sets and that a state includes."""
_STEP_SETS_ANY_EPOCH = {
    *("ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "ExponentialLR"),
    *("LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR"),
}
"""torch's schedulers whose ``step(epoch)`` sets the rate of any epoch. Others take a metric or
nothing, or compute the rate from the one before.
"""


def tell_other_options(objects: Mapping[str, Any], payload: Mapping[str, Any], name: str) -> None:
    """Tell the user which options of schedulers a snapshot is about to replace. Raises nothing.

    Args:
        objects: the script's objects, by name; others than torch's schedulers are ignored.
        payload: the snapshot.
        name: path of the snapshot.
    """
    rank, world_size = rank_and_world()
    previous_run = owner.owner_of(payload)
    if rank != 0 or previous_run is None or previous_run.is_same(owner.this_run()):
        return
    if any(getattr(e, "script_batch_size", 0) is None for e in all_epochs_of(objects)):
        return
    options = _OPTIONS | _RATES if payload.get("world_size") == world_size else _OPTIONS
    for object_name, value in objects.items():
        try:
            state = payload["objects"][object_name]
            differences = list(_differences_of(unwrapped(value), state, options))
        except Exception:  # of the script's object: a message must not stop the training
            continue
        if differences:
            text = ", ".join(f"{key} = {old} (script: {new})" for key, new, old in differences)
            report.tell(
                f"The scheduler {object_name!r} continues with the options of snapshot {name}, "
                f"which differ from those of this script: {text}. {_advice(unwrapped(value))}",
                once=f"options of {object_name} in {name}",
            )


def _advice(scheduler: Any) -> str:
    kind = type(scheduler)
    if kind.__name__ not in _STEP_SETS_ANY_EPOCH or kind.__module__ != "torch.optim.lr_scheduler":
        return "The scheduler keeps the snapshot's values."
    return (
        "To follow the script's: own = scheduler.state_dict() before restore(), and after it "
        'scheduler.load_state_dict({**own, "last_epoch": scheduler.last_epoch}) and '
        "scheduler.step(scheduler.last_epoch). To set the options alone is not enough."
    )


def _differences_of(target: Any, state: Any, options: set[str]) -> Iterator[tuple[str, str, str]]:
    from torch.optim.lr_scheduler import LRScheduler

    if isinstance(target, LRScheduler):
        yield from _differences(state_of(target), state, options)


def _differences(new: Any, old: Any, options: set[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (option, text of the new value, text of the old value) for each of ``options`` that
    differs between two states of a scheduler and of its inner ones.
    """
    if isinstance(new, dict) and isinstance(old, dict):
        for key in (key for key in new if key in old):
            if key not in options:
                yield from _differences(new[key], old[key], options)
            elif (texts := _texts_if_different(key, new[key], old[key])) is not None:
                yield (key, *texts)
    elif isinstance(new, list | tuple) and isinstance(old, list | tuple):
        for new_item, old_item in islice(zip(new, old, strict=False), _MAX_ITEMS):
            yield from _differences(new_item, old_item, options)


def _texts_if_different(option: str, new: Any, old: Any) -> tuple[str, str] | None:
    """Return both values for the message; None if they are equal or cannot be compared."""
    try:
        new, old = _plain_value(new), _plain_value(old)
        if option in _RATES and isinstance(new, list) and len(new) != len(old):
            return None  # the script adds parameter groups during the training
        return None if new == old else (_text_of(new), _text_of(old))
    except Exception:  # of the script's values
        return None


def _plain_value(value: Any) -> Any:
    """Return ``value`` as numbers, strings, lists and dicts. Raises TypeError for other values."""
    if value is None or isinstance(value, str | Number):
        return "nan" if value != value else value
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:  # a tensor, or an array of numpy
        count = value.numel() if hasattr(value, "numel") else value.size
        if count > _MAX_ITEMS or value.dtype == object:
            raise TypeError("it cannot be compared")
        return _plain_value(value.tolist())
    if len(items) > _MAX_ITEMS:
        raise TypeError("it cannot be compared")
    plain_items = {key: _plain_value(item) for key, item in items}
    return plain_items if isinstance(value, Mapping) else list(plain_items.values())


def _text_of(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


class LoopRates:
    """The learning rates of a script's optimizers, recorded at each update.

    Args:
        objects: the script's objects, by name.
        epochs: the sampler among them, or None.
    """

    def __init__(self, objects: Mapping[str, Any], epochs: Any) -> None:
        self._epochs = epochs
        self._rates: dict[str, dict[str, list[float]]] = {}
        """Rates by optimizer: ``first`` at the first update of the epoch, ``last`` at the last
        update, ``before`` at the update before it. ``turned`` is present if the rates have gone
        back within an epoch without a restore, as with warm restarts; then a jump proves nothing.
        """
        self._expected: dict[str, dict[str, list[float]]] = {}
        if epochs is None or not hasattr(epochs, "position") or has_schedulers(objects):
            return
        for name, value in objects.items():
            optimizer = unwrapped(value)
            while optimizer is not None and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                # Accelerate's optimizer wraps another
                optimizer = getattr(optimizer, "optimizer", None)
            if optimizer is not None:
                self._watch(name, optimizer)

    def _watch(self, name: str, optimizer: Any) -> None:
        def before_update(optimizer: Any, *_: Any) -> None:
            current = [g.get(SCRIPT_RATE, g.get("lr")) for g in optimizer.param_groups]
            # a rate may be a tensor, for example on a GPU
            if not all(isinstance(rate, int | float) for rate in current):
                return
            expected = self._expected.pop(name, None)
            if expected:
                _check(name, expected, current)
            rates = self._rates.setdefault(
                name, {"first": current, "last": current, "before": current}
            )
            if self._epochs.position == 0:
                rates["first"] = current
            elif not expected and _goes_back(rates, current):
                rates["turned"] = current
            rates["before"], rates["last"] = rates["last"], current

        optimizer.register_step_pre_hook(before_update)

    def state(self) -> dict[str, dict[str, list[float]]]:
        """Return the state for :meth:`restore`."""
        return {name: dict(rates) for name, rates in self._rates.items()}

    def restore(self, saved: Mapping[str, dict[str, list[float]]]) -> None:
        """Use the rates of a snapshot, and check the next update against them."""
        self._rates = {name: dict(rates) for name, rates in saved.items()}
        if self._epochs is None or not getattr(self._epochs, "position", 0):
            return
        self._expected = {name: rates for name, rates in self._rates.items() if _moves(rates)}
        if self._expected:
            report.tell(
                "This run goes on in the middle of an epoch, and its script sets the learning rate "
                "at each step. A counter of the loop, such as that of enumerate(), begins anew "
                "here: compute the rate from sampler.epoch and sampler.position.",
                once="loop rates",
            )


def _moves(rates: Mapping[str, list[float]]) -> bool:
    return rates["last"] != rates["before"]


def _check(name: str, saved: Mapping[str, list[float]], current: list[float]) -> None:
    """Raise SnapshotError if the rate has gone back."""
    if "turned" not in saved and _goes_back(saved, current):
        raise SnapshotError(
            f"The learning rate of {name!r} has gone back: the last update before the restart was "
            f"made at {saved['last'][0]:g}, and the next one would be at {current[0]:g}. The "
            "script computes it from a counter of its loop, such as that of enumerate(), which "
            "begins anew where a run goes on in the middle of an epoch. Compute it from "
            "sampler.epoch + sampler.position / sampler.num_samples, from a number of steps in a "
            "dict that Snapshot is given, or use a scheduler."
        )


def _goes_back(rates: Mapping[str, list[float]], current: list[float]) -> bool:
    """Return whether a rate moves back by more than :data:`_MIN_JUMP_RATIO` times its last move, or
    is again the rate of the epoch's first update.
    """
    if not all(len(rates[name]) == len(current) for name in ("first", "last", "before")):
        return False  # a parameter group was added meanwhile
    turns = any(
        (rate - last) * (last - before) < 0
        and abs(rate - last) > _MIN_JUMP_RATIO * abs(last - before)
        for rate, last, before in zip(current, rates["last"], rates["before"], strict=True)
    )
    return turns or rates["last"] != current == rates["first"]


class ScheduledRates:
    """The learning rates of the optimizers within a script's objects. No method raises.

    Args:
        objects: the script's objects, by name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._named: set[str] = set()
        """Names of the objects that the user of this job was told about."""

    def state(self) -> dict[str, Any]:
        """Return the state for :meth:`restore`."""
        return {"rates": self._rates(), "named": sorted(self._named)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Tell the user of optimizers whose learning rates are not those of ``state``."""
        self._named = set(state.get("named", ()))
        rates = state.get("rates", {})
        for name, current in self._rates().items():
            saved = rates.get(name, current)
            groups = [
                group
                for group, (old, new) in enumerate(zip(saved, current, strict=False))
                if not math.isclose(old, new, rel_tol=_RELATIVE_DIFFERENCE)
            ]
            if groups and len(saved) == len(current) and name not in self._named:
                self._named.add(name)
                self._tell(name, groups[0], saved[groups[0]], current[groups[0]])

    def _tell(self, name: str, group: int, saved: float, current: float) -> None:
        if rank_and_world()[0] == 0:
            report.notice(
                f"The learning rate of the optimizer in {name!r} (parameter group {group}) was "
                f"{saved:g} when the snapshot was taken, and is {current:g} after the restore: the "
                "optimizer's state had another one. Its state_dict() must read the parameter "
                "groups anew each time, and its load_state_dict() must set all their options."
            )

    def _rates(self) -> dict[str, list[float]]:
        """Return the rates by name of the object; those of each optimizer once."""
        by_name: dict[str, list[float]] = {}
        optimizers: set[int] = set()
        for name, value in self._objects.items():
            try:
                optimizer = unwrapped(value).optimizer
                groups = optimizer.param_groups
                rates = [group["lr"] for group in groups] if isinstance(groups, list) else []
            except Exception:  # of the script's class: its snapshots must not fail
                continue
            is_new = id(optimizer) not in optimizers
            optimizers.add(id(optimizer))
            if rates and is_new and all(isinstance(rate, int | float) for rate in rates):
                by_name[name] = [float(rate) for rate in rates]
        return by_name
