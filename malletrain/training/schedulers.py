"""Learning-rate schedulers that set the rates of a script's optimizers and are not part of what is
saved: one that the script has not passed, made after the restore, or put in the place of one that
it has passed.

Decides which schedulers those are, and when going on would train at other rates. Schedulers of
torch's classes, and of those derived from them, are noted as they are made; those that were made
before are looked for once.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from malletrain.training import report
from malletrain.training.objects import unwrapped

_DEPTH = 3
"""Attributes of attributes in which a scheduler may lie: ``SequentialLR``, wrappers of trainers."""
_made: weakref.WeakSet[Any] = weakref.WeakSet()
_watches: weakref.WeakSet[Schedulers] = weakref.WeakSet()


@functools.cache
def _note_all() -> type:
    """Note every scheduler of torch from now on, and that it is given a state. Returns the class
    of all.
    """
    from torch.optim.lr_scheduler import LRScheduler

    init, load = LRScheduler.__init__, LRScheduler.load_state_dict

    @functools.wraps(init)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _made.add(self)
        for watch in _watches:
            watch.note(self)

    @functools.wraps(load)
    def loaded(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        for watch in _watches:
            watch.has_state(self)

    LRScheduler.__init__ = noted  # type: ignore[method-assign]
    LRScheduler.load_state_dict = loaded  # type: ignore[method-assign]
    return LRScheduler


class Schedulers:
    """Of the optimizers among a script's objects.

    Args:
        owner: to what they are to be passed, for sentences: ``Snapshot``.
        objects: by name.
        refuse: makes the error of a sentence.
        within_epoch: whether the script is in an epoch of its loop; a scheduler that is made there
            is one of that epoch.
    """

    def __init__(
        self,
        owner: str,
        objects: Mapping[str, Any],
        refuse: Callable[[str], Exception],
        within_epoch: Callable[[], bool] = lambda: False,
    ) -> None:
        self._owner = owner
        self._objects = objects
        self._refuse = refuse
        self._within_epoch = within_epoch
        self._resumed = False
        self._of_an_epoch: weakref.WeakSet[Any] = weakref.WeakSet()
        self._with_state: weakref.WeakSet[Any] = weakref.WeakSet()
        self._passed: set[int] = set()
        self._looked_at = -1
        """Schedulers there were when it was looked up what was passed."""
        _watches.add(self)
        optimizers = {
            name: optimizer
            for name, value in objects.items()
            if hasattr(optimizer := unwrapped(value), "register_step_pre_hook")
        }
        if any("initial_lr" in g for one in optimizers.values() for g in one.param_groups):
            kind = _note_all()
            _made.update(one for one in gc.get_objects() if issubclass(type(one), kind))
        for name, optimizer in optimizers.items():
            _note_all()
            optimizer.register_step_pre_hook(functools.partial(self._before_update, name))

    def note(self, scheduler: Any) -> None:
        """``scheduler`` has just been made."""
        if self._within_epoch():
            self._of_an_epoch.add(scheduler)
        if scheduler.last_epoch > 0:  # made for a step of a run that went on
            self._with_state.add(scheduler)

    def has_state(self, scheduler: Any) -> None:
        """The script, or a restore, has given ``scheduler`` a state."""
        self._with_state.add(scheduler)

    def resumed(self) -> None:
        """The run goes on after steps that it made before."""
        self._resumed = True

    def left_out(self, optimizer: Any) -> Iterator[Any]:
        """The schedulers that set the rates of ``optimizer`` and were not passed."""
        if self._looked_at != len(_made):
            self._looked_at = len(_made)
            self._passed = set(_reachable(self._objects, _DEPTH))
        for scheduler in list(_made):
            if scheduler.optimizer is optimizer and id(scheduler) not in self._passed:
                yield scheduler

    def _before_update(self, name: str, optimizer: Any, *_: Any) -> None:
        """Raises the error where the update would be made at a wrong rate, or a later one be."""
        for scheduler in self.left_out(optimizer):
            kind = type(scheduler).__name__
            goes_on = scheduler in self._of_an_epoch or scheduler in self._with_state
            if self._resumed and not goes_on:
                raise self._refuse(
                    f"This run goes on after steps that it made before, and the scheduler ({kind}) "
                    f"of the optimizer {name!r} begins anew: {self._owner} was not given it. Make "
                    f"it before {self._owner} and pass it: {self._owner}(scheduler=scheduler, …)."
                )
            if getattr(scheduler, "_step_count", 0) < 2:
                continue  # it has set no rate yet but its first
            passed = (one for one in list(_made) if id(one) in self._passed)
            if any(one.optimizer is optimizer for one in passed):
                raise self._refuse(
                    f"A scheduler ({kind}) that {self._owner} was not given sets the learning rate "
                    f"of {name!r} beside, or in place of, the one that it was given: after a "
                    "change of nodes only the latter would go on. Pass each under a name of its "
                    "own, or keep one and change it."
                )
            report.tell(
                f"A scheduler ({kind}) sets the learning rate of {name!r}, and {self._owner} was "
                "not given it: after a change of nodes it begins anew, unless the script keeps its "
                f"state itself. Make it before {self._owner}, and pass it: "
                f"{self._owner}(scheduler=scheduler, …).",
                once=f"scheduler of {name}",
            )


def _reachable(value: Any, depth: int) -> Iterator[int]:
    """The ids of the schedulers in ``value``, its items and its attributes."""
    if isinstance(value, _note_all()):
        yield id(value)
    if not depth:
        return
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, list | tuple | set):
        items = list(value)
    else:
        items = list(getattr(value, "__dict__", {}).values())
    for item in items:
        if not isinstance(item, str | int | float | bool | type(None)):
            yield from _reachable(item, depth - 1)
