"""Leases whose jobs a plugin or hook of the scheduler moved elsewhere."""

from scavenger.batch.moved_leases import MOVED_PAUSE_S, MovedLeases


def test_a_lease_that_was_moved_leaves_and_none_is_requested_for_a_while():
    watch = MovedLeases("Slurm", "partition", "scheduler.slurm")
    assert watch.reasons_to_leave({"l1": "low", "l2": "low,lower"}, ["low", "lower"], 0.0) == {}
    assert watch.reason_to_pause(0.0) == ""
    leave = watch.reasons_to_leave({"l1": "low", "l2": "long"}, ["low"], 100.0)
    assert leave == {"l2": "its job is in partition long, not in low"}
    assert "lease l2 is in partition long, not in low" in watch.reason_to_pause(100.0)
    assert "next try in 10 min" in watch.reason_to_pause(100.0)
    assert watch.reasons_to_leave({"l1": "low"}, ["low"], 200.0) == {}
    assert watch.reason_to_pause(100.0 + MOVED_PAUSE_S) == ""


def test_leases_without_a_partition_of_their_own_may_run_anywhere():
    watch = MovedLeases("Slurm", "partition", "scheduler.slurm")
    assert watch.reasons_to_leave({"l1": "batch"}, [], 0.0) == {}
    assert watch.reasons_to_leave({"l1": ""}, ["low"], 0.0) == {}
