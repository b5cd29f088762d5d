"""What goes in comes out: the same values of the same types, at the same alignment."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from malletrain.datacache.packed_classes import CannotPackError
from malletrain.datacache.packing import pack, unpack

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
