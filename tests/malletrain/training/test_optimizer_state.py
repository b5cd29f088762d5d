"""The state of an optimizer belongs to the same parameters if its groups have another order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from malletrain import Snapshot, SnapshotError
from malletrain.elastic.state import Holder, StateError
from malletrain.training import snapshot_file
from tests.malletrain.training.worker_side import as_plain_script

WEIGHTS = ["0.weight", "1.weight", "2.weight"]
BIASES = ["0.bias", "1.bias", "2.bias"]


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


class Script:
    """A model whose layers have equal shapes, and groups as they come out of sets of names."""

    def __init__(self, *groups, optimizer=torch.optim.Adam):
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
        self.named = dict(self.model.named_parameters())
        params = [self.named[name] for name in groups[0]]
        self.optimizer = optimizer(params, lr=0.1)
        for names in groups[1:]:
            self.add(names)

    def add(self, names):
        self.optimizer.add_param_group({"params": [self.named[name] for name in names]})

    def train(self):
        def closure():
            self.optimizer.zero_grad()
            loss = self.model(torch.arange(6.0).reshape(3, 2)).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            self.optimizer.step(closure)
        return self

    def objects(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def averages(self):
        state = self.optimizer.state
        return {n: state[p]["exp_avg"].tolist() for n, p in self.named.items() if p in state}


def test_a_snapshot_is_loaded_by_name(tmp_path):
    first = Script(WEIGHTS, BIASES).train()
    Snapshot(tmp_path / "x.pt", **first.objects()).save()
    second = Script(WEIGHTS[::-1], [BIASES[1], BIASES[2], BIASES[0]])
    assert Snapshot(tmp_path / "x.pt", **second.objects()).restore()
    assert second.averages() == first.averages()


def test_a_group_that_is_added_later_is_loaded_by_name(tmp_path):
    first = Script(WEIGHTS, BIASES).train()
    Snapshot(tmp_path / "x.pt", **first.objects()).save()
    second = Script(WEIGHTS[::-1])
    assert Snapshot(tmp_path / "x.pt", **second.objects()).restore()
    second.add(BIASES[::-1])
    assert (second.train().averages(), second.named["0.bias"].tolist()) == (
        first.train().averages(),
        first.named["0.bias"].tolist(),
    )


def test_other_parameters_in_a_group_are_refused(tmp_path):
    Snapshot(tmp_path / "x.pt", **Script(WEIGHTS[:1], WEIGHTS[1:2]).train().objects()).save()
    other = Script(WEIGHTS[1:2], WEIGHTS[:1])
    with pytest.raises(SnapshotError, match=r"group 0 has other .*: model\.1\.weight was not in"):
        Snapshot(tmp_path / "x.pt", **other.objects()).restore()


def test_a_state_that_depends_on_the_order_is_refused(tmp_path):
    first = Script(WEIGHTS, optimizer=torch.optim.LBFGS).train()
    Snapshot(tmp_path / "x.pt", **first.objects()).save()
    with pytest.raises(SnapshotError, match="the state of LBFGS depends on the order"):
        Snapshot(
            tmp_path / "x.pt", **Script(WEIGHTS[::-1], optimizer=torch.optim.LBFGS).objects()
        ).restore()


def test_a_snapshot_without_names_is_loaded_by_position(tmp_path):
    first = Script(WEIGHTS).train()
    snapshot = Snapshot(tmp_path / "x.pt", **first.objects())
    snapshot.save()
    payload = snapshot_file.read(str(tmp_path / "x.pt"))
    assert payload.pop("parameter_names") == {"optimizer": [[f"model.{n}" for n in WEIGHTS]]}
    snapshot_file.write(str(tmp_path / "x.pt"), payload, keep=1)
    second = Script(WEIGHTS)
    assert Snapshot(tmp_path / "x.pt", **second.objects()).restore()
    assert second.averages() == first.averages()


def test_a_joiner_loads_by_name_and_equal_states_have_equal_digests():
    device = torch.device("cpu")
    first, second = Script(WEIGHTS).train(), Script(WEIGHTS[::-1])
    holder, joiner = Holder(first.objects(), device), Holder(second.objects(), device)
    packed, tensors = holder.pack({})
    joiner.restore(joiner.destinations(packed)[0], [t.clone() for t in tensors])
    assert second.averages() == first.averages()
    assert holder.digest() == joiner.digest()
    third = Holder(Script(BIASES).objects(), device)
    with pytest.raises(StateError, match="group 0 has other parameters"):
        third.restore(third.destinations(packed)[0], tensors)
