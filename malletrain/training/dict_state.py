"""Sets the plain dicts of a script to other values in place: tensors, arrays, lists and dicts in
them stay the same objects, so that the script's own variables for them stay valid.

:func:`load` loads the values of another process. It decides which objects keep their identity: a
tensor or array if its shape and dtype are the saved ones, a list or dict always. What belongs to a
module or optimizer as well, such as the tensors of ``model.state_dict()``, is replaced, because
that object gets a state of its own. :class:`Contents` sets dicts back to what this process had in
them before.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from malletrain.training.torch_private import in_place_changes

_DICTS = (dict, OrderedDict, defaultdict, Counter)
_SMALL_BYTES = 65536
"""Size up to which :class:`Contents` copies a tensor before it is known to change in place."""


def load(own: dict[Any, Any], saved: Mapping[Any, Any], others: Iterable[Any] = ()) -> None:
    """Set the values of ``saved`` in ``own``. Keys that only ``own`` has stay.

    Args:
        own: the script's dict.
        saved: its state.
        others: the script's other objects. What they have in common with ``own`` is not written
            to.
    """
    loader = _Loader(others)
    loader.merge(own, saved)
    loader.replace_overwritten()


class _Loader:
    """One load. ``others``: see :func:`load`."""

    def __init__(self, others: Iterable[Any]) -> None:
        self._foreign: set[Any] = set()
        """Storages of tensors and ids of lists and dicts of other objects."""
        for value in others:
            self._foreign.update(_marks(value))
        self._written: dict[Any, list[tuple[dict[Any, Any] | list[Any], Any, Any]]] = {}
        """(container, key, saved value) of each tensor that was written to, by its storage."""
        self._merged: dict[int, Any] = {}
        """What was loaded into each list and dict, by the id of the list or dict."""

    def merge(self, own: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
        """Set the values of ``saved`` in ``own``."""
        self._merged[id(own)] = saved
        for key, value in saved.items():
            own[key] = self._value(own, key, own.get(key), value)

    def replace_overwritten(self) -> None:
        """Replace each tensor that shares memory with another one and lost its value to it."""
        for places in self._written.values():
            for container, key, saved in places if len(places) > 1 else ():
                if not _is_same(container[key], saved):
                    container[key] = saved

    def _value(self, container: Any, key: Any, own: Any, saved: Any) -> Any:
        """Return ``own`` with the content of ``saved`` if possible, else ``saved``."""
        if _is_array(own) and _is_array(saved):
            return self._array(container, key, own, saved)
        if id(own) in self._merged:
            return own if self._merged[id(own)] is saved else saved
        if isinstance(saved, dict) and type(own) in _DICTS and self._is_own(own):
            old = dict(own)
            own.clear()
            own.update({k: old[k] for k in saved if k in old})
            self.merge(own, saved)
            return own
        if type(saved) is list and type(own) is list and self._is_own(own):
            self._merged[id(own)] = saved
            old_items = [*own, *[None] * len(saved)][: len(saved)]
            own[:] = old_items
            for index, item in enumerate(saved):
                own[index] = self._value(own, index, old_items[index], item)
            return own
        is_deque = type(own) is type(saved) is deque and own.maxlen == saved.maxlen
        if is_deque or type(own) is type(saved) is set:
            self._merged[id(own)] = saved
            own.clear()
            own.extend(saved) if is_deque else own.update(saved)
            return own
        return saved

    def _array(self, container: Any, key: Any, own: Any, saved: Any) -> Any:
        fits = hasattr(own, "detach") == hasattr(saved, "detach")
        fits = fits and own.shape == saved.shape and own.dtype == saved.dtype
        if not fits or not self._is_own(own) or not _write(own, saved):
            return saved
        self._written.setdefault(_memory(own), []).append((container, key, saved))
        return own

    def _is_own(self, value: Any) -> bool:
        """Return whether nothing in ``value`` belongs to another object."""
        return not self._foreign or self._foreign.isdisjoint(
            _memory(part) if _is_array(part) else id(part) for part in _parts(value)
        )


def _marks(value: Any) -> Iterator[Any]:
    """Yield what marks the tensors, lists and dicts of a module or optimizer."""
    if hasattr(value, "named_parameters"):
        for tensor in (*value.parameters(), *getattr(value, "buffers", tuple)()):
            yield _memory(tensor)
    elif isinstance(groups := getattr(value, "param_groups", None), list):
        state = getattr(value, "state", None)  # a wrapper may have none
        for part in _parts([groups, list(state.values()) if isinstance(state, dict) else []]):
            yield _memory(part) if _is_array(part) else id(part)


def _parts(value: Any) -> Iterator[Any]:
    """Yield ``value`` and everything in it that can change: tensors, arrays, lists, dicts, sets."""
    if _is_array(value) or isinstance(value, (set, deque)):
        yield value
    elif isinstance(value, dict):
        yield value
        for item in value.values():
            yield from _parts(item)
    elif isinstance(value, (list, tuple)):
        if isinstance(value, list):
            yield value
        for item in value:
            yield from _parts(item)


def _is_array(value: Any) -> bool:
    """Return whether ``value`` is an ordinary tensor or an array of numpy."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and not (value.is_quantized or value.is_meta)
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _memory(value: Any) -> Any:
    """Return what is equal for two tensors or arrays in the same memory."""
    while getattr(value, "base", None) is not None:  # of an array: the array or tensor it views
        value = value.base
    try:
        return "storage", value.untyped_storage()._cdata  # noqa: SLF001 (no other name)
    except (AttributeError, RuntimeError, NotImplementedError):  # numpy's, a subclass without one
        return id(value)


