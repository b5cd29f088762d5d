"""Learning-rate schedulers that set the rates of a script's optimizers and are not part of what is
saved: one that the script has not passed, or has put in the place of one that it has passed.

Decides which schedulers those are, and when going on would train at other rates. Schedulers of
torch's classes, and of those derived from them, are noted as they are made; those that were made
before are looked for once. How far each has come is saved, so that one that the script itself
brings to where it was goes on.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from malletrain.training import report
from malletrain.training.objects import has_scheduler_state, unwrapped
from malletrain.training.ranks import rank_and_world

Progress = dict[str, dict[str, int]]
"""Steps (``last_epoch``) of schedulers that are not saved, by name of the optimizer and class."""

_DEPTH = 8
"""Attributes of attributes in which a scheduler may lie: wrappers of trainers, configurations."""
_numbers = itertools.count(1)
_made: dict[int, weakref.ref[Any]] = {}
"""Schedulers by number, in the order in which they were made."""
_watches: weakref.WeakSet[Schedulers] = weakref.WeakSet()


def _note(scheduler: Any) -> None:
    _made[next(_numbers)] = weakref.ref(scheduler)


@functools.cache
def _note_all() -> None:
    """Note every scheduler of torch that there is and that will be made, and every update."""
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def new(cls: type[Any], *_args: Any, **_kwargs: Any) -> Any:
        # not every class calls the base's __init__
        scheduler = super(LRScheduler, cls).__new__(cls)
        _note(scheduler)
        return scheduler

    LRScheduler.__new__ = new  # type: ignore[method-assign]
    for one in gc.get_objects():
        if issubclass(type(one), LRScheduler):
            _note(one)
    register_optimizer_step_pre_hook(_before_update)


def _before_update(optimizer: Any, *_: Any) -> None:
    for watch in list(_watches):
        watch.before_update(optimizer)


@dataclass(frozen=True)
class _NotPassed:
    """A scheduler that the script has not passed."""

    kind: str
    """Its class."""
    scheduler: weakref.ref[Any]
    first_steps: int
    """Its steps when it was seen first."""

    @property
    def steps(self) -> int:
        """Steps that it has made; 0 where it is no more."""
        return _steps(self.scheduler())

    @property
    def moves(self) -> bool:
        """Whether it sets rates of this run. One of a search for the first rate, say, does not."""
        return self.steps > self.first_steps


class Schedulers:
    """Those of the optimizers among a script's objects.

    Args:
        owner: to what they are to be passed, for sentences: ``Snapshot``.
        objects: by name.
        refusal: the error that is raised.
        advice: a sentence that says how they are passed.
    """

    def __init__(
        self,
        owner: str,
        objects: Mapping[str, Any],
        refusal: Callable[[str], Exception],
        advice: str = "",
    ) -> None:
        self._owner = owner
        self._advice = advice or f"Make it before {owner} and pass it: {owner}(scheduler=…, …)."
        self._objects = objects
        self._refusal = refusal
        self._optimizers = {
            name: optimizer
            for name, value in objects.items()
            if isinstance(getattr(optimizer := unwrapped(value), "param_groups", None), list)
        }
        self._saved: Progress = {}
        """How far they were, for the first update of each optimizer."""
        self._newest = -1
        """The newest scheduler when it was looked who sets the rates."""
        self._not_passed: dict[str, dict[int, _NotPassed]] = {}
        """By name of their optimizer, and number."""
        self._with_passed: set[str] = set()
        """Optimizers that have a scheduler which was passed."""
        if self._optimizers:
            _note_all()
            _watches.add(self)

    def progress(self) -> Progress:
        """What :meth:`resumed` takes."""
        self._look()
        moved = {
            name: {one.kind: one.steps for one in self._newest_of_kind(name) if one.moves}
            for name in self._not_passed
        }
        return {**moved, **self._saved}

    def resumed(self, progress: Progress) -> None:
        """The run goes on from where schedulers that were not saved had come so far."""
        self._saved = {name: dict(kinds) for name, kinds in progress.items()}

    def before_update(self, optimizer: Any) -> None:
        """Raises the error where the update would be made at a wrong rate, or a later one be."""
        name = self._name_of(optimizer)
        if name is None:
            return
        self._look()
        there = self._newest_of_kind(name)
        self._check_progress(name, {one.kind: one.steps for one in there})
        for one in there:
            if one.moves and name in self._with_passed:
                raise self._refusal(
                    f"A scheduler ({one.kind}) that {self._owner} was not given sets the learning "
                    f"rate of {name!r} beside, or in place of, the one that it was given: after a "
                    "change of nodes only the latter would go on. Pass each under a name of its "
                    "own, or keep one and change it."
                )
            if rank_and_world()[0] == 0 and not has_scheduler_state(self._objects):
                report.tell(
                    f"{self._owner} was not given the scheduler ({one.kind}) of {name!r}: after a "
                    "change of nodes it begins anew, and the run is refused unless the script "
                    f"brings it to where it was. {self._advice}",
                    once=f"scheduler of {name}",
                )

    def _check_progress(self, name: str, now: dict[str, int]) -> None:
        """Of one optimizer, before its first update. One that the script has replaced by another
        class is the script's matter; that there is none any more is not.
        """
        replaced = bool(now) or name in self._with_passed
        for kind, steps in self._saved.pop(name, {}).items():
            if now.get(kind, steps if replaced else 0) < steps:
                raise self._refusal(
                    f"This run goes on after step {steps} of the scheduler ({kind}) of {name!r}, "
                    f"which was not saved and is not where it was: {self._owner} was not given it. "
                    f"{self._advice}"
                )

    def _name_of(self, optimizer: Any) -> str | None:
        """The name of ``optimizer``, of one around it, or of one within it."""
        for name, own in self._optimizers.items():
            if own is optimizer:
                return name
        groups = {id(group) for group in getattr(optimizer, "param_groups", ())}
        for name, own in self._optimizers.items():
            if any(id(group) in groups for group in own.param_groups):
                return name
        return None

    def _look(self) -> None:
        """Look who sets the rates, if there are schedulers that were not there before."""
        newest = next(reversed(_made), 0)
        if newest == self._newest:
            return
        self._newest = newest
        passed = _schedulers_in(self._objects)
        before = {n: one for named in self._not_passed.values() for n, one in named.items()}
        self._not_passed, self._with_passed = {}, set()
        for number, reference in list(_made.items()):
            scheduler = reference()
            if scheduler is None:
                del _made[number]
                continue
            name = self._name_of(getattr(scheduler, "optimizer", None))
            if name is None:
                continue
            if id(scheduler) in passed:
                self._with_passed.add(name)
            else:
                new = _NotPassed(type(scheduler).__name__, reference, _steps(scheduler))
                self._not_passed.setdefault(name, {})[number] = before.get(number, new)

    def _newest_of_kind(self, name: str) -> list[_NotPassed]:
        """Of the schedulers of an optimizer that were not passed, the newest of each class."""
        there = self._not_passed.get(name, {}).values()
        return list({one.kind: one for one in there if one.scheduler() is not None}.values())


def _steps(scheduler: Any) -> int:
    steps = getattr(scheduler, "last_epoch", 0)  # -1: one within another, whose turn is to come
    return max(0, int(steps)) if isinstance(steps, int | float) else 0


def _schedulers_in(objects: Mapping[str, Any]) -> set[int]:
    """The ids of the schedulers in ``objects``, their items and their attributes. One in an
    attribute of a module or an optimizer is not in that one's state.
    """
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    schedulers: set[int] = set()
    visited: set[int] = set()
    values = list(objects.values())
    for _ in range(_DEPTH):
        inner: list[Any] = []
        for value in values:
            if id(value) in visited or isinstance(value, nn.Module | Optimizer | Tensor):
                continue
            visited.add(id(value))
            if isinstance(value, LRScheduler):
                schedulers.add(id(value))
            inner += _parts(value)
        values = inner
    return schedulers


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    elif not isinstance(value, type):
        yield from getattr(value, "__dict__", {}).values()
