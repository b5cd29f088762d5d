"""What the daemon knows of goals after a restart."""

from __future__ import annotations

import pytest

from allocator import ScalingCurve
from malletrain.core.controller import Controller
from malletrain.core.events import GapsSeen, JobCancelled, JobSubmitted, NodeJoined, Tick
from malletrain.core.forecast import Forecast, Made
from malletrain.core.goals import GoalStanding, OwnerGoals
from malletrain.core.settings import ControllerSettings
from malletrain.daemon.jobs.goals import JobGoals, goals_problem
from malletrain.daemon.site.metrics import Metrics
from malletrain.protocol.event_kinds import EventKind
from malletrain.render.goals import sentence
from malletrain.store.records import EventRow, GoalRow, JobRow
from malletrain.store.store import Store

HOUR, DAY = 3600.0, 86400.0
NOW = 100 * DAY


class Stopped:
    """A clock that stands still."""

    def now(self) -> float:
        return NOW


@pytest.fixture
def store(tmp_path):
    with Store.open(f"sqlite:///{tmp_path / 'jobs.db'}") as store:
        yield store


def forecast_of(store, made_at, state, ended):
    """A job of which it was said that it takes an hour; its id."""
    job = store.add_job(
        JobRow(store.new_job_id(), "j", "ann", "{}", state, submitted=made_at, ended=ended)
    ).id
    first = [made_at, made_at + 0.9 * HOUR, made_at + HOUR, made_at + 1.1 * HOUR]
    for standing in ("on_track", "at_risk"):
        data = {"standing": standing, "first": first}
        store.add_event(EventRow(made_at + 9.0, EventKind.GOAL_STANDING, job, data=data))
    return job


def test_a_deadline_lies_ahead_and_within_a_lifetime():
    for deadline, words in (
        (NOW - 1.0, "has passed already"),
        (NOW, "has passed already"),
        (NOW + 1.0, ""),
        (NOW + 101 * 366 * DAY, "is more than 100 years ahead; give a nearer one"),
        (1e300, "is more than 100 years ahead"),
    ):
        problem = goals_problem(OwnerGoals(deadline), "restart", NOW)
        assert words in problem
        assert bool(words) == bool(problem)


@pytest.mark.parametrize("work", [1e15, 3.6e5])
def test_what_would_end_beyond_any_calendar_is_said_not_to_end(store, work):
    """A client could not print such a time."""
    job = store.add_job(JobRow(store.new_job_id(), "j", "ann", "{}", "queued")).id
    controller = Controller(ControllerSettings())
    goals = JobGoals(store, Stopped(), controller, Metrics())
    row = GoalRow(job, NOW + DAY, None, work)
    store.goals.put(row)
    controller.handle(GapsSeen({"n0": (None, "default")}), NOW)
    curve = ScalingCurve.of([(1, 0.1 if work > 1e9 else 100.0)])
    controller.handle(
        JobSubmitted(job, 1, 1, curve=curve, goals=OwnerGoals(row.deadline, None, work)), NOW
    )
    view = goals.view(job, row)
    text = sentence(view, NOW)
    if work > 1e9:
        assert (view.ends, view.ends_low, view.ends_high) == (None, None, None)
        assert "it does not end" in text
    else:
        assert view.ends is not None
        assert "this ends" in text


def test_what_came_of_forecasts_is_known_after_a_restart(store):
    for number in range(40):
        made_at = NOW - DAY - number * HOUR
        forecast_of(store, made_at, "completed", made_at + 3 * HOUR)
    forecast_of(store, NOW - 90 * DAY, "completed", NOW - 89 * DAY)
    store.add_event(EventRow(NOW - HOUR, EventKind.GOAL_STANDING, "gone", data={"standing": "met"}))
    going = forecast_of(store, NOW - HOUR, "running", None)
    controller = Controller(ControllerSettings())
    JobGoals(store, Stopped(), controller, Metrics())
    past = controller.goals.past
    at = NOW - HOUR
    assert past.of(going) == Made(at, at + 0.9 * HOUR, at + HOUR, at + 1.1 * HOUR)
    raw = Forecast(NOW + HOUR, NOW + 0.9 * HOUR, NOW + 1.1 * HOUR)
    forecast = past.corrected(raw, NOW)
    # Forty jobs took three times as long; ten imagined ones stand for the doubt.
    assert forecast.end - NOW == pytest.approx(HOUR * 3**0.8)
    assert forecast.low - NOW == pytest.approx(0.9 * HOUR * (3 / 0.9) ** 0.8 * 0.8**0.2)


def test_deadlines_that_more_nodes_would_meet_are_counted(store):
    """On the one node that there is, both jobs would be late. Four would finish one in time."""
    controller, metrics = Controller(ControllerSettings()), Metrics()
    goals = JobGoals(store, Stopped(), controller, metrics)
    curve = ScalingCurve.of({1: 1.0, 2: 2.0, 4: 4.0})
    controller.handle(NodeJoined("n0"), NOW)
    for job, work in (("saved by four", 3 * HOUR), ("late on four", 9 * HOUR)):
        goals_of_owner = OwnerGoals(NOW + HOUR, None, work)
        controller.handle(JobSubmitted(job, 1, 4, curve=curve, goals=goals_of_owner), NOW)
    controller.handle(Tick(), NOW + 1.0)
    goals.keep(at_once=True)
    in_danger = metrics.registry.get_sample_value("malletrain_deadlines_in_danger")
    standings = {job: record.standing for job, record in controller.goals.records.items()}
    assert (in_danger, standings) == (
        1,
        {"saved by four": GoalStanding.INFEASIBLE, "late on four": GoalStanding.INFEASIBLE},
    )
    for job in standings:
        controller.handle(JobCancelled(job), NOW + 2.0)
    goals.keep(at_once=True)
    assert metrics.registry.get_sample_value("malletrain_deadlines_in_danger") == 0
