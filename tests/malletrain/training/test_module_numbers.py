"""Plain numbers of modules that change while a script trains."""

import math

import pytest
import torch
from torch import nn

from malletrain import Snapshot
from malletrain.elastic.state import Holder
from malletrain.elastic.training import StateBeforeStep
from malletrain.training import report
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


class Rotary(nn.Module):
    """A table of positions and its length, as in xformers and esm, and statistics with a flag."""

    def __init__(self):
        super().__init__()
        self.length_cached, self.table = None, None
        self.fitted, self.mean = False, torch.zeros(2)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("causal", torch.ones(2), persistent=False)

    def forward(self, x):
        if self.length_cached != len(x):
            self.length_cached, self.table = len(x), torch.arange(float(len(x)))
        if not self.fitted:
            self.mean, self.fitted = x.mean(0), True
        self.drop.p *= 0.5
        return (x - self.mean) * self.table[:, None]


def test_a_number_that_describes_an_unsaved_tensor_is_left_out(capsys):
    report.sentence_keys.clear()
    first, second = Rotary(), Rotary()
    numbers = ModuleNumbers({"net": first})
    x = torch.arange(6.0).reshape(3, 2)
    expected = first(x)
    assert numbers.changed() == {"net": {"drop.p": 0.25}}
    numbers.changed()
    log = capsys.readouterr().err
    assert (
        log.count("net.length_cached, net.fitted: not saved")
        + log.count("net.fitted, net.length_cached: not saved")
        == 1
    )
    after = ModuleNumbers({"net": second})
    after.restore({"net": {".length_cached": 3, "drop.p": 0.25}})  # of an older snapshot
    assert (second.length_cached, second.drop.p) == (None, 0.25)
    assert torch.equal(second(x), expected)


@pytest.mark.parametrize("tensor", ["mean", "causal"])
def test_a_tensor_that_moves_or_is_made_anew_has_not_changed(tensor):
    net = Rotary()
    numbers = ModuleNumbers({"net": net})
    setattr(net, tensor, getattr(net, tensor).double())
    net.fitted = True
    assert numbers.changed() == {"net": {".fitted": True}}
    getattr(net, tensor).add_(1)
    assert numbers.changed() == {}
    assert numbers.changed(for_this_process=True) == {"net": {".fitted": True}}


def test_a_detached_tensor_takes_no_temperature_and_no_counter_away():
    net = Rotary()
    net.temperature, net.count = 1.0, 0
    numbers = ModuleNumbers({"net": net})
    net.table, net.temperature, net.count = torch.ones(3, 5), 0.5, 7
    assert numbers.changed() == {"net": {".temperature": 0.5, ".count": 7}}
    net.count = 5  # may be the number of the table's columns
    assert numbers.changed() == {"net": {".temperature": 0.5}}
