"""Whose trouble silence is."""

import pytest

from malletrain.daemon.hearing import Ear, Hearing


@pytest.mark.parametrize(
    ("silent_s", "ear"),
    [
        ([], Ear.WELL),
        ([6.0], Ear.WELL),  # one alone: nobody can tell
        ([6.0, 0.5], Ear.WELL),
        ([6.0, 6.0, 0.5, 0.5], Ear.WELL),  # half of them
        ([6.0, 6.0, 0.5], Ear.DEAF),
        ([5.2, 4.3, 4.8, 4.9], Ear.DEAF),  # all within a heartbeat
        ([4.9, 4.3, 4.8, 4.9], Ear.WELL),  # not yet
        ([5.2, 1.0, 0.3, 0.9], Ear.WELL),
    ],
)
def test_many_at_one_moment(silent_s, ear):
    now = 100.0
    assert Hearing(5.0, 1.0).listen([now - s for s in silent_s], now) is ear


def test_it_stays_deaf_until_they_are_heard_again():
    hearing = Hearing(5.0, 1.0)
    assert hearing.listen([0.0] * 4, 6.0) is Ear.DEAF
    assert hearing.listen([0.0] * 4, 1000.0) is Ear.DEAF  # nobody to tell anything to
    assert hearing.listen([1000.5, 1000.6, 0.0, 0.0], 1001.0) is Ear.BACK
    assert hearing.listen([1001.0] * 4, 1001.5) is Ear.WELL


def test_the_first_who_is_heard_again_does_not_make_the_others_lost():
    hearing = Hearing(5.0, 1.0)
    assert hearing.listen([0.0] * 3, 6.0) is Ear.DEAF
    assert hearing.listen([40.0, 0.0, 0.0], 40.0) is Ear.DEAF
    assert hearing.listen([42.0, 41.0, 0.0], 42.0) is Ear.BACK
    assert hearing.listen([0.0] * 3, 100.0) is Ear.DEAF  # once more, from the beginning
    assert hearing.listen([140.0, 0.0, 0.0], 140.0) is Ear.DEAF


def test_where_some_are_heard_the_others_are_lost_in_the_end():
    hearing = Hearing(5.0, 1.0)
    assert hearing.listen([0.0, 0.0, 5.5], 6.0) is Ear.DEAF
    assert hearing.listen([0.0, 0.0, 20.5], 21.0) is Ear.DEAF
    assert hearing.listen([0.0, 0.0, 21.0], 21.5) is Ear.WELL


def test_a_look_that_comes_late():
    hearing = Hearing(5.0, 1.0)
    assert hearing.unheard_s(10.0) == 0.0  # the first
    assert hearing.unheard_s(11.5) == 0.0
    assert hearing.unheard_s(26.5) == 15.0
    assert hearing.unheard_s(27.0) == 0.0
    assert hearing.listen([0.0] * 3, 27.0) is Ear.DEAF
    assert hearing.unheard_s(27.5) == 0.5  # nothing is heard: no time limit runs


def test_the_wait_for_agents_ends_when_all_are_back():
    hearing = Hearing(5.0, 1.0)
    assert not hearing.settled([99.0], 100.0)  # it waits for nobody
    hearing.settle(160.0, 100.0)
    assert not hearing.settled([160.0, 160.0], 100.5)  # taken to be heard then, by Core.hear_again
    assert not hearing.settled([100.4, 100.9], 101.0)  # said before: they may have hung up since
    assert not hearing.settled([101.2, 100.9], 101.5)
    assert hearing.settled([101.2, 101.4], 101.5)
    assert not hearing.settled([101.2, 101.4], 101.5)


def test_the_wait_for_agents_has_an_end():
    hearing = Hearing(5.0, 1.0)
    hearing.settle(160.0, 100.0)
    assert not hearing.settled([160.0, 101.5], 159.0)
    assert hearing.settled([160.0, 101.5], 160.0)
    hearing.settle(260.0)  # nobody is heard yet
    assert not hearing.settled([220.0, 220.0], 220.0)
    assert hearing.settled([220.0, 220.0], 260.0)


def test_a_daemon_that_stands_still_again_and_again_plans_in_between():
    """Three seconds in every ten, and agents that say something every second."""
    hearing, waited = Hearing(5.0, 1.0), 0.0
    for again in range(100, 400, 10):
        hearing.settle(again + 60.0, again)
        ends = next(
            at for tenth in range(70) if hearing.settled([at := again + tenth / 10] * 3, at)
        )
        waited = max(waited, ends - again)
    assert waited == 1.0
