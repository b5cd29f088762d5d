"""What an object that a script passes has beside its state, and changes, is named."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import malletrain
from malletrain.elastic.state import Holder
from malletrain.protocol.worker_channel import OwnerNotice
from malletrain.training.module_attributes import ModuleAttributes
from malletrain.training.script_attributes import ObjectAttributes
from tests.malletrain.training.worker_side import as_worker


class Lookahead:
    """Around an optimizer, of which it returns the state (over9000#6, pytorch_optimizer#310)."""

    def __init__(self, optimizer):
        self.optimizer, self.counter = optimizer, 0
        self.param_groups = optimizer.param_groups

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)

    def step(self):
        self.optimizer.step()
        self.counter += 1


class Scaler:
    """Its state has the scale under another name, and not the counter (metaseq#3)."""

    def __init__(self):
        self.scale, self._iterations = 4.0, 0

    def state_dict(self):
        return {"loss_scale": self.scale}

    def load_state_dict(self, state):
        self.scale = state["loss_scale"]

    def step(self):
        self.scale *= 2
        self._iterations += 1


class Whole(Scaler):
    reads = 0

    def state_dict(self):
        self.__class__.reads += 1
        return dict(self.__dict__)


class Broken(Scaler):
    def state_dict(self):
        raise RuntimeError("no state")


class Momentum(torch.optim.SGD):
    """An optimizer of the script's with a counter beside its groups."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.count, self._hidden = 0, 0

    def step(self, closure=None):
        super().step()
        self.count += 1
        self._hidden += 1


def model_and_optimizer(kind=torch.optim.SGD):
    model = torch.nn.Linear(1, 1)
    model(torch.ones(1)).backward()
    return model, kind(model.parameters())


@pytest.fixture
def agent(monkeypatch):
    with as_worker(monkeypatch) as agent:
        yield agent


MAKE = {
    "lookahead": (lambda: Lookahead(model_and_optimizer()[1]), ["it.counter"]),
    "scaler": (Scaler, ["it._iterations"]),
    "whole": (Whole, []),
    "broken": (Broken, []),
    "optimizer": (lambda: model_and_optimizer(Momentum)[1], ["it.count"]),
    "torch": (lambda: model_and_optimizer()[1], []),
}


@pytest.mark.parametrize("name", MAKE)
def test_what_no_state_has_is_named(name):
    make, expected = MAKE[name]
    target = make()
    attributes = ObjectAttributes("Snapshot", {"it": target})
    attributes.begin()
    assert attributes.changed() == []
    target.step()
    assert attributes.changed() == expected


def test_a_state_is_read_at_a_few_snapshots_only():
    target, Whole.reads = Whole(), 0
    attributes = ObjectAttributes("Snapshot", {"it": target})
    attributes.begin()
    for _ in range(50):
        target.step()
        attributes.tell_changed()
    assert 0 < Whole.reads <= 10


def test_a_job_is_told_once_by_its_snapshots(agent, tmp_path, capsys):
    for _ in range(2):
        scaler = Scaler()
        snapshot = malletrain.Snapshot(tmp_path / "x.pt", scaler=scaler)
        restored = snapshot.restore()
        assert snapshot.save()
        scaler.step()
        assert snapshot.save()
        sentences = [notice.sentence for notice in agent.received(OwnerNotice)]
        assert len(sentences) == (not restored)
    log = capsys.readouterr().err
    assert log.count("Snapshot saves does not have all of it: scaler._iterations changed") == 1


def test_live_mode_tells_it_when_a_peer_gets_the_state(agent):
    scaler = Scaler()
    holder = Holder({"scaler": scaler}, torch.device("cpu"))
    scaler.step()
    holder.pack({}, for_peer=False)
    assert not agent.received(OwnerNotice)
    holder.pack({})
    (notice,) = agent.received(OwnerNotice)
    assert "elastic.Run saves does not have all of it: scaler._iterations" in notice.sentence


GENERATORS = {
    "torch": (lambda: torch.Generator().manual_seed(0), lambda g: torch.rand((), generator=g)),
    "numpy": (lambda: np.random.default_rng(0), lambda g: g.random()),
    "numpy's older": (lambda: np.random.RandomState(0), lambda g: g.rand()),
    "python": (lambda: random.Random(0), lambda g: g.random()),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_random_generator_of_a_module_is_named_once_it_was_used(kind):
    """Its noise would begin anew (VeOmni#1189)."""
    make, draw = GENERATORS[kind]
    model = torch.nn.Linear(1, 1)
    model.generator = make()
    attributes = ModuleAttributes("Snapshot", {"model": model})
    assert attributes.changed() == []
    draw(model.generator)
    assert attributes.changed() == ["model.generator"]
