"""Which boundaries are one: a process between them only computes with its own objects."""

from __future__ import annotations

import gc
import json
import sys
from contextlib import suppress

import pytest
import torch

from malletrain.protocol.flags import FlagsReader, FlagsWriter
from tests.zoo.cases import Zoo
from tests.zoo.catalogue import SCRIPTS
from tests.zoo.quiet import QUIET, Watch, groups
from tests.zoo.worker import preload, warm_up


def quiet_numbers(folder, function):
    """Numbers of the quiet points of a process that calls ``function`` between two. A collection of
    garbage there would call finalizers, and functions that libraries keep in ``gc.callbacks``.
    """
    watch = Watch(folder)
    gc.collect()
    gc.disable()
    try:
        watch(0)
        with suppress(ValueError):
            function()
        watch(1)
    finally:
        sys.setprofile(None)
        gc.enable()
    return json.loads((folder / QUIET).read_text())


def test_an_update_is_quiet(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.step()  # torch imports what it needs at the first one
    assert quiet_numbers(tmp_path, optimizer.step) == [1]


def test_a_write_to_a_file_is_not_quiet(tmp_path):
    with (tmp_path / "rows").open("w") as file:
        assert quiet_numbers(tmp_path, file.flush) == []


def test_a_look_at_the_flags_is_not_quiet(tmp_path):
    writer = FlagsWriter(str(tmp_path / "flags"))
    reader = FlagsReader(writer.path)
    assert quiet_numbers(tmp_path, reader.drain_request) == []
    writer.close()


def test_a_collective_is_not_quiet(tmp_path):
    assert quiet_numbers(tmp_path, torch.distributed.barrier) == []


def test_a_backward_pass_is_not_quiet(tmp_path):
    loss = torch.ones(1, requires_grad=True).sum()
    assert quiet_numbers(tmp_path, loss.backward) == []


def test_groups_of_boundaries():
    assert groups(["a", "b", "c", "d"], frozenset({1, 3})) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("name", "number", "together"),
    [("restart/epoch_scheduler", 2, 3), ("live/epoch_scheduler", 3, 2)],
)
def test_before_and_after_an_update_are_one_boundary(tmp_path, name, number, together):
    preload()
    warm_up()
    (outcome,) = Zoo(tmp_path).outcomes(SCRIPTS[name], "grow", every=1000, first=number)
    assert (outcome.boundary, outcome.boundaries) == ("before an update #2", together)
    assert not outcome.problems
