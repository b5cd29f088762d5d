"""What goes in comes out: the same values of the same types, at the same alignment.

Named tuples, images of PIL and tensors of torchvision: what comes back is equal, or it is
refused with what to do.
"""

from __future__ import annotations

import io
import sys
from collections import namedtuple
from enum import Enum
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from malletrain.datacache.packing import (
    IMAGE_MODES,
    CannotPackError,
    ClassNotImportedError,
    pack,
    unpack,
)

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=12)
    | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other, strict=True)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert one == other


class Pair(NamedTuple):
    image: object
    label: object


@given(PLAIN)
def test_plain_values(sample):
    same(unpack(bytearray(pack(sample))), sample)


@pytest.mark.parametrize(
    "sample",
    [
        (torch.arange(12, dtype=torch.uint8).reshape(3, 4), 7),
        {
            "x": torch.linspace(-1, 1, 24).reshape(2, 3, 4),
            "y": torch.tensor(3),
            "empty": torch.empty(0, 5),
        },
        torch.arange(6).reshape(2, 3).t(),
        torch.linspace(-1, 1, 5).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, -0.5j, 3], dtype=torch.complex64).conj(),
        [np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(1.5), np.int64(-3)],
        (np.zeros((0, 3)), np.array(2.5), np.asfortranarray(np.arange(6.0).reshape(2, 3))),
        (b"jpeg", bytearray(b"png"), "label", None),
        Pair(torch.arange(3), Pair(np.arange(2), [Pair("a", 1)])),
    ],
    ids=[
        *("integers", "dict", "transposed", "bfloat16", "booleans", "complex"),
        *("arrays in a list", "arrays in a tuple", "texts and bytes", "named tuples"),
    ],
)
def test_tensors_arrays_and_bytes(sample):
    same(unpack(bytearray(pack(sample))), sample)


def test_a_tensor_is_a_view_of_the_packed_bytes_and_aligned():
    data = bytearray(pack(("a text", torch.zeros(4, dtype=torch.float64))))
    tensor = unpack(data)[1]
    assert tensor.data_ptr() % 8 == 0
    tensor += 1.0
    assert unpack(data)[1].tolist() == [1.0] * 4


class MyTensor(torch.Tensor):
    """Would come out as a plain tensor."""


@pytest.mark.parametrize(
    ("sample", "sentence"),
    [
        (object(), "the sample is of type object"),
        ({"image": (1, {2})}, r"\['image'\]\[1\] is of type set"),
        (torch.zeros(2).as_subclass(MyTensor), r"of type .*MyTensor, .*return a plain tensor"),
        (torch.nn.Parameter(torch.zeros(2)), r"of type .*Parameter, a class derived from"),
        (Pair(1, {2}), r"\.label is of type set"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.zeros(2, requires_grad=True), "gradient"),
        (2**64, "of type int"),
        ({2**64: 1}, "a key of the sample is of type int"),
        ((b"jpeg", "caf\udce9.jpg"), r"\[1\] is a text with half of a character .*os\.fsencode"),
        ({"\udce9": 1}, "a key of the sample is a text with half of a character"),
        (np.array(["a"]), "of type numpy.ndarray"),
        ({None: 1}, "a key of the sample is of type NoneType"),
    ],
)
def test_other_types_are_refused_by_place_and_name(sample, sentence):
    with pytest.raises(CannotPackError, match=sentence):
        pack(sample)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_sample_are_an_error_of_values(data):
    try:
        unpack(bytearray(data))
    except ValueError:
        pass


def test_a_sample_that_is_cut_short_is_an_error():
    data = pack((torch.zeros(8), 1))
    for end in (0, 3, 10, len(data) - 1):
        with pytest.raises(ValueError, match="no packed sample"):
            unpack(bytearray(data[:end]))


def again(sample):
    return unpack(bytearray(pack(sample)))


# --- named tuples ---


class Extended(Pair):
    """A derived class, whose objects can have attributes."""


class Outer:
    class Inner(NamedTuple):
        value: int


def test_a_named_tuple_comes_back_as_its_class():
    sample = Pair(torch.arange(3), Outer.Inner(7))
    image, label = back = again(sample)
    assert type(back) is Pair
    assert image.tolist() == [0, 1, 2]
    assert type(label) is Outer.Inner
    assert label == Outer.Inner(7)
    assert type(again(Extended(1, 2))) is Extended


def test_named_tuples_that_would_not_come_back_are_refused():
    Local = namedtuple("Local", "value")
    with_attribute = Extended(1, 2)
    with_attribute.weight = 3
    for sample, words in (
        (Local(1), r"Local, a named tuple whose class cannot be imported by that name"),
        (with_attribute, r"Extended, a named tuple with more than its fields"),
    ):
        with pytest.raises(CannotPackError, match=words):
            pack((0, sample))


