"""Where the numbers lie in what torch.save made of a tensor."""

import io

import pytest
import torch

from malletrain.training.shard_reader import HEAD, locate


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 5), (0, 4), (2, 3, 4, 5), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
def test_they_are_where_it_says(shape, dtype):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    data = saved(tensor)
    location = locate(data[:HEAD], len(data), dtype.itemsize)
    assert location is not None
    assert location.shape == shape
    numbers = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert data[location.start : location.start + len(numbers)] == numbers


def test_what_is_cut_off_or_too_short_is_not_found():
    data = saved(torch.arange(100.0))
    location = locate(data[:HEAD], len(data), 4)
    assert location is not None
    for end in range(location.start - 64):
        assert locate(data[:end], len(data), 4) is None
    assert locate(data[:HEAD], location.start + 399, 4) is None


@pytest.mark.parametrize(
    "value",
    [
        {"a": torch.ones(3)},
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[2:6],
        torch.ones(1).expand(5),
        torch.arange(3).to(torch.uint16),
        torch.nn.Parameter(torch.ones(3)),
        [1, 2],
    ],
)
def test_anything_else_is_not_taken_for_a_plain_tensor(value):
    data = saved(value)
    assert locate(data[:HEAD], len(data), 4) is None


def test_neither_is_the_older_format_nor_another_kind_of_file():
    data = saved(torch.ones(3), _use_new_zipfile_serialization=False)
    assert locate(data[:HEAD], len(data), 4) is None
    assert locate(b"PK\x03\x04" * 200, 800, 4) is None
    assert locate(b"", 0, 4) is None
