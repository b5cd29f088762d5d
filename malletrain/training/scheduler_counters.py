"""Detects counters of a script's loop that it passes to a scheduler, such as torch's
``scheduler.step(epoch + i / iters)`` and timm's ``scheduler.step_update(updates)``. If a run
resumes in the middle of an epoch, the ``i`` of ``enumerate()`` starts again at 0, and the learning
rate goes back although the scheduler was restored.

Decides whether the first such call after a restore passes a lower counter than the last one before
it. Does not check metrics, such as those of ``ReduceLROnPlateau``.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from malletrain.training.objects import unwrapped
from malletrain.training.snapshot_file import SnapshotError

_METHODS = ("step", "step_update")
"""Methods of schedulers that may take a counter."""
_COUNTERS = ("epoch", "num_updates")
"""Names of the first parameter of such a method."""
_WATCHED = "_malletrain_counter"
"""Attribute of a method that reports its calls: the name of its counter."""
_watches: weakref.WeakSet[SchedulerCounters] = weakref.WeakSet()


class SchedulerCounters:
    """The counters that a script passes to its schedulers, recorded at each call.

    Args:
        objects: the script's objects, by name.
        epochs: the sampler among them, or None.
        refusal: type of the exception to raise.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        epochs: Any,
        refusal: Callable[[str], Exception] = SnapshotError,
    ) -> None:
        self._epochs = epochs
        self._refusal = refusal
        self._last: dict[str, float] = {}
        """Last counter by ``name.method``."""
        self._repeats: set[str] = set()
        """Those that went back without a restore, such as the number of a step in its epoch; then
        a lower counter proves nothing.
        """
        self._expected: dict[str, float] = {}
        """Counters of the snapshot that the next call is checked against."""
        self._restored_position = 0
        self._names: dict[int, str] = {}
        """Names of the schedulers by ``id()``; ``objects`` keeps them alive."""
        self._objects = objects
        if epochs is None or not hasattr(epochs, "position"):
            return
        for name, value in objects.items():
            target = unwrapped(value)
            if hasattr(target, "optimizer") and not hasattr(target, "param_groups"):
                for method in _METHODS:
                    if _watch(type(target), method):
                        self._names[id(target)] = name
        if self._names:
            _watches.add(self)

    def called(self, scheduler: Any, method: str, counter: float) -> None:
        """Record that the script calls ``scheduler.method(counter)``.

        Raises:
            SnapshotError: it is the first call after a restore, and an earlier one passed more.
        """
        name = self._names.get(id(scheduler))
        if name is None:
            return
        call = f"{name}.{method}"
        expected = self._expected.get(call)
        if expected is not None:
            # A call before the loop, to bring the scheduler to an epoch's begin, proves nothing.
            if not (self._epochs.looping or self._epochs.position != self._restored_position):
                return
            del self._expected[call]
            if counter < expected and call not in self._repeats:
                raise self._refusal(
                    f"The counter of the scheduler {name!r} has gone back: the last call before "
                    f"the restart was {method}({expected:g}), and this one is "
                    f"{method}({counter:g}). The script computes it from a counter of its loop, "
                    "such as that of enumerate(), which begins anew where a run goes on in the "
                    "middle of an epoch. Compute it from sampler.epoch + sampler.position / "
                    "sampler.num_samples, or from a number of steps in a dict that Snapshot is "
                    "given."
                )
        elif counter < self._last.get(call, counter):
            self._repeats.add(call)
        self._last[call] = counter

    def state(self) -> dict[str, Any]:
        """Return the state for :meth:`restore`."""
        return {"last": dict(self._last), "repeats": sorted(self._repeats)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Use the counters of a snapshot, and check the next calls against them."""
        self._last = dict(saved.get("last", {}))
        self._repeats = set(saved.get("repeats", ()))
        self._restored_position = getattr(self._epochs, "position", 0)
        self._expected = dict(self._last) if self._restored_position else {}


def _watch(kind: type[Any], method: str) -> bool:
    """Make ``method`` of the class ``kind`` report its calls. Return whether it takes a counter."""
    owner = next((base for base in kind.__mro__ if method in vars(base)), None)
    original = None if owner is None else vars(owner)[method]
    if not inspect.isfunction(original):
        return False
    if hasattr(original, _WATCHED):
        return True
    parameters = list(inspect.signature(original).parameters)
    if len(parameters) < 2 or parameters[1] not in _COUNTERS:
        return False
    counter_name = parameters[1]

    @functools.wraps(original)
    def reporting(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        counter = args[0] if args else kwargs.get(counter_name)
        if isinstance(counter, Real):
            for watch in list(_watches):
                watch.called(scheduler, method, float(counter))
        return original(scheduler, *args, **kwargs)

    setattr(reporting, _WATCHED, counter_name)
    setattr(owner, method, reporting)
    return True