def test_a_class_is_looked_for_where_it_is_imported_already_and_nowhere_else(monkeypatch):
    """Unpacking imports nothing, and takes no class of other fields for this one."""
    module = ModuleType("some_data")
    module.Row = namedtuple("Row", "a b", module="some_data")
    monkeypatch.setitem(sys.modules, "some_data", module)
    data = pack(module.Row(1, 2))
    assert unpack(bytearray(data)) == (1, 2)
    module.Row = namedtuple("Row", "a c", module="some_data")
    with pytest.raises(ClassNotImportedError, match="Row with the fields a, b is not imported"):
        unpack(bytearray(data))
    module.Row = print
    with pytest.raises(ClassNotImportedError):
        unpack(bytearray(data))
    monkeypatch.delitem(sys.modules, "some_data")
    with pytest.raises(ClassNotImportedError):
        unpack(bytearray(data))


# --- images ---


def same_image(one, other):
    assert type(other) is Image.Image
    assert (one.mode, one.size, one.format, one.info) == (
        other.mode,
        other.size,
        other.format,
        other.info,
    )
    assert one.tobytes() == other.tobytes()
    assert one.getpalette(None) == other.getpalette(None)


def noise(mode, size=(9, 5)):
    """Random pixels, of any mode."""
    blank = Image.new(mode, size)
    length = len(blank.tobytes())
    pixels = bytes(torch.randint(0, 256, (length,), dtype=torch.uint8).tolist())
    return Image.frombytes(mode, size, pixels)


@pytest.mark.parametrize("mode", sorted(IMAGE_MODES))
def test_images_of_each_mode(mode):
    image = Image.effect_noise((9, 5), 80) if mode in ("1", "F") else noise(mode)
    image = image.convert(mode) if mode in ("1", "F") else image
    image.info["dpi"], image.info["icc"] = (72, 72.5), b"profile"
    back, label = again((image, 3))
    same_image(image, back)
    assert label == 3


@pytest.mark.parametrize("palette_mode", ["RGB", "RGBA"])
def test_palettes_and_their_transparency(palette_mode):
    image = Image.effect_noise((9, 5), 80).convert("P")
    colours = bytes(torch.randint(0, 256, (4 * 64,), dtype=torch.uint8).tolist())
    image.putpalette(colours, palette_mode)
    image.info["transparency"] = 3
    back = again(image)
    same_image(image, back)
    assert back.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "GIF", "TIFF", "BMP", "WEBP"])
def test_an_image_as_it_is_opened_comes_back_as_a_plain_one(file_format):
    file = io.BytesIO()
    exif = Image.Exif()
    if file_format in ("PNG", "JPEG", "WEBP"):
        exif[0x0112] = 6  # turned by 90 degrees
    Image.effect_noise((9, 5), 80).convert("RGB").save(file, file_format, exif=exif)
    image = Image.open(io.BytesIO(file.getvalue()))
    back = again(image)
    assert type(back) is Image.Image
    assert (back.mode, back.size, back.format) == (image.mode, image.size, file_format)
    assert back.tobytes() == image.tobytes()
    assert back.convert("RGB").tobytes() == image.convert("RGB").tobytes()
    turned = ImageOps.exif_transpose(back)
    assert turned.tobytes() == ImageOps.exif_transpose(image).tobytes()


def saved(file_format, **options):
    file = io.BytesIO()
    Image.effect_noise((9, 5), 80).save(file, file_format, **options)
    return Image.open(io.BytesIO(file.getvalue()))


def orientation(number):
    exif = Image.Exif()
    exif[0x0112] = number
    return exif


def truncated():
    file = io.BytesIO()
    Image.effect_noise((90, 50), 80).save(file, "PNG")
    return Image.open(io.BytesIO(file.getvalue()[:-600]))


def not_turned():
    """As a version of PIL loads a TIFF that leaves the orientation in its tags."""
    image = saved("PNG", exif=orientation(6))
    image.tag_v2 = {}
    return image


class MyImage(Image.Image):
    """May have anything."""


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            lambda: saved("GIF", save_all=True, append_images=[Image.new("L", (9, 5))]),
            r"several frames; return the frame: image.copy\(\)",
        ),
        (not_turned, "a TIFF file with an orientation; return ImageOps"),
        (truncated, "an image that cannot be read"),
        (lambda: Image.new("I;16N", (3, 3)), "of mode 'I;16N'; return image.convert"),
        (MyImage, r"is of type .*MyImage"),
    ],
    ids=["frames", "orientation", "truncated", "mode", "derived"],
)
def test_images_that_would_not_come_back_are_refused(made, words):
    with pytest.raises(CannotPackError, match=words):
        pack({"image": made()})


