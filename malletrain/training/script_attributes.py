"""The attributes of a script's own objects that change while it trains and that no snapshot or
checkpoint includes, such as counters, sums and lists: in a process that resumes they are as the
script makes them.

Decides which attributes are told: those that a class of the script's own has, that differ from
their value before the first step, and that hold numbers, texts, lists, dicts, arrays, tensors or
random generators. Left out are objects of installed packages, the attributes that a base class of a
package uses itself, and points in time.

:class:`CallbackAttributes` reads the callbacks of a trainer. Left out are those whose own class
says what is saved. :class:`ObjectAttributes` reads the objects that a script passes to be saved;
their states say what is. Modules have rules of their own
(:mod:`malletrain.training.module_attributes`).
"""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from malletrain.training import report
from malletrain.training.module_attributes import content_mark, differ
from malletrain.training.objects import is_numpy_number, state_of, unwrapped

_MAX_NAMES = 3
"""Maximum number of attributes that the message names."""
_MAX_DEPTH = 3
"""Depth to which the values of a state are read."""
_MAX_LOOKS = 5
"""Maximum number of snapshots of a process at which the states of objects are read."""
_PACKAGES = ("lightning", "pytorch_lightning", "transformers", "accelerate", "malletrain")
"""Packages that are libraries wherever their files are."""
_CLOCKS = (time.time, time.monotonic, time.perf_counter)
Marks = dict[str, tuple[Any, ...]]
"""What differs when the content of an attribute does, by name of the attribute."""


