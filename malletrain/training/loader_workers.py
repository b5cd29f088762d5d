"""Makes DataLoaders that name no ``num_workers`` use the number that MalleTrain or the option
``--loader-workers`` has set in the environment.

Decides which DataLoaders use it: those over a map-style dataset that are created without
``num_workers``. An iterable dataset would repeat its data in each worker, unless it shares them out
itself, which only its author knows. Their workers are forked, as is the default before Python 3.14:
a script that was written without workers may have data that cannot be pickled, and no
``if __name__ == "__main__"``. Everything else stays as torch has it.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
from importlib import import_module
from typing import Any

from malletrain.protocol import env

_MARK = "counts_workers_for_malletrain"
"""Attribute of the replaced method."""


def loader_workers() -> int:
    """Return the number of loader workers of this process that MalleTrain has chosen or the user
    has given by ``--loader-workers``; 0 if there is none, and outside MalleTrain.

    DataLoaders over map-style datasets without ``num_workers`` use it by themselves, from the
    import of malletrain on. Pass it to others yourself:
    ``DataLoader(data, num_workers=malletrain.loader_workers())``.
    """
    install()
    return _number()


def _number() -> int:
    text = os.environ.get(env.LOADER_WORKERS, "")
    return int(text) if text.isdecimal() else 0


def _forks_only_on_request() -> bool:
    """Return whether this Python does not fork new processes by default (3.14 and later), and the
    script has not chosen a method.
    """
    is_default = multiprocessing.get_start_method(allow_none=True) is None
    return is_default and multiprocessing.get_all_start_methods()[0] != "fork"


def install() -> None:
    """Make torch's DataLoader use the number, once. Imports torch if there is a number. Does
    nothing without one, or without torch.
    """
    if not _number():
        return
    try:
        module = import_module("torch.utils.data")
    except ImportError:
        return
    loader_class = getattr(module, "DataLoader", None)
    iterable_class = getattr(module, "IterableDataset", None)
    if loader_class is None or iterable_class is None:  # torch is only partly imported
        return
    original = loader_class.__init__
    if hasattr(original, _MARK):
        return
    names = list(inspect.signature(original).parameters)[1:]  # without self
    if "num_workers" not in names:
        return
    position = names.index("num_workers")

    @functools.wraps(original)
    def create(self: Any, *args: Any, **kwargs: Any) -> None:
        dataset = args[0] if args else kwargs.get("dataset")
        names_number = "num_workers" in kwargs or len(args) > position
        if not names_number and not isinstance(dataset, iterable_class):
            kwargs["num_workers"] = _number()
            if kwargs.get("multiprocessing_context") is None and _forks_only_on_request():
                kwargs["multiprocessing_context"] = "fork"
        original(self, *args, **kwargs)

    setattr(create, _MARK, True)
    loader_class.__init__ = create
