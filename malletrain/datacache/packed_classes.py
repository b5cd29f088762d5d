"""Packs objects of classes of other packages for the data cache: named tuples, images of PIL, and
tensors of ``torchvision.tv_tensors``.

Decides for each class what is stored, such that an unpacked object equals the packed one. Refuses
other objects with a sentence that says what to return instead. Imports none of these packages: a
class is looked up in the modules that the data set has already imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any


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
