"""A job gets other limits of its scale while it is there."""

from __future__ import annotations

from malletrain.core.commands import Rescale, Start
from malletrain.core.events import JobState, LimitsChanged, RescaleFinished, Tick
from tests.malletrain.core.controller_script import controller, job, nodes, play, running


def of_kind(commands, kind):
    return [command for command in commands if isinstance(command, kind)]


def test_a_job_with_more_nodes_than_its_new_maximum_is_rescaled_though_it_was_just_now():
    c = controller(min_interval_s=3600.0)
    now = running(c, 1, 4, on=("a", "b", "c"))
    commands = play(c, [(now, LimitsChanged("j", 1, 2)), (now + 5.0, Tick())])
    (rescale,) = of_kind(commands, Rescale)
    assert len(rescale.nodes) == 2
    assert set(rescale.nodes) < {"a", "b", "c"}


def test_a_job_may_grow_beyond_what_it_was_submitted_with():
    c = controller()
    now = running(c, 1, 1, on=("a",))
    later = play(c, [*nodes("b", at=now), (now + 5.0, Tick())])
    assert not of_kind(later, Rescale)
    (rescale,) = of_kind(play(c, [(20.0, LimitsChanged("j", 1, 2)), (25.0, Tick())]), Rescale)
    assert set(rescale.nodes) == {"a", "b"}


def test_a_job_whose_new_minimum_cannot_be_had_is_suspended_and_comes_back():
    c = controller()
    now = running(c, 1, 2, on=("a", "b"))
    play(c, [(now, LimitsChanged("j", 3, 3)), (now + 5.0, Tick())])
    assert (c.jobs["j"].state, c.jobs["j"].nodes) == (JobState.SUSPENDED, ())
    (start,) = of_kind(play(c, [(20.0, LimitsChanged("j", 1, 2)), (25.0, Tick())]), Start)
    assert set(start.nodes) == {"a", "b"}


def test_limits_of_a_job_that_is_over_change_nothing():
    from malletrain.core.events import JobCancelled

    c = controller()
    now = running(c, 1, 2, on=("a",))
    play(c, [(now, JobCancelled("j"))])
    assert play(c, [(now + 1.0, LimitsChanged("j", 1, 1))]) == []
    assert c.jobs["j"].submitted.max_nodes == 2


def test_one_that_waits_is_admitted_when_its_minimum_fits():
    c = controller()
    commands = play(c, [(0.0, job("big", 5, 8)), *nodes("a", "b"), (5.0, Tick())])
    assert not of_kind(commands, Start)
    commands = play(c, [(10.0, LimitsChanged("big", 2, 8)), (15.0, Tick())])
    (start,) = of_kind(commands, Start)
    assert set(start.nodes) == {"a", "b"}
    play(c, [(16.0, RescaleFinished("big"))])
