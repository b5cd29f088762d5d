"""Sweeps on the page: what the ledger has, and no descriptor left of reading it."""

import os

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("optuna")

from malletrain.sweep.ledger import SPEC, Ledger, open_storage, storage_url
from malletrain.sweep.spec import load_sweep
from malletrain.web.sweeps import SweepUnavailableError, sweeps, trials

SWEEP = """
[sweep]
metric = "loss"
trials = 4
[job]
script = "train.py"
[space]
lr = { low = 0.1, high = 1.0 }
"""


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_where_nobody_has_begun_a_sweep_there_is_none(tmp_path):
    assert sweeps(tmp_path) == []
    with pytest.raises(SweepUnavailableError, match="no sweep 'lr'"):
        trials(tmp_path, "lr")
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_shown_as_the_ledger_has_it(tmp_path):
    (tmp_path / "train.py").write_text("")
    file = tmp_path / "lr.toml"
    file.write_text(SWEEP)
    with open_storage(storage_url("", tmp_path)) as storage:
        Ledger.create(storage, load_sweep(file, None))
    (shown,) = sweeps(tmp_path)
    assert (shown.name, shown.target_trials, shown.best, shown.attended) == ("lr", 4, None, False)
    assert trials(tmp_path, "lr") == []
    before = descriptors()
    for _ in range(3):
        sweeps(tmp_path)
        trials(tmp_path, "lr")
        with pytest.raises(SweepUnavailableError, match="other"):
            trials(tmp_path, "other")
    assert descriptors() <= before


def test_a_database_that_cannot_be_read_is_said(tmp_path):
    (tmp_path / "sweeps.db").write_bytes(b"no database at all" * 100)
    before = descriptors()
    with pytest.raises(SweepUnavailableError):
        sweeps(tmp_path)
    with pytest.raises(SweepUnavailableError):
        trials(tmp_path, "lr")
    assert descriptors() <= before


def test_a_sweep_that_cannot_be_read_is_named_beside_the_others(tmp_path):
    (tmp_path / "train.py").write_text("")
    file = tmp_path / "lr.toml"
    file.write_text(SWEEP)
    with open_storage(storage_url("", tmp_path)) as storage:
        study = Ledger.create(storage, load_sweep(file, "bad")).study
        study.set_user_attr(SPEC, {**study.user_attrs[SPEC], "space": {"lr": [1.0, None]}})
        Ledger.create(storage, load_sweep(file, None))
    assert [(each.name, each.sentence[:15]) for each in sweeps(tmp_path)] == [
        ("bad", "The description"),
        ("lr", ""),
    ]
    with pytest.raises(SweepUnavailableError, match="optuna delete-study"):
        trials(tmp_path, "bad")