def _write(own: Any, saved: Any) -> bool:
    """Copy ``saved`` to ``own``. Return False if ``own`` cannot be written to."""
    import torch

    try:
        if isinstance(own, torch.Tensor):
            with torch.no_grad():
                own.copy_(saved)
        else:
            own[...] = saved
    except (RuntimeError, ValueError):  # of an expanded or inference tensor, a read-only array
        return False
    return True


def _is_same(own: Any, saved: Any) -> bool:
    """Return whether two tensors or arrays have equal shapes and values, NaN included."""
    if own.shape != saved.shape:
        return False
    if hasattr(own, "detach"):
        own, saved = own.detach(), saved.detach().to(own.device)
    return bool(((own == saved) | ((own != own) & (saved != saved))).all())


class Contents:
    """What this process has in dicts at one time, to set them back to it.

    Args:
        dicts: the plain dicts of the script.
        only_changing: copy large tensors only once they are known to change in place. For calls in
            each step.
        others: the script's other objects. Their large tensors are not copied with
            ``only_changing``.
    """

    def __init__(
        self,
        dicts: Iterable[dict[Any, Any]],
        only_changing: bool = False,
        others: Iterable[Any] = (),
    ) -> None:
        self._dicts, self._others = list(dicts), list(others)
        self._only_changing = only_changing
        self._parts: list[tuple[Any, Any]] = []
        """(object, copy of its content), each object once; the copy is None for a tensor that is
        not copied.
        """
        self._counts: dict[int, tuple[Any, int]] = {}
        """(tensor, count of its in-place changes) of large tensors, by the tensor's id."""
        self._changing: set[int] = set()
        """Ids of the large tensors that change in place."""
        self._foreign: set[int] = set()
        """Ids of the large tensors that change in place and belong to other objects."""

    def keep(self) -> None:
        """Record the present content."""
        parts = {id(part): part for values in self._dicts for part in _parts(values)}
        counts, self._counts = self._counts, {}
        self._changing &= parts.keys()
        self._foreign &= parts.keys()
        self._parts = [(part, self._copy(part, counts)) for part in parts.values()]

    def restore(self) -> bool:
        """Set the dicts back. Return False if a tensor has changed that was not copied."""
        complete = True
        for part, content in self._parts:
            if content is None:
                if in_place_changes(part) != self._counts[id(part)][1] and self._note(part):
                    complete = False
            elif _is_array(part):
                complete &= _is_same(part, content) or _write(part, content)
            elif isinstance(part, list):
                part[:] = content
            elif isinstance(part, dict):
                part.clear()
                for key, value in content.items():
                    part[key] = value
            else:
                part.clear()
                part.extend(content) if isinstance(part, deque) else part.update(content)
        return complete

    def _copy(self, part: Any, counts: Mapping[int, tuple[Any, int]]) -> Any:
        if not _is_array(part):
            return dict(part) if isinstance(part, dict) else list(part)
        if not hasattr(part, "detach"):
            return part.copy()
        if self._only_changing and part.nbytes > _SMALL_BYTES and id(part) not in self._changing:
            count = in_place_changes(part)
            before = counts.get(id(part))
            is_known = before is not None and before[0] is part and before[1] != count
            if not is_known or not self._note(part):
                self._counts[id(part)] = (part, count)
                return None
        return part.detach().clone()

    def _note(self, tensor: Any) -> bool:
        """Note that a large tensor changes in place. Return whether it is the dict's own."""
        if id(tensor) in self._foreign:
            return False
        if _memory(tensor) in {mark for value in self._others for mark in _marks(value)}:
            self._foreign.add(id(tensor))
            return False
        self._changing.add(id(tensor))
        return True
