"""A snapshot between two updates, which loses gradients, is told (transgenic#53)."""

from __future__ import annotations

import pytest
import torch

import malletrain
from malletrain.protocol.worker_channel import OwnerNotice
from malletrain.training.unsaved_objects import UnsavedGradients
from tests.malletrain.training.worker_side import as_worker

TOLD = "A snapshot was taken between two updates."


class Script:
    """Steps of a model, after each of which a snapshot is taken."""

    def __init__(self, path):
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.snapshot = malletrain.Snapshot(
            path, every_s=0.0, model=self.model, optimizer=self.optimizer, facts={"n": 0}
        )

    def backward(self, factor=1.0):
        (self.model(torch.ones(1)).sum() * factor).backward()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def after_each_micro_batch(script):
    for number in range(6):
        script.backward()
        if number % 3 == 2:
            script.update()
        script.snapshot.step()


def after_each_update(script):
    for number in range(6):
        script.backward()
        if number % 3 == 2:
            script.update()
            script.snapshot.step()


def gradients_stay(script):
    """``zero_grad()`` first."""
    for _ in range(4):
        script.optimizer.zero_grad()
        script.backward()
        script.optimizer.step()
        script.snapshot.step()


def overflow(script):
    """A scaler makes no update in step 2."""
    for number in range(4):
        script.optimizer.zero_grad()
        script.backward(float("inf") if number == 2 else 1.0)
        if number != 2:
            script.optimizer.step()
        script.snapshot.step()


def left_out(script):
    for number in range(4):
        script.optimizer.zero_grad()
        if number != 2:
            script.backward()
            script.optimizer.step()
        script.snapshot.step()


def optimizer_of_its_own(script):
    """No optimizer of torch makes an update."""
    for _ in range(4):
        script.backward()
        script.snapshot.step()


@pytest.mark.parametrize(
    ("train", "is_told"),
    [
        (after_each_micro_batch, True),
        (after_each_update, False),
        (gradients_stay, False),
        (overflow, False),
        (left_out, False),
    ],
)
def test_gradients_that_a_snapshot_does_not_have_are_told(
    monkeypatch, tmp_path, capsys, train, is_told
):
    with as_worker(monkeypatch) as agent:
        train(Script(tmp_path / "x.pt"))
        sentences = [notice.sentence for notice in agent.received(OwnerNotice)]
    assert len(sentences) == is_told
    assert capsys.readouterr().err.count(TOLD) == is_told


def test_nothing_is_told_where_no_update_is_seen(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("malletrain.training.unsaved_objects._newest_update", [-1])
    with as_worker(monkeypatch):
        optimizer_of_its_own(Script(tmp_path / "x.pt"))
    assert TOLD not in capsys.readouterr().err


def test_a_gradient_that_cannot_be_read_stops_nothing(monkeypatch, capsys):
    class Odd:
        def parameters(self):
            raise RuntimeError("odd")

    gradients = UnsavedGradients({"model": Odd()})
    monkeypatch.setattr("malletrain.training.unsaved_objects._newest_update", [7])
    gradients.after_step()
    gradients.after_step()
    gradients.tell_unsaved()
    assert TOLD not in capsys.readouterr().err