class _Attributes:
    """Attributes of objects, compared with an earlier moment."""

    def __init__(self) -> None:
        self._targets: list[tuple[str, Any, set[str]]] = []
        """Name of each object, the object, and the names of a package's attributes in it."""
        self._initial: Marks = {}
        self._began_at = tuple(clock() for clock in _CLOCKS)
        self.begun = False
        """Whether :meth:`begin` was called."""
        self.has_notice = False
        """Whether the user of this job was told; part of what is saved."""

    def _begin(self, targets: Iterable[tuple[str, Any]]) -> None:
        self.begun = True
        self._targets = [(name, target, _package_names(type(target))) for name, target in targets]
        self._initial = self._read()
        self._began_at = tuple(clock() for clock in _CLOCKS)

    def changed(self) -> list[str]:
        """Return the names of the attributes that have changed."""
        return [
            name
            for name, mark in self._read().items()
            if name in self._initial
            and _differ(self._initial[name], mark)
            and not self._is_time(mark[-1])
        ]

    def _tell(self, beginning: str, end: str) -> None:
        """Tell the user once in the job which attributes have changed. Never raises."""
        names = [] if self.has_notice else self.changed()
        if not names:
            return
        self.has_notice = True
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        report.notice(
            f"{beginning}: {', '.join(names[:_MAX_NAMES])}{more} changed in the training, and "
            f"after a change of nodes begin as the script makes them. {end}"
        )

    def _read(self) -> Marks:
        """Return the mark of each attribute; none, from now on, if they cannot be read."""
        try:
            return dict(self._marks())
        except Exception:  # a diagnosis of a script's objects must not stop its snapshots
            self._targets = []
            return {}

    def _marks(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for name, target, package_names in self._targets:
            for attribute, content in getattr(target, "__dict__", {}).items():
                mark = None if attribute in package_names else _mark(content)
                if mark is not None:
                    yield f"{name}.{attribute}", mark

    def _is_time(self, value: Any) -> bool:
        """Return whether ``value`` is a point in time since :meth:`begin`."""
        return isinstance(value, float) and any(
            began <= value <= clock() for began, clock in zip(self._began_at, _CLOCKS, strict=True)
        )


class CallbackAttributes(_Attributes):
    """The attributes of the callbacks of one training.

    Args:
        owner: name of the class that saves checkpoints, for the message.
        savers: names of the methods with which a callback says what is saved of it.
        advice: sentence of the message that says what to do.
    """

    def __init__(self, owner: str, savers: Collection[str], advice: str) -> None:
        super().__init__()
        self._owner = owner
        self._savers = savers
        self._advice = advice

    def begin(self, callbacks: Iterable[Any]) -> None:
        """Take the current attributes of ``callbacks`` as those before the first step."""
        self._begin(
            (type(callback).__name__, callback)
            for callback in callbacks
            if _is_of_script(type(callback)) and not self._says_what_is_saved(type(callback))
        )

    def tell_changed(self) -> None:
        """Tell the user once in the job which attributes have changed. Never raises."""
        self._tell(
            f"{self._owner} does not save what other callbacks have in their attributes",
            f"{self._advice} What follows from the trainer's own counts needs nothing.",
        )

    def _says_what_is_saved(self, kind: type) -> bool:
        own = [cls for cls in kind.__mro__ if _is_of_script(cls)]
        return any(name in vars(cls) for cls in own for name in self._savers)


class ObjectAttributes(_Attributes):
    """The attributes of the objects that a script has passed, beside their states.

    Args:
        owner: name of the class that was given the objects, for the message.
        objects: the script's objects, by name.
    """

    def __init__(self, owner: str, objects: Mapping[str, Any]) -> None:
        super().__init__()
        self._owner = owner
        self._objects = objects
        self._looks_left = _MAX_LOOKS

    def begin(self) -> None:
        """Take the current attributes as those before the first step."""
        targets = [(name, unwrapped(value)) for name, value in self._objects.items()]
        self._begin(
            (name, target)
            for name, target in targets
            if _is_of_script(type(target)) and not hasattr(target, "named_modules")
        )

    def tell_changed(self) -> None:
        """Tell the user once in the job which attributes have changed. Never raises."""
        self._tell(
            f"The state_dict() of an object that {self._owner} saves does not have all of it",
            "Add to its state_dict() and load_state_dict() what later steps need. What follows "
            "from the rest of its state needs nothing.",
        )

    def changed(self) -> list[str]:
        """Return the names of the attributes that have changed and are not part of the object's
        state. A state may be large, so that the first few calls read it, and the others nothing.
        """
        if self._looks_left <= 0:
            return []
        self._looks_left -= 1
        names = super().changed()
        try:
            return [name for name in names if not self._is_saved(*name.rsplit(".", 1))]
        except Exception:  # of the script's state_dict(): a diagnosis must not stop its snapshots
            return []

    def _is_saved(self, name: str, attribute: str) -> bool:
        """Return whether the state of an object has an attribute of it, by its name or value."""
        target = unwrapped(self._objects[name])
        state = state_of(target)
        if isinstance(state, dict) and attribute in state:
            return True
        has_base = any(cls is not object for cls in type(target).__mro__ if not _is_of_script(cls))
        if has_base and attribute.startswith("_"):
            return True
        mark = _mark(vars(target)[attribute])
        return any(_mark(value) == mark for value in _values(state))


def _values(value: Any, depth: int = _MAX_DEPTH) -> Iterator[Any]:
    """Yield ``value`` and the values in it."""
    yield value
    if depth and isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _values(item, depth - 1)


def _mark(content: Any) -> tuple[Any, ...] | None:
    if content is None or isinstance(content, bool | int | float | str):
        return ("", content)
    return ("", content.item()) if is_numpy_number(content) else content_mark(content)


def _differ(first: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    return len(first) != len(now) or any(map(differ, first, now))


def _is_of_script(kind: type) -> bool:
    """Return whether a class is the script's own, and of no installed package."""
    package = kind.__module__.partition(".")[0]
    if package in (*_PACKAGES, "builtins", "__main__"):
        return package == "__main__"
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    return not any(file.startswith(folder + os.sep) for folder in folders)


def _package_names(kind: type) -> set[str]:
    """Return the names that the methods of packages' classes in ``kind`` use."""
    functions = (
        getattr(value, "fget", value)
        for cls in kind.__mro__
        if not _is_of_script(cls)
        for value in vars(cls).values()
    )
    codes = (getattr(function, "__code__", None) for function in functions)
    return {name for code in codes if code is not None for name in code.co_names}
