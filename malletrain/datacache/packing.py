"""Samples as bytes: tensors, arrays, images, numbers, texts and bytes, in tuples, named tuples,
lists and dicts.

Decides the format. A packed sample is a description (msgpack) followed by the bytes of each array,
aligned so that an array can be used in place. Unlike with pickle, unpacking executes no code of the
sample: a class that a sample names is looked up in the modules that are already imported. Other
types cannot be packed, because the cache would return another type than the data set.
:mod:`malletrain.datacache.packed_classes` packs objects of other packages' classes.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from malletrain.datacache.packed_classes import (
    CannotPackError,
    describe_image,
    describe_tv_tensor,
    is_image,
    is_named_tuple,
    is_tv_tensor,
    named_tuple_class,
    named_tuple_place,
    rebuild_image,
    rebuild_tv_tensor,
)

ALIGN = 16
"""Alignment of arrays within a packed sample, and of packed samples in memory, bytes."""
_HEAD = struct.Struct("<I")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def pack(sample: Any) -> bytes:
    """Return a sample as bytes.

    Raises:
        CannotPackError: it has a part of another type than those of this module.
    """
    parts: list[tuple[int, Any]] = []
    end = 0

    def add(data: Any) -> list[int]:
        nonlocal end
        view = memoryview(data).cast("B")
        offset = -(-end // ALIGN) * ALIGN
        parts.append((offset, view))
        end = offset + len(view)
        return [offset, len(view)]

    head = _encode(_describe(sample, add, ""))
    start = -(-(_HEAD.size + len(head)) // ALIGN) * ALIGN
    packed = bytearray(start + end)
    packed[: _HEAD.size] = _HEAD.pack(len(head))
    packed[_HEAD.size : _HEAD.size + len(head)] = head
    for offset, view in parts:
        packed[start + offset : start + offset + len(view)] = view
    return bytes(packed)


def unpack(data: Any) -> Any:
    """Return the sample of packed bytes. Tensors and arrays are views of ``data``, not copies.

    Args:
        data: a buffer with the result of :func:`pack`, writable if tensors are to be.

    Raises:
        ValueError: the bytes are not a packed sample, or a class in it is not imported here.
    """
    view = memoryview(data).cast("B")
    try:
        (length,) = _HEAD.unpack_from(view)
        head = _decode(view[_HEAD.size : _HEAD.size + length])
        return _rebuild(head, view[-(-(_HEAD.size + length) // ALIGN) * ALIGN :])
    except (struct.error, msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"These bytes are no packed sample: {error}.") from error


def _describe(value: Any, add: Any, place: str) -> list[Any]:
    kind = type(value)
    if value is None or kind in (bool, float) or _is_encodable(value):
        return ["v", value]
    if kind in (bytes, bytearray):
        return ["b", kind is bytearray, *add(value)]
    if kind in (tuple, list):
        parts = [_describe(part, add, f"{place}[{n}]") for n, part in enumerate(value)]
        return ["t" if kind is tuple else "l", parts]
    if kind is dict:
        pairs = []
        for key, part in value.items():
            if not _is_encodable(key):
                raise _cannot(key, f"a key of {place or 'the sample'}")
            pairs.append([key, _describe(part, add, f"{place}[{key!r}]")])
        return ["d", pairs]
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and kind is torch.Tensor:
        return _describe_tensor(torch, value, add, place)
    if is_named_tuple(kind):
        origin, fields = named_tuple_place(value, place), value._fields
        members = zip(fields, value, strict=True)
        parts = [_describe(part, add, f"{place}.{name}") for name, part in members]
        return ["c", *origin, list(fields), parts]
    if torch is not None and is_tv_tensor(kind):
        plain = _describe_tensor(torch, value.as_subclass(torch.Tensor), add, place)
        return ["k", *describe_tv_tensor(value, place), plain]
    if torch is not None and isinstance(value, torch.Tensor):
        raise CannotPackError(
            f"{_cannot(value, place or 'the sample')}, a class derived from torch.Tensor that may "
            "have attributes of its own; return a plain tensor: tensor.as_subclass(torch.Tensor)"
        )
    if numpy is not None and kind is numpy.ndarray and value.dtype.kind in "biufc":
        flat = numpy.ascontiguousarray(value).reshape(-1)
        return ["n", value.dtype.str, list(value.shape), *add(flat.view(numpy.uint8))]
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
        return ["s", value.dtype.str, *add(value.tobytes())]
    if is_image(kind):
        facts, pixels = describe_image(value, place or "the sample", _is_plain)
        return ["p", *facts, *add(pixels)]
    raise _cannot(value, place or "the sample")


def _is_plain(value: Any) -> bool:
    """Whether a value can be packed without bytes of its own: numbers, texts, and those in tuples,
    lists and dicts.
    """
    kind = type(value)
    if kind in (tuple, list):
        return all(map(_is_plain, value))
    return value is None or kind in (bool, float, bytes) or _is_encodable(value)


def _is_encodable(value: Any) -> bool:
    """Whether a value is an integer or a text that msgpack has a form for. A text with half of a
    character (a surrogate) has none, such as a file name that is not UTF-8.
    """
    kind = type(value)
    if kind is int:
        return bool(-(2**63) <= value < 2**64)
    return kind is str and (value.isascii() or _is_utf8(value))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _describe_tensor(torch: Any, value: Any, add: Any, place: str) -> list[Any]:
    if (
        value.device.type != "cpu"
        or value.layout is not torch.strided
        or value.requires_grad
        or value.is_quantized
    ):
        raise CannotPackError(
            f"{place or 'the sample'} is a tensor that is not a plain one in the memory of the "
            "processor (it is on a GPU, sparse, quantized, or needs a gradient)"
        )
    flat = value.detach().contiguous().reshape(-1).resolve_conj().resolve_neg()
    data = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return ["x", str(value.dtype).removeprefix("torch."), list(value.shape), *add(data)]


def _cannot(value: Any, place: str) -> CannotPackError:
    kind = type(value)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    if kind is str:
        return CannotPackError(
            f"{place} is a text with half of a character (a surrogate), as file names that are not "
            "UTF-8 have; return its bytes: os.fsencode(name)"
        )
    return CannotPackError(f"{place} is of type {name}")


def _rebuild(head: Sequence[Any], data: memoryview) -> Any:
    tag = head[0]
    if tag == "v":
        return head[1]
    if tag == "t":
        return tuple([_rebuild(part, data) for part in head[1]])
    if tag == "l":
        return [_rebuild(part, data) for part in head[1]]
    if tag == "d":
        return {key: _rebuild(part, data) for key, part in head[1]}
    if tag == "c":
        tuple_class = named_tuple_class(head[1], head[2], tuple(head[3]))
        return tuple.__new__(tuple_class, [_rebuild(part, data) for part in head[4]])
    if tag == "k":
        return rebuild_tv_tensor(head[1], head[2], _rebuild(head[3], data))
    offset, length = head[-2:]
    piece = data[offset : offset + length]
    if len(piece) != length:
        raise ValueError("These bytes are no packed sample: they end too early.")
    if tag == "x":
        import torch

        dtype, shape = getattr(torch, head[1]), head[2]
        if not length:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(piece, dtype=dtype).reshape(shape)
    if tag == "b":
        return bytearray(piece) if head[1] else bytes(piece)
    if tag == "p":
        return rebuild_image(head[1:-2], bytes(piece))
    import numpy

    if tag == "n":
        return numpy.frombuffer(piece, dtype=head[1]).reshape(head[2])
    if tag == "s":
        return numpy.frombuffer(piece, dtype=head[1])[0]
    raise ValueError(f"These bytes are no packed sample: they have a part {tag!r}.")
