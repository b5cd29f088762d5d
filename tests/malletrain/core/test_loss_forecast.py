"""Forecasts of gaps, from the event to the horizons of nodes and to what a job is told of its
losses.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator import NodeInfo, RescaleCost
from malletrain.core.commands import LossExpected
from malletrain.core.controller import Controller
from malletrain.core.events import ForecastsUpdated, NodeJoined, NodeLeaving, RescaleFinished, Tick
from malletrain.core.pools import Pool
from malletrain.core.settings import ControllerSettings, PlanningSettings
from scavenger.horizon import GapForecast
from tests.malletrain.core.controller_script import job, nodes, play

STAYS = GapForecast(1.0, 1e6, 0.0)
SOON = GapForecast(2.0, 150.0, 0.01)
LATER = GapForecast(3.0, 900.0, 0.002)


def controller():
    planning = PlanningSettings(cost=RescaleCost(1.0, 1.0, 1.0))
    return Controller(ControllerSettings(planning, min_interval_s=0.0))


def forecasts(**forecast_of):
    return ForecastsUpdated(forecast_of)


def losses(commands):
    return [c for c in commands if isinstance(c, LossExpected)]


def started(c, **forecast_of):
    """Start a job on all nodes; return the commands until it runs."""
    script = [(0.0, job("j", 1, 9)), (0.0, forecasts(**forecast_of)), *nodes(*forecast_of)]
    return play(c, [*script, (2.0, Tick()), (5.0, RescaleFinished("j"))])


def test_the_horizon_of_a_node_is_that_of_the_latest_forecast():
    c = controller()
    started(c, a=SOON)
    assert c.nodes["a"].info == NodeInfo(Pool("default"), horizon_s=150.0)
    c.handle(forecasts(a=LATER, elsewhere=SOON), 7.0)
    assert c.nodes["a"].info == c.state.usable["a"] == NodeInfo(Pool("default"), horizon_s=900.0)
    assert c.state.lasts_s("a") == 900.0
    c.handle(NodeJoined("b", horizon_s=60.0), 8.0)
    assert c.nodes["b"].info.horizon_s == 60.0, "what its gap was offered with"
    assert c.state.lasts_s("b") is None


def test_a_forecast_leaves_the_rest_of_a_node_as_it_was():
    assert NodeInfo("gpu", 10.0, "rack").with_horizon(99.0) == NodeInfo("gpu", 99.0, "rack")


@pytest.mark.parametrize(
    ("forecast_of", "in_s"),
    [
        ({"a": SOON}, 100.0),
        ({"a": SOON, "b": SOON}, 100.0),
        ({"a": SOON, "b": LATER}, 1.0 / 0.012),
        ({"a": LATER, "b": STAYS}, 500.0),
    ],
    ids=["one", "one cohort", "two cohorts", "one that stays"],
)
def test_the_rates_of_a_jobs_cohorts_add_up(forecast_of, in_s):
    expected = losses(started(controller(), **forecast_of))
    assert [(c.job, c.in_s) for c in expected] == [("j", pytest.approx(in_s))]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 0.1)), min_size=1, max_size=8))
def test_a_job_with_more_cohorts_loses_a_node_no_later(drawn):
    rate_of = dict(drawn)
    in_s = []
    for count in range(1, len(rate_of) + 1):
        cohorts = list(rate_of.items())[:count]
        forecast_of = {f"n{k}": GapForecast(float(k), 600.0, rate) for k, rate in cohorts}
        expected = losses(started(controller(), **forecast_of))
        in_s.append(expected[-1].in_s if expected else math.inf)
    assert in_s == sorted(in_s, reverse=True)


def test_a_node_that_is_leaving_is_no_longer_counted():
    c = controller()
    started(c, a=SOON, b=LATER)
    commands = play(
        c, [(10.0, NodeLeaving("a", 300.0)), (14.0, Tick()), (15.0, RescaleFinished("j"))]
    )
    assert [command.in_s for command in losses(commands)][-1:] == [pytest.approx(500.0)]


def test_it_is_sent_again_when_it_has_changed_and_when_the_job_resumes():
    c = controller()
    started(c, a=SOON)
    similar = SOON._replace(end_rate=0.011)
    assert not losses(
        play(c, [(10.0, forecasts(a=similar)), (10.0, NodeJoined("b")), (10.5, Tick())])
    )
    # The job grows. It is told when it trains again, maybe on another first node.
    expected = losses(play(c, [(12.0, Tick()), (15.0, RescaleFinished("j"))]))
    assert [command.in_s for command in expected] == [pytest.approx(100.0 / 1.1)]


def test_nothing_is_sent_without_forecasts_or_if_all_nodes_stay():
    assert not losses(started(controller(), a=STAYS))
    c = controller()
    assert not losses(
        play(c, [(0.0, job()), *nodes("a"), (2.0, Tick()), (5.0, RescaleFinished("j"))])
    )
