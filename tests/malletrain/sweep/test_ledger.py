"""Studies that cannot be read, and values that a database refuses."""

from __future__ import annotations

import optuna
import pytest
import sqlalchemy.exc

from malletrain.sweep.ledger import JOB, MAX_STEP, SPEC, Ledger, UnreadableSweepError, summaries
from malletrain.sweep.spec import SweepError
from tests.malletrain.sweep.sweep_world import described


def unreadable(storage, name):
    """Create a sweep with a list of choices that contains null."""
    sweep = described()
    section = sweep.sweep.model_copy(update={"name": name})
    ledger = Ledger.create(storage, sweep.model_copy(update={"sweep": section}))
    spec = ledger.study.user_attrs[SPEC]
    spec["space"]["x"] = [1.0, None]
    ledger.study.set_user_attr(SPEC, spec)
    return ledger


def test_a_study_that_cannot_be_read_hides_no_other():
    storage = optuna.storages.InMemoryStorage()
    Ledger.create(storage, described())
    study = unreadable(storage, "bad").study
    bad, good = summaries(storage)
    assert (good.name, good.end) == ("s", "")
    assert bad.name == "bad"
    assert "not valid (space: x: None is no choice" in bad.end
    assert "optuna delete-study --study-name bad" in bad.end
    assert "malletrain cancel" not in bad.end
    study.ask().set_user_attr(JOB, "j7")
    with pytest.raises(UnreadableSweepError, match="cancel its jobs with malletrain cancel j7;"):
        Ledger.open(storage, "bad")


def fail_to_store(monkeypatch, storage, cause):
    def refuse(*where):
        raise optuna.exceptions.StorageInternalError("invalid data") from cause

    monkeypatch.setattr(storage, "set_trial_intermediate_value", refuse)


OUT_OF_RANGE = sqlalchemy.exc.DataError("INSERT", {}, Exception("integer out of range"))


def test_a_step_that_the_database_cannot_store_ends_the_sweep_with_a_sentence(monkeypatch):
    storage = optuna.storages.InMemoryStorage()
    ledger = Ledger.create(storage, described())
    number = ledger.ask().number
    fail_to_store(monkeypatch, storage, OUT_OF_RANGE)
    with pytest.raises(SweepError, match=r"reports step 2,147,483,648, but .* up to 2,147,483,647"):
        ledger.report(number, [(MAX_STEP + 1, 0.5)], judge=False)


def test_a_database_that_is_away_is_waited_for_at_each_step(monkeypatch):
    storage = optuna.storages.InMemoryStorage()
    ledger = Ledger.create(storage, described())
    number = ledger.ask().number
    away = sqlalchemy.exc.OperationalError("INSERT", {}, Exception("connection refused"))
    fail_to_store(monkeypatch, storage, away)
    with pytest.raises(optuna.exceptions.StorageInternalError):
        ledger.report(number, [(MAX_STEP + 1, 0.5)], judge=False)
