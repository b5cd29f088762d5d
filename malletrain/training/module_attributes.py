"""Detects attributes of modules that change while a script trains and that no state includes:
lists, dicts and deques, such as outputs collected over an epoch, arrays of numpy, and tensors that
are neither parameters nor buffers, such as a center or a queue.

Decides which attributes these are, and tells the user. Numbers, flags and strings are saved
(:mod:`malletrain.training.module_numbers`). What these attributes hold may be the data of one rank,
so it cannot be saved in the same way.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from malletrain.training import report
from malletrain.training.objects import plain_name, unwrapped

_MAX_NAMES = 3
"""Maximum number of attributes that the message names."""
_MAX_BYTES = 1 << 16
"""Maximum size of an array that is read at each snapshot, bytes."""


class ModuleAttributes:
    """The attributes of the modules among a script's objects that no state includes.

    Args:
        owner: name of the class that was given the objects, for the message.
        objects: the script's objects, by name; others than modules are ignored.
        without: names of attributes that belong to a library.
    """

    def __init__(
        self, owner: str, objects: Mapping[str, Any], without: Collection[str] = ()
    ) -> None:
        self._owner = owner
        self._objects = objects
        self._without = set(without)
        self._reported = False
        self._initial: dict[str, tuple[Any, ...]] = {}
        self.begin()

    def begin(self) -> None:
        """Take the current attributes as those at the start of the script."""
        self._initial = self._read()

    def changed(self) -> list[str]:
        """Return the names of the attributes that differ from those at the start of the script."""
        return [path for path, mark in self._read().items() if self._initial.get(path) != mark]

    def tell_changed(self) -> None:
        """Tell the user once which attributes have changed. Never raises."""
        names = [] if self._reported else self.changed()
        if not names:
            return
        self._reported = True
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        report.tell(
            f"{self._owner} does not save {', '.join(names[:_MAX_NAMES])}{more}: after a change of "
            "nodes it is as the script makes it. Register a tensor that belongs to the model as a "
            "buffer. Do not collect the outputs of an epoch in a list: add them up over all ranks "
            "at each step, in a buffer or a number. A cache needs nothing.",
            once="attributes",
        )

    def _read(self) -> dict[str, tuple[Any, ...]]:
        """Return the mark of each attribute; none, from now on, if they cannot be read."""
        try:
            return dict(self._marks())
        except Exception:  # a diagnosis of a script's objects must not stop its snapshots
            self._reported = True
            return {}

    def _marks(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield the name of each attribute, and what differs when its content does."""
        from torch import Tensor, nn

        from malletrain.training.torch_private import in_place_changes

        common = vars(nn.Module()).keys()
        for name, value in self._objects.items():
            module = unwrapped(value)
            if not hasattr(module, "named_modules"):
                continue
            for path, part in module.named_modules():
                # A hook before the forward pass may compute a weight from others each time.
                if part._forward_pre_hooks:  # noqa: SLF001 (no other name)
                    continue
                for attribute, content in vars(part).items():
                    if attribute in common or attribute in self._without:
                        continue
                    full = ".".join(p for p in (name, plain_name(path), attribute) if p)
                    if isinstance(content, Tensor) and not content.requires_grad:
                        yield full, (id(content), in_place_changes(content))
                    elif type(content).__name__ == "ndarray" and content.nbytes <= _MAX_BYTES:
                        yield full, (content.shape, zlib.crc32(content.tobytes()))
                    elif type(content) in (list, deque):
                        yield full, (len(content), id(content[-1]) if content else 0)
                    elif type(content) is dict:
                        yield full, (len(content),)
