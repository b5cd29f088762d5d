"""A slow answer makes polls rarer, and never so rare that a reservation is missed."""

import pytest

from malletrain.config.model import parse_config
from malletrain.daemon.site.backends import connect_pbs, connect_slurm
from scavenger.batch.calls import PollPause
from scavenger.batch.settings import BatchSettings


def pauses(answers_s, usual_s=5.0, longest_s=15.0):
    """The pause after each poll, of which each took so long."""
    pause = PollPause(longest_s)
    return [pause.after(took_s, usual_s, 10.0) for took_s in answers_s]


@pytest.mark.parametrize(
    ("answers_s", "expected"),
    [
        ([0.1, 0.1], [5, 5]),
        ([39.6], [5]),  # one answer of a controller that was frozen: ten times that is 6.6 min
        ([39.6, 39.6, 39.6, 39.6], [5, 10, 15, 15]),
        ([0.8, 0.8, 0.8], [5, 8, 8]),  # a large machine: a tenth of the time
        ([39.6, 39.6, 0.1, 39.6], [5, 10, 5, 5]),
    ],
)
def test_the_pause_doubles_from_5_s_while_answers_are_slow(answers_s, expected):
    assert pauses(answers_s) == expected


def test_the_pause_of_a_long_backfill_cycle_stays():
    assert pauses([39.6] * 3, usual_s=30.0) == [30, 30, 30]


@pytest.mark.parametrize(
    ("spare_s", "interval_s", "longest_s"),
    [(30.0, 5.0, 15.0), (0.0, 5.0, 5.0), (600.0, 5.0, 300.0)],
)
def test_the_longest_pause_leaves_a_lease_its_grace_time(spare_s, interval_s, longest_s):
    settings = BatchSettings("t", "", None, spare_s=spare_s, poll_interval_s=interval_s)
    assert settings.max_pause_s == longest_s


@pytest.mark.parametrize(("kind", "connect"), [("slurm", connect_slurm), ("pbs", connect_pbs)])
def test_a_silent_controller_is_asked_as_often_as_the_promises_need(
    tmp_path, monkeypatch, kind, connect
):
    config = parse_config(
        f'[daemon]\nstate_dir = "{tmp_path}"\n[scheduler]\nkind = "{kind}"\n'
        f'[scheduler.{kind}]\nspare = "40 s"\n'
        + ('queue = "preemptable"\n' if kind == "pbs" else "")
    )
    calls = connect(config).commands.calls
    now, waits = 0.0, []
    monkeypatch.setattr(calls, "_clock", lambda: now)
    for _ in range(4):
        calls.count("squeue", "silent", "no answer")
        waits.append(calls.backoff_s())
        now += waits[-1]
    assert waits == [5, 10, 20, 20]
