"""States as bytes: small tensors as numbers, everything else as torch pickles it."""

from __future__ import annotations

import pickle

import pytest
import torch

from malletrain.elastic.sharded import training


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(7.0),
        torch.tensor([0.1, float("inf"), -0.0]),
        torch.tensor([[2**53 + 1, -3]]),
        torch.tensor(1e-310, dtype=torch.float64),
        torch.arange(12.0).reshape(3, 4).t(),
    ],
)
def test_small_tensors_are_numbers_and_come_back_bit_for_bit(tensor):
    written = training.dumps({"state": [tensor]})
    again = pickle.loads(written)["state"][0]
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(again, tensor)
    assert torch.equal(torch.signbit(again), torch.signbit(tensor))
    assert b"_load_from_bytes" not in written


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(training.MAX_LISTED_ELEMENTS + 1),
        torch.zeros(0, 3),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_all_others_are_written_as_torch_does(tensor):
    again = pickle.loads(training.dumps(tensor))
    assert type(again) is type(tensor)
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(again, tensor)
    assert again.requires_grad is tensor.requires_grad


def test_a_tensor_that_is_there_twice_is_one():
    one = torch.tensor(1.0)
    first, second = pickle.loads(training.dumps((one, one)))
    assert first is second
