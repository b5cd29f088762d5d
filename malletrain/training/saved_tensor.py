"""Where the numbers of a tensor lie in what ``torch.save`` made of it, without reading them. Pure.

Such a file is a zip archive without compression: first a pickle that says how the tensor lies in
its storage, then, after records of a few bytes, the storage. Anything unexpected is answered by
None: who asks reads all of it then.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
from typing import Any, NamedTuple

HEAD = 1024
"""Bytes from the beginning that say it."""
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_SIGNATURE = b"PK\x03\x04"


class SavedTensor(NamedTuple):
    """Numbers that lie one after the other, the last dimension's first."""

    start: int
    """Bytes before them."""
    shape: tuple[int, ...]


class _Lies(NamedTuple):
    """What the pickle says."""

    storage: Any
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuilt(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _Lies:
    return _Lies(storage, offset, tuple(shape), tuple(stride))


class _Layout(pickle.Unpickler):
    """Knows a tensor's pickle and nothing else; no code of it is run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def located(head: bytes, length: int, item_bytes: int) -> SavedTensor | None:
    """Where the numbers are.

    Args:
        head: at most :data:`HEAD` bytes from the beginning.
        length: bytes of all of it.
        item_bytes: bytes of one number.
    """
    records = _records(head)
    first, last = (records[0], records[-1]) if records else (("", 0), ("", 0))
    if not first[0].endswith("/data.pkl") or not last[0].endswith("/data/0"):
        return None
    order = next((at for name, at in records if name.endswith("/byteorder")), None)
    if order is None or not head.startswith(sys.byteorder.encode(), order):
        return None
    try:
        lies = _Layout(io.BytesIO(head[first[1] :])).load()
    except Exception:  # cut off, or something else than a tensor
        return None
    start = last[1]
    if not isinstance(lies, _Lies) or not _is_plain(lies):
        return None
    if start + math.prod(lies.shape) * item_bytes > length:
        return None
    return SavedTensor(start, lies.shape)


def _records(head: bytes) -> list[tuple[str, int]]:
    """(name, where its content begins) of each record, up to the first storage."""
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


def _is_plain(lies: _Lies) -> bool:
    """Whether it is the whole of storage 0, in the order of its dimensions."""
    numbers = math.prod(lies.shape)
    kind, *storage = lies.storage if isinstance(lies.storage, tuple) else ("",)
    if kind != "storage" or len(storage) < 4 or storage[1] != "0":
        return False
    if lies.offset != 0 or storage[3] != numbers or len(lies.stride) != len(lies.shape):
        return False
    expected = 1
    for size, stride in zip(reversed(lies.shape), reversed(lies.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= max(1, size)
    return True
