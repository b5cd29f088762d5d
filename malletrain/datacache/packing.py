"""Samples as bytes: tensors, arrays, images, numbers, texts and bytes, in tuples, named tuples,
lists and dicts.

Decides the format. A packed sample is a description (msgpack) followed by the bytes of each array,
aligned so that an array can be used in place. Unlike with pickle, unpacking executes no code of the
sample: a class that a sample names is looked up in the modules that are already imported. Other
types cannot be packed, because the cache would return another type than the data set.

Of the classes of other packages named tuples, images of PIL, and tensors of
``torchvision.tv_tensors`` can be packed. Decides for each class what is stored, such that an
unpacked object equals the packed one. Refuses other objects with a sentence that says what to
return instead. Imports none of these packages: a class is looked up in the modules that the data
set has already imported.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec


class CannotPackError(TypeError):
    """A sample has a part that cannot be packed; the message says which, and what to do."""


class ClassNotImportedError(ValueError):
    """A packed sample has a class that this process has not imported."""


# --- named tuples ---


def is_named_tuple(kind: type) -> bool:
    """Return whether ``kind`` is a class of named tuples."""
    fields = getattr(kind, "_fields", None)
    return issubclass(kind, tuple) and type(fields) is tuple and fields != ()


def named_tuple_place(value: Any, place: str) -> tuple[str, str]:
    """Return the module and the name of the class of a named tuple.

    Args:
        value: the named tuple.
        place: where it is in the sample; empty: it is the sample.

    Raises:
        CannotPackError: its class cannot be imported, or it has attributes beside its fields.
    """
    kind = type(value)
    module, name = kind.__module__, kind.__qualname__
    where = f"{place or 'the sample'} is of type {module}.{name}, a named tuple"
    if _imported(module, name) is not kind:
        raise CannotPackError(
            f"{where} whose class cannot be imported by that name; define it at the top level of "
            "a module"
        )
    if getattr(value, "__dict__", None) or len(value) != len(value._fields):
        raise CannotPackError(f"{where} with more than its fields; return its fields only")
    return module, name


def named_tuple_class(module: str, name: str, fields: tuple[str, ...]) -> Any:
    """Return the class of a named tuple.

    Raises:
        ClassNotImportedError: this process has not imported it, or it has other fields here.
    """
    kind = _imported(module, name)
    is_class = isinstance(kind, type) and is_named_tuple(kind)
    if not is_class or getattr(kind, "_fields", ()) != fields:
        raise ClassNotImportedError(
            f"The named tuple {module}.{name} with the fields {', '.join(fields)} is not imported."
        )
    return kind


def _imported(module: str, name: str) -> Any:
    """Return the item ``name`` of a module that is already imported; None if there is none. Looks
    only into ``__dict__``, so that a module that imports its items lazily imports nothing.
    """
    item: Any = sys.modules.get(module)
    for part in name.split("."):
        item = getattr(item, "__dict__", {}).get(part)
    return item


# --- images of PIL ---

IMAGE_MODES = frozenset(
    (
        *("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr"),
        *("LAB", "HSV", "I", "F", "I;16", "I;16L", "I;16B"),
    )
)
"""Modes of images that their size, pixels and palette describe."""
_ORIENTATION = 0x0112
"""EXIF tag of the orientation."""


def is_image(kind: type) -> bool:
    """Return whether ``kind`` is ``PIL.Image.Image``, or a class of what ``PIL.Image.open``
    returns.
    """
    plain, file = _imported("PIL.Image", "Image"), _imported("PIL.ImageFile", "ImageFile")
    return kind is plain or (file is not None and issubclass(kind, file))


def describe_image(
    image: Any, place: str, is_plain: Callable[[Any], bool]
) -> tuple[list[Any], bytes]:
    """Return what :func:`rebuild_image` needs: facts, and the pixels.

    Args:
        image: the image.
        place: where it is in the sample.
        is_plain: whether a value of the image's ``info`` can be packed. Others are left out.

    Raises:
        CannotPackError: the image cannot be read, or it is more than its pixels.
    """
    try:
        image.load()
    except (OSError, SyntaxError, ValueError) as error:
        raise CannotPackError(f"{place} is an image that cannot be read ({error})") from error
    if image.mode not in IMAGE_MODES:
        raise CannotPackError(
            f"{place} is an image of mode {image.mode!r}; return image.convert('RGB')"
        )
    if getattr(image, "is_animated", False):
        raise CannotPackError(
            f"{place} is an image file with several frames; return the frame: image.copy()"
        )
    if hasattr(image, "tag_v2") and image.getexif().get(_ORIENTATION, 1) != 1:
        raise CannotPackError(
            f"{place} is a TIFF file with an orientation; return ImageOps.exif_transpose(image)"
        )
    palette = None
    if image.palette is not None:
        mode = image.im.getpalettemode()
        palette = [mode, image.im.getpalette(mode, mode)]
    info = [
        [key, _plain(value)]
        for key, value in image.info.items()
        if type(key) is str and is_plain(value)
    ]
    return [image.mode, list(image.size), palette, image.format, info], image.tobytes()


def rebuild_image(facts: Sequence[Any], pixels: bytes) -> Any:
    """Return the image of :func:`describe_image`, as a plain ``PIL.Image.Image``."""
    from PIL import Image

    mode, size, palette, image_format, info = facts
    image = Image.frombytes(mode, tuple(size), pixels)
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    image.format = image_format
    image.info = {key: _value(value) for key, value in info}
    return image


def _plain(value: Any) -> Any:
    """Return a value of ``info`` such that msgpack keeps its type: tuples are marked."""
    if type(value) in (tuple, list):
        return [type(value) is tuple, [_plain(part) for part in value]]
    return value


def _value(packed: Any) -> Any:
    if type(packed) is list:
        parts = [_value(part) for part in packed[1]]
        return tuple(parts) if packed[0] else parts
    return packed


# --- tensors of torchvision ---

TV_TENSORS = "torchvision.tv_tensors"
_WITHOUT_ATTRIBUTES = ("Image", "Mask", "Video")
_BOX_ATTRIBUTES = frozenset(("format", "canvas_size", "clamping_mode"))
"""Attributes of BoundingBoxes; the last one since torchvision 0.23."""


def is_tv_tensor(kind: type) -> bool:
    """Return whether ``kind`` is a class of ``torchvision.tv_tensors`` that can be packed."""
    return any(
        kind is _imported(TV_TENSORS, name) for name in (*_WITHOUT_ATTRIBUTES, "BoundingBoxes")
    )


def describe_tv_tensor(tensor: Any, place: str) -> tuple[str, list[Any]]:
    """Return the class and the attributes of a tensor of torchvision.

    Args:
        tensor: the tensor.
        place: where it is in the sample; empty: it is the sample.

    Raises:
        CannotPackError: it has attributes that would be lost.
    """
    name, attributes = type(tensor).__name__, dict(tensor.__dict__)
    expected = _BOX_ATTRIBUTES if name == "BoundingBoxes" else frozenset[str]()
    if unknown := sorted(attributes.keys() - expected):
        raise CannotPackError(
            f"{place or 'the sample'} is of type {TV_TENSORS}.{name} with the attribute "
            f"{unknown[0]}, which would be lost; return it beside the tensor"
        )
    if name in _WITHOUT_ATTRIBUTES:
        return name, []
    return name, [
        attributes["format"].name,
        list(attributes["canvas_size"]),
        [attributes["clamping_mode"]] if "clamping_mode" in attributes else [],
    ]


def rebuild_tv_tensor(name: str, facts: Sequence[Any], tensor: Any) -> Any:
    """Return the tensor of :func:`describe_tv_tensor`, as a view of ``tensor``.

    Raises:
        ClassNotImportedError: torchvision is not installed.
    """
    try:
        from torchvision import tv_tensors
    except ImportError as error:
        raise ClassNotImportedError(f"torchvision cannot be imported ({error}).") from error
    if name in _WITHOUT_ATTRIBUTES:
        return tensor.as_subclass(getattr(tv_tensors, name))
    box_format, canvas_size, clamping = facts
    return tv_tensors.BoundingBoxes(
        tensor,
        format=tv_tensors.BoundingBoxFormat[box_format],
        canvas_size=tuple(canvas_size),
        **({"clamping_mode": clamping[0]} if clamping else {}),
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
