"""Leases that the main scheduler has and the daemon does not want are ended, also after a restart:
found by the simulation (tests/dst, seeds 2 and 37).
"""

from __future__ import annotations

import pytest

from malletrain.daemon.leases.polls import RETRY_INTERVAL_S, Strays
from scavenger.interface import Lease, LeaseState, SchedulerError
from tests.malletrain.daemon.forged import Imagined, RunningDaemon, until


def lease(name, state=LeaseState.RUNNING):
    return Lease(name, f"s{name}", state, "n0")


@pytest.mark.parametrize(
    ("leases", "active", "ended"),
    [
        ([lease("l1")], {"l1"}, []),
        ([lease("l1")], set(), ["l1"]),
        ([lease("l1", LeaseState.PENDING)], set(), ["l1"]),
        ([lease("l1", LeaseState.ENDED)], set(), []),
        ([lease("l1"), lease("l2")], {"l1"}, ["l2"]),
    ],
)
def test_what_is_there_and_not_wanted_is_ended(leases, active, ended):
    assert [one.id for one in Strays().to_end(leases, active, 0.0)] == ended


def test_it_is_asked_for_again_only_after_a_while():
    strays, leases = Strays(), [lease("l1")]
    counts = [
        len(strays.to_end(leases, set(), now))
        for now in (0.0, 5.0, RETRY_INTERVAL_S, RETRY_INTERVAL_S + 5.0)
    ]
    assert counts == [1, 0, 1, 0]
    assert strays.to_end([], set(), RETRY_INTERVAL_S + 6.0) == []
    # It is no longer listed, so that another of that name is ended at once.
    assert strays.to_end(leases, set(), RETRY_INTERVAL_S + 7.0) == leases


class Mute(Imagined):
    """Takes every lease and cannot say so."""

    def take(self, requests):
        super().take(requests)
        raise SchedulerError("It did not answer within 30 s.")


def test_a_lease_that_was_taken_without_a_word_is_ended_by_the_next_daemon(tmp_path):
    machine = Mute("n0")
    first = RunningDaemon(tmp_path, machine)
    try:
        job = first.submit("ann")
        until(lambda: [e for e in first.events() if e.kind == "lease-ended"], "it is given up")
        with first.client("ann") as client:
            client.cancel([job])
    finally:
        first.stop()
    [stray] = list(machine.leases) or ["l1"]
    machine.leases[stray] = lease(stray)  # its job turns up
    second = RunningDaemon(tmp_path, machine)
    try:
        until(lambda: not machine.leases, "it is ended")
    finally:
        second.stop()
