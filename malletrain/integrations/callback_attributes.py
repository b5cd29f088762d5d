"""The attributes of a script's own callbacks that change while a trainer trains and that no
checkpoint includes, such as counters, sums and lists: in a process that resumes they are as the
script makes them.

Decides which attributes the message names: those that a class of the script's own has, that differ
from their value before the first step, and that hold numbers, texts, lists, dicts, arrays or
tensors.
Left out are callbacks of installed packages, those whose own class says what is saved, the
attributes that a base class of a package uses itself, and points in time.
"""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from malletrain.training import report
from malletrain.training.module_attributes import content_mark, differ
from malletrain.training.objects import is_numpy_number

_MAX_NAMES = 3
"""Maximum number of attributes that the message names."""
_MAX_ATTRIBUTES = 1000
"""Maximum number of attributes that are read."""
_PACKAGES = (
    *("torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning"),
    *("transformers", "accelerate", "malletrain"),
)
"""Packages that are libraries wherever their files are."""
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_CLOCKS = (
    *(time.time, time.monotonic, time.perf_counter, time.process_time, time.thread_time),
    *(time.time_ns, time.monotonic_ns, time.perf_counter_ns, time.process_time_ns),
)
Marks = dict[str, tuple[Any, ...]]
"""What differs when the content of an attribute does, by name of the attribute."""


class CallbackAttributes:
    """The attributes of the callbacks of one training. No method raises.

    Args:
        caller: name of the class that saves checkpoints, for the message.
        savers: names of the methods with which a callback says what is saved of it.
        advice: sentence of the message that says what to do.
    """

    def __init__(self, caller: str, savers: Collection[str], advice: str) -> None:
        self._caller = caller
        self._savers = savers
        self._advice = advice
        self._targets: list[tuple[str, Any, set[str]]] = []
        """Name of each callback, the callback, and the names of a package's attributes in it."""
        self._initial: Marks = {}
        self._began_at: tuple[float, ...] = ()
        self.begun = False
        """Whether :meth:`begin` was called."""
        self.has_notice = False
        """Whether the user of this job was told; part of what is saved."""

    def begin(self, callbacks: Iterable[Any]) -> None:
        """Take the current attributes of ``callbacks`` as those before the first step."""
        self.begun = True
        self._targets = []
        try:
            for callback in callbacks:
                kind = type(callback)
                if _is_of_script(kind) and not self._says_what_is_saved(kind):
                    self._targets.append((kind.__name__, callback, _package_names(kind)))
            self._initial = self._read()
        except Exception:  # a diagnosis of a script's objects must not stop its training
            self._targets = []
        self._began_at = tuple(clock() for clock in _CLOCKS)

    def changed(self) -> list[str]:
        """Return the names of the attributes that have changed; none, from now on, if they cannot
        be read.
        """
        try:
            return [
                name
                for name, mark in self._read().items()
                if name in self._initial
                and _differ(self._initial[name], mark)
                and not self._is_time(mark[-1])
            ]
        except Exception:  # as in begin()
            self._targets = []
            return []

    def tell_changed(self) -> None:
        """Tell the user once in the job which attributes have changed."""
        names = [] if self.has_notice else self.changed()
        if not names:
            return
        self.has_notice = True
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        report.tell(
            f"{self._caller} does not save what other callbacks have in their attributes: "
            f"{', '.join(names[:_MAX_NAMES])}{more} changed in the training, and after a change of "
            f"nodes they begin as the script makes them. {self._advice} Values that are clocks or "
            "follow from the trainer's counters need nothing.",
            once="callbacks",
        )

    def _says_what_is_saved(self, kind: type) -> bool:
        own = [cls for cls in kind.__mro__ if _is_of_script(cls)]
        return any(name in vars(cls) for cls in own for name in self._savers)

    def _read(self) -> Marks:
        return dict(itertools.islice(self._marks(), _MAX_ATTRIBUTES))

    def _marks(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for name, target, package_names in self._targets:
            for attribute, content in list(getattr(target, "__dict__", {}).items()):
                mark = None if attribute in package_names else _mark(content)
                if mark is not None:
                    yield f"{name}.{attribute}", mark

    def _is_time(self, value: Any) -> bool:
        """Return whether ``value`` is a point in time since :meth:`begin`, by any clock."""
        return type(value) in (int, float) and any(
            type(began) is type(value) and began <= value <= clock()
            for began, clock in zip(self._began_at, _CLOCKS, strict=True)
        )


def _mark(content: Any) -> tuple[Any, ...] | None:
    if content is None or type(content) in (bool, int, float, str):
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
    is_installed = not set(_PACKAGE_FOLDERS).isdisjoint(file.split(os.sep))
    return not is_installed and not any(file.startswith(folder + os.sep) for folder in folders)


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
