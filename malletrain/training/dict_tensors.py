"""Keeps the tensors and arrays of a script's dicts the same objects when a state is loaded, so that
variables of the script for them stay valid::

    center = torch.zeros(8)
    snapshot = Snapshot(model=model, facts={"center": center})

A load replaces the values of a dict. :class:`DictTensors` then decides for which keys the script's
object takes its place in the dict again, with the loaded content:

* The dict that was saved had, under this key, the object that it had at the start of the script. An
  object that the script replaces (``facts["best"] = x``) may be a constant, so that nothing may be
  written to it.
* The object had the same content at its start here as where it was saved: both have the same hash.
  If not, the script computes it for its rank or the number of ranks, or draws it at random. Then
  the dict gets the saved value, and the object keeps its content.
* Nothing else uses its memory, as far as that can be seen: it is no view, not shared with another
  process, a file, another library or one of the run's modules.

In all other cases, and for lists and dicts within a dict, the dict has the loaded object. Contents
are read only at the start of a script, never at a save or in a step.
"""

from __future__ import annotations

import hashlib
import re
import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from malletrain.training.objects import unwrapped

Record = dict[str, dict[Any, str]]
"""Hash of the content at the start, by name of the dict and key, for each key that has the object
that it had at the start.
"""

_CHUNK_BYTES = 1 << 24
"""Maximum memory on the CPU for reading a tensor."""

_SHA256 = re.compile("[0-9a-f]{64}")
"""What earlier versions recorded instead of :func:`_content_hash`."""


@dataclass
class _Start:
    """A tensor or array at the start of the script."""

    reference: weakref.ref[Any]
    """The object. The script may drop it, and its memory is freed."""
    content_hash: str
    """Result of :func:`_content_hash` at the start."""
    requires_grad: bool
    """Whether it is trained; False for an array."""
    sha256: str | None = None
    """Result of :func:`_sha256` at the start; None if no snapshot had one."""


