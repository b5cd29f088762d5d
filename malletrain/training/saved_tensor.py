"""Locates the elements of a tensor in the output of ``torch.save``, without reading them. Pure.

The output is a zip archive without compression: first a pickle with the layout of the tensor in its
storage, then some records of a few bytes, then the storage. For anything unexpected the result is
None, and the caller reads the whole archive.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
from typing import Any, NamedTuple

HEAD = 1024
"""Number of bytes from the start that contain the layout."""
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_SIGNATURE = b"PK\x03\x04"


class SavedTensor(NamedTuple):
    """A tensor that is contiguous in the archive, in row-major order."""

    start: int
    """Offset of the first element, bytes."""
    shape: tuple[int, ...]
    """Shape of the tensor."""


class _Layout(NamedTuple):
    """Layout of the tensor in its storage, as in the pickle."""

    storage: Any
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _layout(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _Layout:
    return _Layout(storage, offset, tuple(shape), tuple(stride))


class _LayoutUnpickler(pickle.Unpickler):
    """Unpickles a tensor and nothing else, without running code of the pickle."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _layout
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def locate(head: bytes, length: int, item_bytes: int) -> SavedTensor | None:
    """Locate the elements.

    Args:
        head: the first bytes of the archive, at most :data:`HEAD`.
        length: size of the archive, bytes.
        item_bytes: size of an element, bytes.

    Returns:
        The location; None if the archive is not as expected.
    """
    records = _records(head)
    first, last = (records[0], records[-1]) if records else (("", 0), ("", 0))
    if not first[0].endswith("/data.pkl") or not last[0].endswith("/data/0"):
        return None
    byteorder_at = next((at for name, at in records if name.endswith("/byteorder")), None)
    if byteorder_at is None or not head.startswith(sys.byteorder.encode(), byteorder_at):
        return None
    try:
        layout = _LayoutUnpickler(io.BytesIO(head[first[1] :])).load()
    except Exception:  # truncated, or not a tensor
        return None
    start = last[1]
    if not isinstance(layout, _Layout) or not _is_plain(layout):
        return None
    if start + math.prod(layout.shape) * item_bytes > length:
        return None
    return SavedTensor(start, layout.shape)


def _records(head: bytes) -> list[tuple[str, int]]:
    """Return (name, offset of the content) of each record, up to the first storage."""
    members: list[tuple[str, int]] = []
    at = head.find(_SIGNATURE)
    while at >= 0 and at + _LOCAL.size <= len(head):
        *_, name_bytes, extra = _LOCAL.unpack_from(head, at)
        compressed = _LOCAL.unpack_from(head, at)[3] != 0
        begins = at + _LOCAL.size + name_bytes
        name = head[at + _LOCAL.size : begins].decode("ascii", "replace")
        if compressed or begins > len(head):
            return []
        members.append((name, begins + extra))
        if "/data/" in name:
            break
        at = head.find(_SIGNATURE, begins + extra)
    return members


def _is_plain(layout: _Layout) -> bool:
    """Return whether the tensor is the whole of storage 0, in row-major order."""
    numbers = math.prod(layout.shape)
    kind, *storage = layout.storage if isinstance(layout.storage, tuple) else ("",)
    if kind != "storage" or len(storage) < 4 or storage[1] != "0":
        return False
    if layout.offset != 0 or storage[3] != numbers or len(layout.stride) != len(layout.shape):
        return False
    expected = 1
    for size, stride in zip(reversed(layout.shape), reversed(layout.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= max(1, size)
    return True
