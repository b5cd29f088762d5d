"""How soon a plan follows when a job ends and others wait for its nodes, as tables: events in,
commands out.
"""

from __future__ import annotations

import pytest

from malletrain.core.commands import Start
from malletrain.core.events import JobCancelled, JobCompleted, RescaleFinished, Tick
from malletrain.core.settings import ControllerSettings
from tests.malletrain.core.controller_script import controller, gaps, job, nodes, play


def one_each(c, *names):
    """Jobs of one node each, all running; return the time."""
    play(
        c,
        [
            *((0.0, job(name, 1, 1)) for name in names),
            *nodes(*(f"n-{name}" for name in names)),
            (1.0, Tick()),
            *((5.0, RescaleFinished(name)) for name in names),
            (6.5, Tick()),
        ],
    )
    return 10.0


@pytest.mark.parametrize("ending", [JobCompleted("a"), JobCancelled("a")])
def test_where_a_job_waits_for_all_that_is_idle_the_end_of_another_is_no_time_to_wait(ending):
    c = controller()
    now = one_each(c, "a", "b")
    play(c, [(now, job("next", 1, 4)), (now + 5, ending)])
    assert c.next_wakeup() == now + 5 + ControllerSettings.idle_debounce_s
    assert play(c, [(now + 5.5, Tick())]) == [Start("next", ("n-a",))]


def test_jobs_that_end_with_one_word_are_one_plan():
    c = controller()
    now = one_each(c, "a", "b")
    plans = c.plans
    play(c, [(now, job("c", 1, 1)), (now, job("d", 1, 1)), (now + 2, Tick())])
    ends = (JobCancelled(name) for name in ("a", "c", "b"))
    assert not [s for s in play(c, [(now + 3, end) for end in ends]) if isinstance(s, Start)]
    assert play(c, [(now + 4, Tick())]) == [Start("d", ("n-a",))]
    assert c.plans == plans + 2, "one after the submission, one after the ends"


@pytest.mark.parametrize(
    ("waiting", "news"),
    [
        ([], []),
        ([job("next", 1, 4)], [gaps("c")]),
        ([job("next", 3, 4)], []),
    ],
    ids=["nobody waits", "a node may come", "too few for it"],
)
def test_else_a_plan_waits_for_what_else_happens(waiting, news):
    c = controller()
    now = one_each(c, "a", "b")
    play(c, [*((now, spec) for spec in waiting), *((now + 4, event) for event in news)])
    play(c, [(now + 5, JobCompleted("a"))])
    assert c.state.plan_at == now + 5 + c.settings.debounce_s


def test_nodes_that_are_all_waited_for_need_not_all_be_there():
    c = controller()
    jobs = [job(name, 1, 4) for name in ("a", "b", "c")]
    play(c, [*((0.0, each) for each in jobs), (5.0, gaps("x", "y"))])
    play(c, nodes("x", at=8.0))
    assert c.state.plan_at == 8.0 + c.settings.debounce_s
    c = controller()
    play(c, [(0.0, job("a", 1, 4)), (5.0, gaps("x", "y"))])
    play(c, nodes("x", at=8.0))
    assert c.state.plan_at == 8.0 + c.settings.arrival_s