def test_a_tiff_with_an_orientation_comes_back_turned():
    """As PIL loads it."""
    back = again(saved("TIFF", exif=orientation(6)))
    turned = ImageOps.exif_transpose(saved("TIFF", exif=orientation(6)))
    assert ImageOps.exif_transpose(back).size == turned.size == (5, 9)


def test_what_of_info_is_no_plain_value_is_left_out():
    image = Image.new("L", (2, 2))
    image.info.update(made=object(), dpi=(72, 72), frames=[1, (2, b"x")])
    assert again(image).info == {"dpi": (72, 72), "frames": [1, (2, b"x")]}


# --- tensors of torchvision ---

REASON = "torchvision is no dependency, and its builds fit one version of torch each"


class BoundingBoxFormat(Enum):
    XYXY = "XYXY"
    CXCYWH = "CXCYWH"


class ImitatedTensor(torch.Tensor):
    def __new__(cls, data):
        return torch.as_tensor(data).as_subclass(cls)


class ImitatedBoxes(torch.Tensor):
    def __new__(cls, data, *, format, canvas_size, clamping_mode="soft"):
        boxes = torch.as_tensor(data).as_subclass(cls)
        boxes.format = BoundingBoxFormat[format] if isinstance(format, str) else format
        boxes.canvas_size, boxes.clamping_mode = canvas_size, clamping_mode
        return boxes


@pytest.fixture(params=["installed", "imitated"])
def tv_tensors(request, monkeypatch):
    """``torchvision.tv_tensors``, or classes with the same attributes."""
    if request.param == "installed":
        return pytest.importorskip("torchvision.tv_tensors", reason=REASON)
    package, module = ModuleType("torchvision"), ModuleType("torchvision.tv_tensors")
    for name in ("Image", "Mask", "Video"):
        setattr(module, name, type(name, (ImitatedTensor,), {}))
    module.BoundingBoxes = type("BoundingBoxes", (ImitatedBoxes,), {})
    module.BoundingBoxFormat = BoundingBoxFormat
    package.tv_tensors = module
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.tv_tensors", module)
    return module


@pytest.mark.parametrize("name", ["Image", "Mask", "Video"])
def test_tensors_of_torchvision_come_back_as_their_class(tv_tensors, name):
    tensor = getattr(tv_tensors, name)(torch.arange(24, dtype=torch.uint8).reshape(2, 3, 2, 2))
    data = bytearray(pack({"image": tensor}))
    back = unpack(data)["image"]
    assert type(back) is type(tensor)
    assert torch.equal(back, tensor)
    back += 1
    assert unpack(data)["image"][0, 0, 0, 0] == 1, "a view of the packed bytes"


@pytest.mark.parametrize("box_format", ["XYXY", "CXCYWH"])
@pytest.mark.parametrize("boxes", [0, 2])
def test_boxes_come_back_with_their_format_and_canvas(tv_tensors, box_format, boxes):
    sample = tv_tensors.BoundingBoxes(
        torch.arange(4.0 * boxes).reshape(boxes, 4),
        format=box_format,
        canvas_size=torch.zeros(30, 40).shape,
    )
    back = again((sample, 3))[0]
    assert type(back) is tv_tensors.BoundingBoxes
    assert torch.equal(back, sample)
    assert back.__dict__ == sample.__dict__
    assert back.format is tv_tensors.BoundingBoxFormat[box_format]
    assert back.canvas_size == (30, 40)


def test_tensors_of_torchvision_that_would_lose_something_are_refused(tv_tensors):
    image = tv_tensors.Image(torch.zeros(3, 2, 2))
    image.path = "a.png"
    with pytest.raises(CannotPackError, match="with the attribute path, which would be lost"):
        pack(image)
    derived = type("MyTensor", (tv_tensors.Image,), {})
    with pytest.raises(CannotPackError, match=r"MyTensor, a class derived from torch\.Tensor"):
        pack(torch.zeros(3, 2, 2).as_subclass(derived))


def test_without_torchvision_its_tensors_are_an_error_of_values(monkeypatch):
    """A process that cannot import it reads the sample from the data set."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.tv_tensors", None)
    data = pack((1, torch.zeros(2)))
    assert unpack(bytearray(data))[0] == 1, "others need it not"
    from malletrain.datacache.packing import rebuild_tv_tensor

    with pytest.raises(ClassNotImportedError, match="torchvision cannot be imported"):
        rebuild_tv_tensor("Image", [], torch.zeros(2))
