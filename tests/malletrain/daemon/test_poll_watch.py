"""That the main scheduler does not answer is told from the first missed poll."""

from malletrain.daemon.leases.polls import PollWatch


def test_a_poll_that_is_late_is_missed_while_it_is_under_way():
    watch = PollWatch(5.0)
    watch.began(100.0)
    assert (watch.missed(104.0), watch.trouble(104.0)) == (0, "")
    assert watch.missed(112.0) == 1
    assert watch.trouble(112.0) == (
        "it has not answered for 12 s. It has not answered since the daemon's start."
    )
    watch.answered(133.0)
    assert (watch.missed(150.0), watch.trouble(150.0)) == (0, "")


def test_polls_that_fail_are_counted_until_one_is_answered():
    watch = PollWatch(5.0)
    watch.began(0.0)
    watch.answered(1.0)
    watch.began(10.0)
    watch.failed("slurmctld does not answer.")
    assert watch.missed(12.0) == 1
    assert watch.trouble(61.0) == "slurmctld does not answer. Its last answer came 1 min ago."
    watch.began(20.0)
    assert watch.missed(21.0) == 1
    assert watch.missed(40.0) == 2, "the one under way is late"
    watch.failed("slurmctld does not answer.")
    assert watch.missed(41.0) == 2
    watch.began(50.0)
    watch.answered(51.0)
    assert (watch.missed(60.0), watch.error) == (0, "")


def test_where_each_poll_takes_long_one_that_takes_as_long_is_not_missed():
    watch = PollWatch(5.0)
    watch.began(0.0)
    watch.answered(9.0)
    watch.began(20.0)
    assert watch.missed(37.0) == 0
    assert watch.missed(39.0) == 1
