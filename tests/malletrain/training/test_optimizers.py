"""Optimizers that train a module and are not saved: told, or refused where their state is lost."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.optim import SGD, Adam

import malletrain
from malletrain.training import report, unsaved_objects
from malletrain.training.schedulers import reachable
from malletrain.training.snapshot_file import SnapshotError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _nothing_is_told_yet():
    report.sentence_keys.clear()


class Wrapper:
    """An optimizer of a small library, with another inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def state_dict(self):
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])


def train(path, make, steps=3, before=lambda model: None, after=lambda optimizer, restored: None):
    """Trains some steps and saves. ``make`` returns the optimizer of a model, and what Snapshot is
    given.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer, passed = make(model)
    snapshot = malletrain.Snapshot(path, every_s=3600.0, model=model, **passed)
    after(optimizer, snapshot.restore())
    before(model)
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        snapshot.step()
    snapshot.save()
    return model, optimizer


def replaced(model):
    """The script passes one, and trains with another."""
    return Adam(model.parameters()), {"optimizer": SGD(model.parameters(), lr=0.1)}


def passed(model):
    optimizer = Adam(model.parameters())
    return optimizer, {"optimizer": optimizer}


def inside(model):
    optimizer = Adam(model.parameters())
    return optimizer, {"optimizer": Wrapper(optimizer)}


def stateless(model):
    return SGD(model.parameters(), lr=0.1), {}


def search_for_rate(model):
    """Before training, with an optimizer that is thrown away."""
    search = Adam(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    search.step()


def test_one_that_was_not_passed_is_told_and_refused_where_its_state_is_lost(tmp_path, capsys):
    train(tmp_path / "run.pt", replaced)
    assert "was not given the optimizer (Adam) that trains 'model'" in capsys.readouterr().err
    with pytest.raises(SnapshotError, match=r"optimizer \(Adam\) .*has lost its state"):
        train(tmp_path / "run.pt", replaced)


def test_it_is_refused_before_a_snapshot_without_its_state_is_written(tmp_path):
    train(tmp_path / "run.pt", replaced)
    before = (tmp_path / "run.pt").read_bytes()
    with pytest.raises(SnapshotError):
        train(tmp_path / "run.pt", replaced)
    assert (tmp_path / "run.pt").read_bytes() == before


@pytest.mark.parametrize("make", [passed, inside, stateless])
def test_what_loses_nothing_goes_on(tmp_path, capsys, make):
    for _ in range(2):
        train(tmp_path / "run.pt", make)
    assert "was not given the optimizer" not in capsys.readouterr().err


def test_a_search_for_the_rate_before_training_is_not_meant(tmp_path, capsys):
    for _ in range(2):
        train(tmp_path / "run.pt", passed, before=search_for_rate)
    assert "was not given the optimizer" not in capsys.readouterr().err


def train_in_phases(path, steps):
    """As :func:`train`, with a new optimizer for each of ``steps``, which makes so many steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    snapshot = malletrain.Snapshot(path, every_s=3600.0, model=model)
    snapshot.restore()

    def phase(count):
        optimizer = Adam(model.parameters())
        for _ in range(count):
            model.zero_grad()
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            snapshot.step()

    for count in steps:
        phase(count)
    snapshot.save()


def test_one_that_is_made_new_in_each_step_is_not_meant(tmp_path, capsys):
    for _ in range(2):
        train_in_phases(tmp_path / "run.pt", [1, 1, 1])
    assert "was not given the optimizer" not in capsys.readouterr().err


def test_one_whose_phase_is_over_loses_nothing(tmp_path):
    for _ in range(2):
        train_in_phases(tmp_path / "run.pt", [3, 3])


def test_one_that_the_script_restores_itself_goes_on(tmp_path):
    own = tmp_path / "own.pt"

    def restore(optimizer, restored):
        if restored:
            optimizer.load_state_dict(torch.load(own))

    for _ in range(2):
        _, optimizer = train(tmp_path / "run.pt", replaced, after=restore)
        torch.save(optimizer.state_dict(), own)


def test_one_of_another_snapshot_goes_on(tmp_path, capsys):
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = Adam(model.parameters())
        first = malletrain.Snapshot(tmp_path / "model.pt", model=model)
        second = malletrain.Snapshot(tmp_path / "optimizer.pt", optimizer=optimizer)
        for snapshot in (first, second):
            snapshot.restore()
        for _step in range(3):
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            for snapshot in (first, second):
                snapshot.step()
        for snapshot in (first, second):
            snapshot.save()
    assert "was not given the optimizer" not in capsys.readouterr().err


def test_one_of_another_model_is_not_meant(tmp_path, capsys):
    other = torch.nn.Linear(2, 1)
    optimizer = Adam(other.parameters())

    def make(model):
        return SGD(model.parameters(), lr=0.1), {}

    def update(model):
        other(torch.ones(2, 2)).sum().backward()
        optimizer.step()

    for _ in range(2):
        train(tmp_path / "run.pt", make, before=update)
    assert "was not given the optimizer" not in capsys.readouterr().err


def test_two_snapshots_search_for_an_optimizer_once_each(tmp_path, monkeypatch):
    searches: Counter[tuple[int, type]] = Counter()

    def counted(objects, kind, closed):
        searches[id(objects), kind] += 1
        return reachable(objects, kind, closed)

    monkeypatch.setattr(unsaved_objects, "reachable", counted)
    trained, snapshots = [], []
    for number, kind in enumerate((SGD, Adam)):
        model = torch.nn.Linear(2, 1)
        optimizer = kind(model.parameters(), lr=0.1)
        trained.append((model, optimizer))
        snapshots.append(
            malletrain.Snapshot(tmp_path / f"{number}.pt", model=model, optimizer=optimizer)
        )
    for _ in range(3):
        for model, optimizer in trained:
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
    assert len(searches) >= 2
    assert set(searches.values()) == {1}
