"""Options of schedulers that a snapshot replaces by those of an earlier start."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from malletrain import Snapshot
from malletrain.training import report
from tests.malletrain.training.worker_side import as_plain_script


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


def cosine(optimizer, epochs):
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)


def after_warm_up(optimizer, epochs):
    schedulers = [lr_scheduler.LinearLR(optimizer, total_iters=2), cosine(optimizer, epochs)]
    return lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[2])


def start(path, make, epochs, lr=0.1):
    report.sentence_keys.clear()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = make(optimizer, epochs)
    snapshot = Snapshot(path, model=model, optimizer=optimizer, scheduler=scheduler)
    snapshot.restore()
    optimizer.step()
    scheduler.step()
    snapshot.save()


@pytest.mark.parametrize("make", [cosine, after_warm_up])
def test_other_options_are_named(tmp_path, capsys, make):
    path = tmp_path / "run.pt"
    start(path, make, 3)
    start(path, make, 3)
    assert "options" not in capsys.readouterr().err
    start(path, make, 5)
    assert "T_max = 3 (script: 5)" in capsys.readouterr().err


def test_another_rate_is_named(tmp_path, capsys):
    path = tmp_path / "run.pt"
    start(path, cosine, 3)
    start(path, cosine, 3, lr=0.2)
    assert "base_lrs = [0.1] (script: [0.2])" in capsys.readouterr().err
