"""Plain numbers of modules that change while a script trains."""

import math

import numpy
import pytest
import torch
from torch import nn

from malletrain import Snapshot
from malletrain.elastic.state import Holder
from malletrain.elastic.training import StateBeforeStep
from malletrain.training import snapshot_file
from malletrain.training.module_numbers import ModuleNumbers
from malletrain.training.objects import schedule
from tests.malletrain.training.worker_side import as_plain_script


class Average(nn.Module):
    """A model as people write them: a size, a counter, a temperature in a part."""

    def __init__(self, size=2):
        super().__init__()
        self.layer, self.size, self.updates, self.seen = nn.Linear(size, 2), size, 0, math.nan
        self.drop = nn.Dropout(0.5)

    def train_on(self):
        """What a step changes."""
        self.updates += 1
        self.drop.p *= 0.5


@pytest.fixture
def plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


def test_what_changed_is_put_back_and_nothing_else():
    model = Average()
    numbers = ModuleNumbers({"model": model, "facts": {"step": 1}})
    assert numbers.changed() == {}
    model.train_on()
    model.eval()
    assert numbers.changed() == {"model": {".updates": 1, "drop.p": 0.25}}
    other = Average()
    other.size = 9  # the script's own, now
    wrapped = nn.DataParallel(torch.compile(other))
    ModuleNumbers({"model": wrapped}).restore(numbers.changed())
    assert (other.updates, other.drop.p, other.size, other.training) == (1, 0.25, 9, True)


@pytest.mark.parametrize("first", [1.0, numpy.float64(1.0), numpy.float32(1.0)])
def test_a_number_of_numpy_is_one_too(tmp_path, plain, first):
    """As a temperature that numpy.maximum() lowers; some are one from the beginning."""
    model, other = Average(), Average()
    model.temperature = other.temperature = first
    snapshot = Snapshot(tmp_path / "run.pt", model=model)
    snapshot.restore()
    model.temperature = numpy.maximum(model.temperature * numpy.exp(-0.5), 0.1)
    assert snapshot.save()
    numbers = snapshot_file.read(str(tmp_path / "run.pt"))["numbers"]
    assert type(numbers["model"][".temperature"]) is float
    assert Snapshot(tmp_path / "run.pt", model=other).restore()
    assert other.temperature == model.temperature
    assert isinstance(other.temperature, numpy.generic) == isinstance(first, numpy.generic)


def test_a_layer_that_is_frozen_stays_so():
    model, other = Average(), Average()
    numbers = ModuleNumbers({"model": model})
    model.layer.bias.requires_grad_(False)
    ModuleNumbers({"model": other}).restore(numbers.changed())
    assert [p.requires_grad for p in other.layer.parameters()] == [True, False]


def test_what_one_round_put_back_is_saved_by_the_next():
    first, second = Average(), Average()
    numbers = ModuleNumbers({"model": first})
    first.train_on()
    after = ModuleNumbers({"model": second})
    after.restore(numbers.changed())
    assert after.changed() == numbers.changed()


def test_one_that_changes_after_a_save_in_the_code_after_an_epoch_is_noticed():
    model = Average()
    before = schedule({"model": model})
    assert schedule({"model": model}) == before
    model.drop.p = 0.1
    assert schedule({"model": model}) != before


def test_parts_that_are_gone_are_left_out():
    numbers = ModuleNumbers({"model": nn.Linear(2, 2)})
    numbers.restore({"model": {"drop.p": 0.1}, "teacher": {".updates": 3}})


@pytest.mark.usefixtures("plain")
def test_a_snapshot_has_them(tmp_path):
    model = Average()
    snapshot = Snapshot(tmp_path / "x.pt", average=model)
    model.rank = 3  # between the two: of this process
    assert not snapshot.restore()
    model.train_on()
    snapshot.save()
    other = Average()
    assert Snapshot(tmp_path / "x.pt", average=other).restore()
    assert (other.updates, other.drop.p, hasattr(other, "rank")) == (1, 0.25, False)


def test_a_joiner_gets_them():
    device = torch.device("cpu")
    ours, theirs = Average(), Average()
    holder, joiner = Holder({"model": ours}, device), Holder({"model": theirs}, device)
    ours.train_on()
    packed, tensors = holder.pack({})
    joiner.restore(joiner.destinations(packed)[0], tensors)
    assert (theirs.updates, theirs.drop.p) == (1, 0.25)


def test_a_discarded_step_takes_them_back():
    model = Average()
    start = StateBeforeStep([model])
    start.keep()
    model.train_on()
    start.restore(())
    assert (model.updates, model.drop.p) == (0, 0.5)


def test_what_is_recorded_is_restored_after_parameters_were_forgotten_or_attributes_deleted():
    model = Average()
    start = StateBeforeStep([model])
    assert not start.restore(()), "nothing is recorded"
    start.keep()
    model.train_on()
    start.forget_parameters()
    start.restore(())
    assert (model.updates, model.drop.p) == (0, 0.5)
    start.keep()
    del model.updates
    start.keep()
    model.updates = 7
    start.restore(())
    assert not hasattr(model, "updates")


class Lazy(nn.Module):
    """A counter and a flag beside tensors that are in no state: a mask, and an output."""

    def __init__(self):
        super().__init__()
        self.passes, self.is_started = 0, False

    def forward(self, x):
        if not self.passes:
            self.register_buffer("mask", torch.ones(2, 2).tril(), persistent=False)
        self.passes += 1
        self.is_started = True
        self.last = x @ self.mask
        return self.last


@pytest.mark.parametrize("passes", [1, 2])  # 2: as many as the mask has rows
def test_numbers_beside_tensors_that_are_in_no_state_are_restored(passes):
    model, other, joiner = Lazy(), Lazy(), Lazy()
    numbers = ModuleNumbers({"model": model})
    holder, joining = (Holder({"model": m}, torch.device("cpu")) for m in (model, joiner))
    for _ in range(passes):
        model(torch.ones(1, 2))
    ModuleNumbers({"model": other}).restore(numbers.changed())
    packed, tensors = holder.pack({})
    joining.restore(joining.destinations(packed)[0], tensors)
    assert [(m.passes, m.is_started) for m in (other, joiner)] == [(passes, True)] * 2
