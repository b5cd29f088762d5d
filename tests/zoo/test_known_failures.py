"""The list of known failures is strict. Pure."""

from __future__ import annotations

import pytest

from tests.zoo import known_failures
from tests.zoo.cases import CHANGES, Outcome
from tests.zoo.catalogue import SCRIPTS
from tests.zoo.known_failures import KNOWN_FAILURES, reason, resolved


@pytest.fixture
def failures(monkeypatch):
    keys = {("restart/sam", "grow", "tail of 1"): "one", ("restart/ema", "grow", ""): "some"}
    keys["restart/wandb", "grow", ""] = "rows are lost"
    monkeypatch.setattr(known_failures, "KNOWN_FAILURES", keys)
    monkeypatch.setattr(known_failures, "OF_CHANCE", {"rows are lost"})


def outcome(script: str, boundary: str, *problems: str) -> Outcome:
    return Outcome(script, "grow", boundary, 0, problems)


def test_every_known_failure_is_of_a_script_and_a_change():
    for script, change, _ in KNOWN_FAILURES:
        assert change in CHANGES[SCRIPTS[script].mode]


def test_a_known_failure_has_a_reason_and_another_has_none(failures):
    assert reason(outcome("restart/sam", "tail of 1", "x")) == "one"
    assert reason(outcome("restart/sam", "tail of 0", "x")) == ""
    assert reason(outcome("restart/ema", "tail of 0", "x")) == "some"


def test_a_known_failure_that_passes_is_reported(failures):
    assert resolved([outcome("restart/sam", "tail of 1", "x")], whole=True) == []
    assert resolved([outcome("restart/sam", "tail of 0")], whole=True) == []
    assert "tail of 1 passes" in resolved([outcome("restart/sam", "tail of 1")], whole=False)[0]
    some = [outcome("restart/ema", "tail of 0"), outcome("restart/ema", "tail of 1", "x")]
    assert resolved(some, whole=True) == []
    assert "ema grow passes" in resolved(some[:1], whole=True)[0]
    assert resolved(some[:1], whole=False) == []
    assert resolved([outcome("restart/wandb", "tail of 0")], whole=True) == [], "by chance"
