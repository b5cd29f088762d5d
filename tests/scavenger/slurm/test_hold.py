from scavenger.batch.rules import NodeFacts
from scavenger.slurm.parse import SlurmJob
from scavenger.slurm.scavenger import Hold


def job(state, end, node="n1"):
    return SlurmJob(state, "1", "me", "low", 1, 0.0, 0.0, end, node, "", "", "", "malletrain-t-l1")


class Watch:
    """A hold of 5 s; ``n1`` is idle unless a test sets another state."""

    def __init__(self):
        self.hold = Hold()

    def look(self, now, state="idle", given_up=(), due=(), **jobs):
        facts = {"n1": NodeFacts("n1", state, idle=state == "idle")}
        return self.hold.update(jobs, given_up, facts, due, 5.0, now)


def test_a_lease_whose_end_is_brought_forward_holds_all_others():
    watch = Watch()
    assert watch.look(100.0, l1=job("RUNNING", 10_000.0)) == ""
    assert "took leases back 0 s ago" in watch.look(101.0, "allocated", l1=job("RUNNING", 111.0))
    assert "2 s ago" in watch.look(103.0, l1=job("COMPLETED", 103.0))
    assert "4 s ago" in watch.look(105.0, l1=job("COMPLETED", 103.0))
    assert watch.look(106.5, l1=job("COMPLETED", 103.0)) == ""


def test_the_hold_ends_when_the_job_is_seen_or_has_the_node():
    for sign in ({"due": {"n1"}}, {"state": "allocated"}):
        watch = Watch()
        watch.look(100.0, "allocated", l1=job("RUNNING", 10_000.0))
        assert watch.look(101.0, "allocated", l1=job("RUNNING", 111.0))
        assert watch.look(102.0, "completing", l1=job("COMPLETED", 102.0))
        assert watch.look(103.0, **sign, l1=job("COMPLETED", 102.0)) == ""
        assert watch.look(104.0, l1=job("COMPLETED", 102.0)) == "", "a sign counts once"


def test_another_preemption_is_another_sign():
    watch = Watch()
    watch.look(100.0, l1=job("RUNNING", 10_000.0), l2=job("RUNNING", 10_000.0, "n2"))
    assert (
        watch.look(101.0, due={"n1"}, l1=job("RUNNING", 111.0), l2=job("RUNNING", 10_000.0, "n2"))
        == ""
    )
    assert "0 s ago" in watch.look(102.0, l1=job("RUNNING", 111.0), l2=job("RUNNING", 112.0, "n2"))


def test_a_lease_that_ended_between_two_polls():
    watch = Watch()
    watch.look(100.0, l1=job("RUNNING", 10_000.0))
    assert watch.look(105.0, l1=job("FAILED", 104.0))


def test_what_we_gave_back_or_what_reached_its_limit_is_no_sign():
    watch = Watch()
    watch.look(100.0, l1=job("RUNNING", 1000.0), l2=job("RUNNING", 200.0))
    assert (
        watch.look(201.0, given_up=("l1",), l1=job("CANCELLED", 150.0), l2=job("TIMEOUT", 200.0))
        == ""
    )


def test_jobs_that_ended_before_the_first_look_are_no_sign():
    watch = Watch()
    assert watch.look(51.0, l1=job("PREEMPTED", 50.0)) == ""
    assert watch.look(52.0, l1=job("PREEMPTED", 50.0)) == ""


def test_two_main_jobs_that_preempt_at_once_of_which_one_is_shown():
    watch = Watch()
    watch.look(100.0, l1=job("RUNNING", 10_000.0), l2=job("RUNNING", 10_000.0, "n2"))
    preempted = {"l1": job("RUNNING", 111.0), "l2": job("RUNNING", 111.0, "n2")}
    assert "0 s ago" in watch.look(101.0, **preempted)
    assert watch.look(102.0, due={"n1"}, **preempted), "n2 is taken back for a job not shown yet"
    assert watch.look(103.0, due={"n1", "n2"}, **preempted) == ""
