"""What the silence of agents means, in tables of times."""

import pytest

from malletrain.daemon.engine.agents import AgentLiveness, LivenessMonitor


@pytest.mark.parametrize(
    ("silent_s", "liveness"),
    [
        ([], AgentLiveness.OK),
        ([6.0], AgentLiveness.OK),  # one alone: nobody can tell
        ([6.0, 0.5], AgentLiveness.OK),
        ([6.0, 6.0, 0.5, 0.5], AgentLiveness.OK),  # half of them
        ([6.0, 6.0, 0.5], AgentLiveness.PARTITIONED),
        ([5.2, 4.3, 4.8, 4.9], AgentLiveness.PARTITIONED),  # all within a heartbeat
        ([4.9, 4.3, 4.8, 4.9], AgentLiveness.OK),  # not yet
        ([5.2, 1.0, 0.3, 0.9], AgentLiveness.OK),
    ],
)
def test_many_at_one_moment(silent_s, liveness):
    now = 100.0
    assert LivenessMonitor(5.0, 1.0).check([now - s for s in silent_s], now) is liveness


def test_a_partition_lasts_until_most_agents_are_heard_again():
    liveness = LivenessMonitor(5.0, 1.0)
    assert liveness.check([0.0] * 4, 6.0) is AgentLiveness.PARTITIONED
    assert (
        liveness.check([0.0] * 4, 1000.0) is AgentLiveness.PARTITIONED
    )  # nobody to tell anything to
    assert liveness.check([1000.5, 1000.6, 0.0, 0.0], 1001.0) is AgentLiveness.RECOVERED
    assert liveness.check([1001.0] * 4, 1001.5) is AgentLiveness.OK


def test_the_first_who_is_heard_again_does_not_make_the_others_lost():
    liveness = LivenessMonitor(5.0, 1.0)
    assert liveness.check([0.0] * 3, 6.0) is AgentLiveness.PARTITIONED
    assert liveness.check([40.0, 0.0, 0.0], 40.0) is AgentLiveness.PARTITIONED
    assert liveness.check([42.0, 41.0, 0.0], 42.0) is AgentLiveness.RECOVERED
    assert (
        liveness.check([0.0] * 3, 100.0) is AgentLiveness.PARTITIONED
    )  # once more, from the beginning
    assert liveness.check([140.0, 0.0, 0.0], 140.0) is AgentLiveness.PARTITIONED


def test_where_some_are_heard_the_others_are_lost_in_the_end():
    liveness = LivenessMonitor(5.0, 1.0)
    assert liveness.check([0.0, 0.0, 5.5], 6.0) is AgentLiveness.PARTITIONED
    assert liveness.check([0.0, 0.0, 20.5], 21.0) is AgentLiveness.PARTITIONED
    assert liveness.check([0.0, 0.0, 21.0], 21.5) is AgentLiveness.OK


def test_a_look_that_comes_late():
    liveness = LivenessMonitor(5.0, 1.0)
    assert liveness.unheard_s(10.0) == 0.0  # the first
    assert liveness.unheard_s(11.5) == 0.0
    assert liveness.unheard_s(26.5) == 15.0
    assert liveness.unheard_s(27.0) == 0.0
    assert liveness.check([0.0] * 3, 27.0) is AgentLiveness.PARTITIONED
    assert liveness.unheard_s(27.5) == 0.5  # nothing is heard: no time limit runs


def test_the_wait_for_agents_ends_when_all_are_back():
    liveness = LivenessMonitor(5.0, 1.0)
    assert not liveness.settled([99.0], 100.0)  # it waits for nobody
    liveness.settle(160.0, 100.0)
    assert not liveness.settled([160.0, 160.0], 100.5)  # taken to be heard then, by Core.hear_again
    assert not liveness.settled([100.4, 100.9], 101.0)  # said before: they may have hung up since
    assert not liveness.settled([101.2, 100.9], 101.5)
    assert liveness.settled([101.2, 101.4], 101.5)
    assert not liveness.settled([101.2, 101.4], 101.5)


def test_the_wait_for_agents_has_an_end():
    liveness = LivenessMonitor(5.0, 1.0)
    liveness.settle(160.0, 100.0)
    assert not liveness.settled([160.0, 101.5], 159.0)
    assert liveness.settled([160.0, 101.5], 160.0)
    liveness.settle(260.0)  # nobody is heard yet
    assert not liveness.settled([220.0, 220.0], 220.0)
    assert liveness.settled([220.0, 220.0], 260.0)


def test_a_daemon_that_stands_still_again_and_again_plans_in_between():
    """Three seconds in every ten, and agents that say something every second."""
    liveness, waited = LivenessMonitor(5.0, 1.0), 0.0
    for again in range(100, 400, 10):
        liveness.settle(again + 60.0, again)
        ends = next(
            at for tenth in range(70) if liveness.settled([at := again + tenth / 10] * 3, at)
        )
        waited = max(waited, ends - again)
    assert waited == 1.0
