"""Attributes of modules that change and are in no state are named."""

from __future__ import annotations

from collections import deque

import numpy
import pytest
import torch
from torch import nn

import malletrain
from malletrain.elastic.state import Holder
from malletrain.training import report
from malletrain.training.module_attributes import ModuleAttributes


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
