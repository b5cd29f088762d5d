"""A script's own variables for what its dicts contain stay valid when the dicts are set."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import pytest
import torch
from torch import nn

import malletrain
from malletrain.elastic.state import Holder
from malletrain.elastic.training import StateBeforeStep
from malletrain.training import dict_state
from malletrain.training.epoch_begin import undo_of
from tests.malletrain.training.worker_side import as_plain_script


@pytest.fixture
def plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


class Script:
    """Has a variable for each object in its dict, as scripts with a center or a history do."""

    def __init__(self):
        self.center, self.mean, self.losses = torch.zeros(2), np.zeros(2), []
        self.nested = {"queue": torch.zeros(3)}
        self.facts = {
            "center": self.center,
            "mean": self.mean,
            "losses": self.losses,
            "nested": self.nested,
            "step": 0,
        }

    def train_on(self):
        self.center += 1
        self.mean += 2
        self.losses.append(0.5)
        self.nested["queue"][1] = 7
        self.nested["new"] = 1
        self.facts["step"] += 1

    def values(self):
        """By the script's variables."""
        return (
            *(self.center.tolist(), self.mean.tolist(), list(self.losses)),
            *(self.nested["queue"].tolist(), self.nested.get("new"), self.facts["step"]),
        )

    def check(self):
        for name in ("center", "mean", "losses", "nested"):
            assert self.facts[name] is getattr(self, name)


@pytest.mark.usefixtures("plain")
def test_a_restored_dict_has_the_scripts_own_objects(tmp_path):
    first, second = Script(), Script()
    first.train_on()
    malletrain.Snapshot(tmp_path / "x.pt", facts=first.facts).save()
    assert malletrain.Snapshot(tmp_path / "x.pt", facts=second.facts).restore()
    assert second.values() == first.values()
    second.check()


def test_a_joiner_has_its_own_objects():
    first, second = Script(), Script()
    first.train_on()
    device = torch.device("cpu")
    packed, tensors = Holder({"facts": first.facts}, device).pack({})
    joiner = Holder({"facts": second.facts}, device)
    joiner.restore(joiner.destinations(packed)[0], tensors)
    assert second.values() == first.values()
    second.check()


def test_a_discarded_step_and_a_repeated_beginning_set_them_back():
    for sets_back in (False, True):
        script = Script()
        script.train_on()
        before = script.values()
        if sets_back:
            (undo,) = undo_of({"facts": script.facts}, constant_batch=True)
            script.train_on()
            undo()
        else:
            start = StateBeforeStep([], [script.facts])
            start.keep()
            script.train_on()
            assert start.restore(())
        assert script.values() == before
        script.check()


def test_a_large_tensor_is_copied_once_it_has_changed_in_place():
    queue = torch.zeros(100_000)
    start = StateBeforeStep([], [{"queue": queue}])
    start.keep()
    assert start.restore(()), "unchanged"
    queue.add_(1)
    assert not start.restore(()), "changed before it was known to change"
    start.keep()
    queue.add_(1)
    assert start.restore(())
    assert queue.unique().tolist() == [1]


def test_a_large_tensor_of_a_module_is_not_copied():
    model = nn.Linear(200, 200)
    best = {"state": model.state_dict()}
    start = StateBeforeStep([model], [best])
    for _ in range(2):
        start.keep()
        with torch.no_grad():
            model.weight.add_(1)
    start.keep()
    changed = torch.full_like(model.weight, 5.0)
    model.weight.data.copy_(changed)
    with torch.no_grad():
        model.weight.copy_(changed)
    start.restore(())
    assert torch.equal(model.weight, changed)
    assert best["state"]["weight"].data_ptr() == model.weight.data_ptr()


def test_what_belongs_to_a_module_or_optimizer_is_replaced():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight, group = model.weight.detach().clone(), optimizer.param_groups[0]
    own = {"best": model.state_dict(), "group": group, "params": list(model.parameters())}
    own_params = own["params"]
    saved = {
        "best": {"weight": torch.ones(2, 2), "bias": torch.ones(2)},
        "group": {"params": [torch.ones(2)], "lr": 0.5},
        "params": [torch.ones(2, 2), torch.ones(2)],
    }
    dict_state.load(own, saved, [model, optimizer])
    assert torch.equal(own["best"]["weight"], torch.ones(2, 2))
    assert torch.equal(model.weight, weight)
    assert optimizer.param_groups[0] is group
    assert (group["lr"], group["params"][0]) == (1.0, model.weight)
    assert own_params[0] is model.weight


def test_values_are_right_though_the_scripts_objects_share_memory():
    zero, row = torch.zeros(1), torch.zeros(2)
    own = {"last": zero, "best": zero, "a": row[0], "b": row[1], "one": [], "wide": zero.expand(3)}
    own["two"] = own["one"]
    saved = {
        "last": torch.ones(1),
        "best": torch.tensor([2.0]),
        "a": torch.tensor(3.0),
        "b": torch.tensor(4.0),
        "one": [1],
        "two": [2],
        "wide": torch.arange(3.0),
    }
    dict_state.load(own, saved)
    assert {k: v.tolist() if hasattr(v, "tolist") else v for k, v in own.items()} == {
        "last": [1],
        "best": [2],
        "a": 3,
        "b": 4,
        "one": [1],
        "two": [2],
        "wide": [0, 1, 2],
    }
    assert row.tolist() == [3, 4]


def test_other_shapes_types_and_keys():
    own = {"t": torch.zeros(2), "c": Counter(a=1), "d": deque([1], 2), "s": {1}, "own": 1}
    before = dict(own)
    saved = {"t": torch.ones(3), "c": {"b": 2}, "d": deque([4, 5], 2), "s": {3}, "new": None}
    dict_state.load(own, saved)
    assert own["t"] is saved["t"]
    assert [own[k] is before[k] for k in "cds"] == [True] * 3
    assert (own["c"], list(own["d"]), own["s"]) == (Counter(b=2), [4, 5], {3})
    assert (own["own"], own["new"]) == (1, None)
