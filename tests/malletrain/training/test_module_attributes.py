"""Attributes of modules that no state includes: numbers are saved, and others that change are
named.
"""

import math
from collections import deque

import numpy
import pytest
import torch
from torch import nn

import malletrain
from malletrain import Snapshot
from malletrain.elastic.state import Holder
from malletrain.elastic.training import StateBeforeStep
from malletrain.training import report, snapshot_file
from malletrain.training.module_attributes import ModuleAttributes, ModuleNumbers
from malletrain.training.objects import after_epoch_fingerprint
from tests.malletrain.training.worker_side import as_plain_script


@pytest.fixture(autouse=True)
def _nothing_is_told_yet():
    report.sentence_keys.clear()


class Net(nn.Module):
    """Has one attribute of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.center = torch.zeros(2)
        self.inner.outputs = []
        self.window = deque(maxlen=2)
        self.counts = {}
        self.running = numpy.zeros(2)
        self.step = 0
        self.fixed = [1, 2]


CHANGES = {
    "net.center": lambda net: net.center.add_(1),
    "net.inner.outputs": lambda net: net.inner.outputs.append(torch.ones(1)),
    "net.window": lambda net: net.window.append(object()),
    "net.counts": lambda net: net.counts.update(a=1),
    "net.running": lambda net: numpy.add(net.running, 1, out=net.running),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_named(name):
    net = Net()
    attributes = ModuleAttributes("Snapshot", {"net": net})
    CHANGES[name](net)
    assert attributes.changed() == [name]


def test_a_tensor_in_place_of_another_is_named():
    net = Net()
    attributes = ModuleAttributes("Snapshot", {"net": net})
    net.center = net.center * 0.9
    assert attributes.changed() == ["net.center"]


def test_a_full_window_that_moves_is_named():
    net = Net()
    net.window.extend([object(), object()])
    attributes = ModuleAttributes("Snapshot", {"net": net})
    net.window.append(object())
    assert attributes.changed() == ["net.window"]


def test_what_a_state_includes_is_not_named():
    net = Net()
    attributes = ModuleAttributes("Snapshot", {"net": net}, without=["counts"])
    net.mean.add_(1)
    net.step += 1
    net.counts["a"] = 1
    with torch.no_grad():
        net.inner.weight.add_(1)
    assert attributes.changed() == []


def test_a_weight_that_each_forward_pass_computes_is_not_named():
    net = nn.utils.spectral_norm(nn.Linear(2, 2))
    attributes = ModuleAttributes("Snapshot", {"net": net})
    with torch.no_grad():
        net(torch.ones(1, 2))
    assert attributes.changed() == []


def test_an_output_of_an_evaluation_is_named_and_saves_go_on(tmp_path, capsys):
    """A tensor that was made in inference mode has no count of changes."""
    net = Net()
    snapshot = malletrain.Snapshot(tmp_path / "run.pt", every_s=0.0, net=net)
    snapshot.restore()
    with torch.inference_mode():
        net.last = net.inner(torch.ones(1, 2))
    snapshot.step()
    assert snapshot.save()
    log = capsys.readouterr().err
    assert "Snapshot does not save net.last: " in log
    assert "could not be" not in log


@pytest.mark.parametrize("at_start", [True, False])
def test_attributes_that_cannot_be_read_stop_nothing(capsys, at_start):
    class Odd(nn.Module):
        broken = at_start

        def named_modules(self, *args, **kwargs):
            if self.broken:
                raise RuntimeError("not yet")
            return super().named_modules(*args, **kwargs)

    net = Odd()
    net.outputs = []
    attributes = ModuleAttributes("Snapshot", {"net": net})
    net.outputs.append(1)
    net.broken = not at_start
    attributes.tell_changed()
    net.broken = False
    attributes.tell_changed()
    assert "does not save" not in capsys.readouterr().err


def test_a_snapshot_names_them_once(tmp_path, capsys):
    net = Net()
    snapshot = malletrain.Snapshot(tmp_path / "run.pt", every_s=0.0, net=net)
    snapshot.restore()
    for _ in range(2):
        net.center = net.center + 1
        snapshot.step()
        snapshot.save()
    log = capsys.readouterr().err
    assert log.count("Snapshot does not save net.center: ") == 1


def test_a_state_for_a_joiner_names_them(capsys):
    """A run in live mode may have no snapshot."""
    net = Net()
    holder = Holder({"net": net}, torch.device("cpu"))
    net.center.add_(1)
    holder.pack({}, for_peer=False)
    assert "does not save" not in capsys.readouterr().err
    holder.pack({})
    assert "elastic.Run does not save net.center: " in capsys.readouterr().err


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
    before = after_epoch_fingerprint({"model": model})
    assert after_epoch_fingerprint({"model": model}) == before
    model.drop.p = 0.1
    assert after_epoch_fingerprint({"model": model}) != before


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
