"""The attributes of a script's callbacks that change while it trains and that no checkpoint
includes, such as counters, sums and lists: in a process that resumes they are as the script makes
them.

Decides which attributes are told: those that a class of the script's own has, that differ from
their value before the first step, and that hold numbers, texts, lists, dicts, arrays or tensors.
Left out are callbacks of installed packages, the attributes that such a class uses itself,
callbacks whose own class says what is saved, and points in time.
"""

from __future__ import annotations

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
_PACKAGES = ("lightning", "pytorch_lightning", "transformers", "accelerate", "malletrain")
"""Packages that are libraries wherever their files are."""
_CLOCKS = (time.time, time.monotonic, time.perf_counter)


class CallbackAttributes:
    """The attributes of the callbacks of one training.

    Args:
        owner: name of the class that saves checkpoints, for the message.
        savers: names of the methods with which a callback says what is saved of it.
        advice: sentence of the message that says what to do.
    """

    def __init__(self, owner: str, savers: Collection[str], advice: str) -> None:
        self._owner = owner
        self._savers = savers
        self._advice = advice
        self._callbacks: list[tuple[Any, set[str]]] = []
        """The script's callbacks, and the names of a library's attributes in each."""
        self._initial: dict[str, tuple[Any, ...]] = {}
        self._began_at = tuple(clock() for clock in _CLOCKS)
        self.begun = False
        """Whether :meth:`begin` was called."""
        self.told = False
        """Whether the user of this job was told; part of the checkpoint."""

    def begin(self, callbacks: Iterable[Any]) -> None:
        """Take the current attributes of ``callbacks`` as those before the first step."""
        self.begun = True
        self._callbacks = [
            (callback, _library_names(type(callback)))
            for callback in callbacks
            if _is_of_script(type(callback)) and not self._says_what_is_saved(type(callback))
        ]
        self._initial = self._read()
        self._began_at = tuple(clock() for clock in _CLOCKS)

    def changed(self) -> list[str]:
        """Return the names of the attributes that have changed, as ``Class.attribute``."""
        return [
            name
            for name, mark in self._read().items()
            if name in self._initial
            and _differ(self._initial[name], mark)
            and not self._is_time(mark[-1])
        ]

    def tell_changed(self) -> None:
        """Tell the user once in the job which attributes have changed. Never raises."""
        names = [] if self.told else self.changed()
        if not names:
            return
        self.told = True
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        report.notice(
            f"{self._owner} does not save what other callbacks have in their attributes: "
            f"{', '.join(names[:_MAX_NAMES])}{more} changed in the training, and after a change of "
            f"nodes begin as the script makes them. {self._advice} What follows from the trainer's "
            "own counts needs nothing."
        )

    def _says_what_is_saved(self, kind: type) -> bool:
        own = [cls for cls in kind.__mro__ if _is_of_script(cls)]
        return any(name in vars(cls) for cls in own for name in self._savers)

    def _read(self) -> dict[str, tuple[Any, ...]]:
        """Return the mark of each attribute; none, from now on, if they cannot be read."""
        try:
            return dict(self._marks())
        except Exception:  # a diagnosis of a script's objects must not stop its checkpoints
            self._callbacks = []
            return {}

    def _marks(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for callback, library_names in self._callbacks:
            for attribute, content in getattr(callback, "__dict__", {}).items():
                if attribute in library_names:
                    continue
                if content is None or isinstance(content, bool | int | float | str):
                    mark: tuple[Any, ...] | None = ("", content)
                elif is_numpy_number(content):
                    mark = ("", content.item())
                else:
                    mark = content_mark(content)
                if mark is not None:
                    yield f"{type(callback).__name__}.{attribute}", mark

    def _is_time(self, value: Any) -> bool:
        """Return whether ``value`` is a point in time since :meth:`begin`."""
        return isinstance(value, float) and any(
            began <= value <= clock() for began, clock in zip(self._began_at, _CLOCKS, strict=True)
        )


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


def _library_names(kind: type) -> set[str]:
    """Return the names that the methods of libraries in ``kind`` use."""
    functions = (
        getattr(value, "fget", value)
        for cls in kind.__mro__
        if not _is_of_script(cls)
        for value in vars(cls).values()
    )
    codes = (getattr(function, "__code__", None) for function in functions)
    return {name for code in codes if code is not None for name in code.co_names}