class DictTensors:
    """The tensors and arrays in the dicts among a script's objects.

    Args:
        objects: the script's objects, by name; others than dicts are only read.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._starts: dict[str, dict[Any, _Start]] = {}
        self.begin()

    def begin(self) -> None:
        """Take the objects that the dicts have now as those at the start of the script."""
        self._starts = {
            name: {key: start for key, value in values.items() if (start := _start(value))}
            for name, values in self._dicts().items()
        }

    def record(self) -> Record:
        """Return what :meth:`restore` needs to know of the state that is being saved."""
        record: Record = {}
        for name, values in self._dicts().items():
            entries = {
                key: start.content_hash
                for key, start in self._starts.get(name, {}).items()
                if (value := values.get(key)) is not None
                and value is start.reference()
                and _requires_grad(value) == start.requires_grad
            }
            if entries:
                record[name] = entries
        return record

    def restore(self, record: Mapping[str, Mapping[Any, str]]) -> None:
        """Put the script's objects back into the dicts, after a state was loaded.

        Args:
            record: the result of :meth:`record` for that state; empty if it has none.
        """
        shared = self._shared_memory() if record else set()
        for name, values in self._dicts().items():
            starts = self._starts.get(name, {})
            for key, content_hash in record.get(name, {}).items():
                if key not in values or key not in starts:
                    continue
                own, saved = starts[key].reference(), values[key]
                if own is None or not _had_content(starts[key], own, content_hash):
                    continue
                if own is saved or _memory(own) in shared:
                    continue
                if _write(own, saved):
                    values[key] = own

    def _dicts(self) -> dict[str, dict[Any, Any]]:
        targets = {name: unwrapped(value) for name, value in self._objects.items()}
        return {name: t for name, t in targets.items() if isinstance(t, dict)}

    def _shared_memory(self) -> set[int]:
        """Return the addresses that tensors of modules have, or several objects in the dicts."""
        addresses: set[int] = set()
        for module in map(unwrapped, self._objects.values()):
            if hasattr(module, "named_parameters"):
                tensors = (
                    *getattr(module, "parameters", tuple)(),
                    *getattr(module, "buffers", tuple)(),
                )
                addresses.update(_memory(tensor) for tensor in tensors if _is_tensor(tensor))
        own = [start.reference() for starts in self._starts.values() for start in starts.values()]
        counts = Counter(_memory(v) for v in {id(v): v for v in own if v is not None}.values())
        return addresses | {address for address, count in counts.items() if count > 1}


def _start(value: Any) -> _Start | None:
    """Return what to remember of ``value``. Return None without reading it if nothing may be
    written to it.
    """
    try:
        if not _may_be_written(value) or not _owns_memory(value):
            return None
        return _Start(weakref.ref(value), _content_hash(value), _requires_grad(value))
    except (RuntimeError, TypeError):  # no memory on the GPU, or a dtype that cannot be read
        return None


def _write(own: Any, content: Any) -> bool:
    """Write ``content`` to ``own``. Return False and write nothing if it does not fit."""
    is_tensor = _is_tensor(own) and _is_tensor(content)
    if not is_tensor and not (_is_array(own) and _is_array(content)):
        return False
    try:
        if own.shape != content.shape or own.dtype != content.dtype or not _owns_memory(own):
            return False
        _copy(own, content)
    except RuntimeError:  # a GPU out of memory, or torch has no such operation for the tensor
        return False
    return True


def _is_tensor(value: Any) -> bool:
    """Return whether ``value`` is a tensor or parameter, and not one of a subclass."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def _is_array(value: Any) -> bool:
    """Return whether ``value`` is an array of numpy, and neither of a subclass nor of objects."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray:
        return False
    return value.dtype.itemsize > 0 and not value.dtype.hasobject


def _may_be_written(value: Any) -> bool:
    """Return whether ``value`` is an array, or a tensor in memory of torch."""
    if not _is_tensor(value):
        return _is_array(value)
    from malletrain.training.torch_private import is_allocated_by_torch

    return is_allocated_by_torch(value)


def _requires_grad(value: Any) -> bool:
    return bool(getattr(value, "requires_grad", False))


def _had_content(start: _Start, own: Any, content_hash: str) -> bool:
    """Return whether ``own`` had, at the start of the script, the content of ``content_hash``. An
    SHA-256 is computed at the first call, when ``own`` still has that content.
    """
    if not _SHA256.fullmatch(content_hash):
        return start.content_hash == content_hash
    if start.sha256 is None:
        try:
            start.sha256 = _sha256(own)
        except (RuntimeError, TypeError):  # no memory on the GPU
            return False
    return start.sha256 == content_hash


def _content_hash(value: Any) -> str:
    """Return the dtype and shape of ``value``, a tensor or array, and a CRC-32 of its bytes, which
    is fast enough for a dict with a copy of a large model.
    """
    checksum = 0
    for piece in _pieces(value):
        checksum = zlib.crc32(piece, checksum)
    return f"{_kind(value)} {checksum:08x}"


def _sha256(value: Any) -> str:
    """Return the SHA-256 of the dtype, shape and bytes of ``value``, a tensor or array."""
    sha = hashlib.sha256(_kind(value).encode())
    for piece in _pieces(value):
        sha.update(piece)
    return sha.hexdigest()


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}"


def _pieces(value: Any) -> Iterator[Any]:
    """Yield the bytes of ``value``, a tensor or array, in order. A piece is valid until the next
    one.
    """
    if _is_array(value):
        import numpy

        yield numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8).data
        return
    import torch

    content = value.detach().contiguous().reshape(-1).view(torch.uint8)
    # a copy, because torch counts memory that numpy has seen as numpy's
    copy = torch.empty(min(len(content), _CHUNK_BYTES), dtype=torch.uint8)
    for chunk in content.split(_CHUNK_BYTES):
        yield copy[: len(chunk)].copy_(chunk).numpy().data


def _memory(value: Any) -> int:
    """Return the address of the memory of ``value``."""
    if _is_array(value):
        return int(value.ctypes.data)
    from malletrain.training.torch_private import has_plain_memory

    return int(value.untyped_storage().data_ptr()) if has_plain_memory(value) else 0


def _owns_memory(value: Any) -> bool:
    if _is_array(value):
        return value.base is None and bool(value.flags.owndata and value.flags.writeable)
    from malletrain.training.torch_private import owns_memory

    return owns_memory(value)


def _copy(own: Any, content: Any) -> None:
    if _is_array(own):
        own[...] = content
        return
    import torch

    with torch.no_grad():
        own.copy_(content)
