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


class Table(nn.Module):
    """A table that grows with the sequences, as in a rotary embedding."""

    def __init__(self):
        super().__init__()
        self.table(4)

    def table(self, length):
        self.length = length
        self.register_buffer("angles", torch.arange(length) * 0.1, persistent=False)

    def forward(self, length):
        if length > self.length:
            self.table(length)
        return self.angles[:length]


class LazyTable(nn.Module):
    """A table that is computed for each new length."""

    def __init__(self):
        super().__init__()
        self.length = self.angles = None

    def forward(self, length):
        if length != self.length:
            self.length, self.angles = length, torch.arange(length) * 0.1
        return self.angles[:length]


class LazyTables(nn.Module):
    """Two tables in a list, of more rows than are asked for."""

    def __init__(self):
        super().__init__()
        self.length, self.tables = 0, None

    def forward(self, length):
        if length > self.length:
            self.length = 2 * length
            self.tables = [torch.arange(self.length) * 0.1, torch.ones(self.length)]
        return self.tables[0][:length] * self.tables[1][:length]


class FilledTable(nn.Module):
    """A table of a fixed size that is filled from its beginning."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.zeros(32), persistent=False)
        self.filled = 0

    def forward(self, length):
        if length > self.filled:
            self.angles[:length] = torch.arange(length) * 0.1
            self.filled = length
        return self.angles[:length]


class Frequencies(nn.Module):
    """Frequencies that depend on the longest sequence so far."""

    def __init__(self):
        super().__init__()
        self.longest = 4
        self.register_buffer("frequency", torch.tensor([0.1]), persistent=False)

    def forward(self, length):
        if length > self.longest:
            self.longest = length
            self.register_buffer("frequency", torch.tensor([0.4 / length]), persistent=False)
        return torch.arange(length) * self.frequency


class BiasOnce(nn.Module):
    """A bias that the first forward pass computes."""

    def __init__(self):
        super().__init__()
        self.is_ready, self.bias = False, None

    def forward(self, length):
        if not self.is_ready:
            self.is_ready, self.bias = True, torch.arange(32) * 0.1
        return self.bias[:length]


TABLES = [Table, LazyTable, LazyTables, FilledTable, Frequencies, BiasOnce]


@pytest.mark.parametrize("make", TABLES)
@pytest.mark.usefixtures("plain")
def test_a_number_beside_a_cache_that_is_in_no_state_is_that_of_the_process(make, tmp_path, capsys):
    report.sentence_keys.clear()
    model = nn.Sequential(make())
    snapshot = Snapshot(tmp_path / "x.pt", model=model)
    snapshot.restore()
    model(16)
    assert snapshot.save()
    assert "model.0." in capsys.readouterr().err
    other, undisturbed = nn.Sequential(make()), nn.Sequential(make())
    assert Snapshot(tmp_path / "x.pt", model=other).restore()
    for length in (16, 8, 20):
        assert other(length).tolist() == undisturbed(length).tolist()


class Counter(nn.Module):
    """Numbers that belong to the state, beside tensors that no state includes."""

    def __init__(self):
        super().__init__()
        self.updates, self.temperature, self.is_started = 0, 1.0, False
        self.weight = nn.Parameter(torch.zeros(2))

    def step(self):
        self.updates, self.temperature = self.updates + 3, self.temperature * 0.5


class WithConstant(Counter):
    def __init__(self):
        super().__init__()
        self.largest = torch.tensor([25.0, 1.0, 1.0])  # of as many elements as there are updates
        self.register_buffer("mask", torch.ones(3, 3).tril(), persistent=False)

    def step(self):
        super().step()
        self.is_started = True
        self.largest = self.largest.clone()  # as to(device) does
        self.mask.copy_(self.mask)  # as DistributedDataParallel does


class WithHidden(Counter):
    def __init__(self):
        super().__init__()
        self.hidden = torch.zeros(3, 2)

    def step(self):
        super().step()
        self.is_started = True
        self.hidden = self.hidden + 1


class WithMask(Counter):
    mask = None

    def step(self):
        super().step()
        self.mask = torch.ones(1, 8, 8).tril()


class WithOutputs(Counter):
    def __init__(self):
        super().__init__()
        self.outputs = []

    def step(self):
        super().step()
        self.is_started = True
        self.outputs = [*self.outputs, torch.ones(3)]


class WithOutput(Counter):
    def step(self):
        super().step()
        self.is_started = True
        self.output = torch.ones(3) * self.weight[0]


class WithStatistics(Counter):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def step(self):
        super().step()
        self.is_started = True
        self.mean = torch.ones(4)


@pytest.mark.parametrize(
    "make", [WithConstant, WithHidden, WithMask, WithOutputs, WithOutput, WithStatistics]
)
def test_a_counter_beside_a_tensor_that_it_does_not_describe_is_saved(make, capsys):
    report.sentence_keys.clear()
    model, other = nn.Sequential(make()), nn.Sequential(make())
    numbers = ModuleNumbers({"model": model})
    model[0].step()
    ModuleNumbers({"model": other}).restore(numbers.changed())
    assert (other[0].updates, other[0].temperature) == (3, 0.5)
    assert other[0].is_started == model[0].is_started
    assert capsys.readouterr().err == ""


def test_a_counter_that_may_be_a_size_is_named(capsys):
    report.sentence_keys.clear()
    model, other = WithMask(), WithMask()
    numbers = ModuleNumbers({"model": model})
    model.updates = 5
    model.step()
    ModuleNumbers({"model": other}).restore(numbers.changed())
    assert (other.updates, other.temperature) == (0, 0.5)
    assert (
        "model.updates is not saved, because it may describe model.mask" in capsys.readouterr().err
    )


def test_buffers_that_cannot_be_read_stop_nothing():
    model = nn.Linear(2, 2)
    model.register_buffer("absent", None, persistent=False)
    model.register_buffer("meta", torch.zeros(2, device="meta"), persistent=False)
    model.register_buffer("sparse", torch.zeros(2).to_sparse(), persistent=False)
    model.register_buffer(
        "quantized", torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), False
    )
    model.nested = torch.nested.nested_tensor([torch.zeros(2)])
    numbers = ModuleNumbers({"model": model})
    model.updates = 1
    assert numbers.changed() == {"model": {".updates": 1}}
