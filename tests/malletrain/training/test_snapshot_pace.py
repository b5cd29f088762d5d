"""When the next snapshot is due: the script's own rhythm, and sooner where a loss is foretold."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.protocol.flags import FlagsReader, FlagsWriter
from malletrain.training.snapshot_pace import MIN_INTERVAL_S, Pace, snapshot_every


def test_youngs_interval():
    assert snapshot_every(1.0, 450.0, 60.0) == 30.0
    assert snapshot_every(1.0, 1e6, 60.0) == 60.0
    assert snapshot_every(0.0, 450.0, 60.0) == MIN_INTERVAL_S
    assert snapshot_every(1.0, math.inf, 60.0) == 60.0
    assert snapshot_every(1.0, 450.0, 2.0) == 2.0


@given(st.floats(0.2, 10.0), st.floats(100.0, 1e5))
def test_no_other_interval_loses_less(cost_s, loss_in_s):
    def lost(every_s):
        return cost_s / every_s + every_s / 2 / loss_in_s

    best = snapshot_every(cost_s, loss_in_s, math.inf)
    assert lost(best) <= min(lost(max(MIN_INTERVAL_S, 0.8 * best)), lost(1.25 * best)) + 1e-12


@pytest.fixture
def flags(tmp_path):
    writer = FlagsWriter(str(tmp_path / "flags"))
    reader = FlagsReader(writer.path)
    yield writer, reader
    reader.close()
    writer.close()


def clocked(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("malletrain.training.snapshot_pace.time.monotonic", lambda: now[0])
    return now


def test_without_an_agent_the_script_says_it(monkeypatch):
    now = clocked(monkeypatch)
    pace = Pace(60.0, None)
    now[0] += 59.0
    assert not pace.is_due()
    now[0] += 1.0
    assert pace.is_due()
    pace.saved(2.0)
    assert not pace.is_due()
    pace.failed(5.0)
    now[0] += 5.0
    assert pace.is_due()


def test_a_loss_that_is_expected_brings_the_next_one_forward(monkeypatch, flags):
    writer, reader = flags
    now = clocked(monkeypatch)
    pace = Pace(60.0, reader)
    pace.saved(1.0)
    now[0] += 31.0
    assert not pace.is_due()
    writer.expect_loss(450.0)  # every 30 s
    assert pace.is_due()
    pace.saved(1.0)
    now[0] += 29.0
    assert not pace.is_due()
    writer.expect_loss(math.inf)
    pace.saved(1.0)
    now[0] += 59.0
    assert not pace.is_due()


def test_what_a_snapshot_costs_is_known_again_after_a_restart(monkeypatch, flags):
    writer, reader = flags
    now = clocked(monkeypatch)
    writer.expect_loss(450.0)
    pace = Pace(60.0, reader)
    now[0] += 31.0
    assert not pace.is_due()  # nothing is known of the cost
    pace = Pace(60.0, reader)
    pace.is_due()
    pace.begin(60.0, 1.0)
    now[0] += 31.0
    assert pace.is_due()
    pace.begin(60.0, "nonsense")
    assert pace.cost_s == 1.0
