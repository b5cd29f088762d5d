from scavenger.slurm_hold import Hold
from scavenger.slurm_parse import Job


def job(state, end):
    return Job(state, "1", "me", "low", 1, 0.0, 0.0, end, "n1", "", "", "", "malletrain-t-l1")


def test_a_lease_whose_end_is_brought_forward_holds_all_others():
    hold = Hold()
    assert hold.look({"l1": job("RUNNING", 10_000.0)}, (), 5.0, 100.0) == ""
    assert "took leases back 0 s ago" in hold.look({"l1": job("RUNNING", 108.0)}, (), 5.0, 101.0)
    assert hold.look({"l1": job("COMPLETED", 103.0)}, (), 5.0, 103.0)
    assert "2 s ago" in hold.look({"l1": job("COMPLETED", 103.0)}, (), 5.0, 105.0)
    assert hold.look({"l1": job("COMPLETED", 103.0)}, (), 5.0, 108.5) == ""


def test_a_lease_that_ended_between_two_polls():
    hold = Hold()
    hold.look({"l1": job("RUNNING", 10_000.0)}, (), 5.0, 100.0)
    assert hold.look({"l1": job("FAILED", 104.0)}, (), 5.0, 105.0)


def test_what_we_gave_back_or_what_reached_its_limit_is_no_sign():
    hold = Hold()
    hold.look({"l1": job("RUNNING", 1000.0), "l2": job("RUNNING", 200.0)}, (), 5.0, 100.0)
    assert hold.look({"l1": job("CANCELLED", 150.0), "l2": job("TIMEOUT", 200.0)}, ("l1",), 5.0, 201.0) == ""


def test_jobs_that_ended_before_the_first_look_are_no_sign():
    hold = Hold()
    assert hold.look({"l1": job("PREEMPTED", 50.0)}, (), 5.0, 51.0) == ""
    assert hold.look({"l1": job("PREEMPTED", 50.0)}, (), 5.0, 52.0) == ""
