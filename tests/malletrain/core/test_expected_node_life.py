"""What is foretold of nodes, from the event to the bid, and what a job is told of its losses."""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator import Cohort, LossForecast, NodeInfo, RescaleCost
from malletrain.core.commands import LossExpected
from malletrain.core.controller import Controller
from malletrain.core.events import ForecastsUpdated, NodeJoined, RescaleFinished, Tick
from malletrain.core.expected_node_life import ExpectedNodeLife, cohorts
from malletrain.core.settings import ControllerSettings, PlanningSettings
from tests.malletrain.core.controller_script import gaps, job, nodes, play

STAYS = Cohort((0.0, 1000.0), (1.0, 1.0))
SOON = Cohort((0.0, 20.0, 21.0), (1.0, 1.0, 0.0))
HALF = Cohort((0.0, 100.0), (1.0, math.exp(-1.0)))
"""Its mean time to the end is 100 s, over the 100 s that plans look ahead."""


def controller():
    planning = PlanningSettings(
        t_fwd_s=100.0, cost=RescaleCost(1.0, 1.0, 1.0), look_ahead_s=100.0, heed_lifetimes=True
    )
    return Controller(ControllerSettings(planning, min_interval_s=0.0))


def foretold(**cohort_of):
    return ForecastsUpdated(
        {n: (cohort.mean_survival_s(1000.0), cohort) for n, cohort in cohort_of.items()}
    )


def losses(commands):
    return [c for c in commands if isinstance(c, LossExpected)]


def started(c, **cohort_of):
    """Start a job on all nodes; return the commands until it runs."""
    script = [(0.0, job("j", 1, 4)), (0.0, foretold(**cohort_of)), *nodes(*cohort_of)]
    return play(c, [*script, (2.0, Tick()), (5.0, RescaleFinished("j"))])


def test_what_is_told_of_the_same_thing_is_one_cohort():
    together = ((0.0, 60.0), (1.0, 0.5))
    forecast_of = cohorts(
        {"a": (9.0, together), "b": (8.0, together), "c": (7.0, ((0.0,), (1.0,)))}
    )
    assert forecast_of["a"][1] is forecast_of["b"][1]
    assert forecast_of["a"][1] is not forecast_of["c"][1]
    assert forecast_of["b"] == (8.0, Cohort(*together)) or forecast_of["b"][0] == 8.0
    assert (forecast_of["a"][1].times_s, forecast_of["a"][1].survival) == together


def test_a_job_has_its_own_nodes_first_then_free_ones_then_those_that_others_give_up():
    infos = {
        "mine": NodeInfo(cohort=STAYS),
        "free": NodeInfo(cohort=HALF),
        "theirs": NodeInfo(cohort=SOON),
    }
    lasting = ExpectedNodeLife(infos, [["mine"], ["theirs"]], 100.0, 30.0)
    (outlook,) = lasting.in_pool("default", [0], [9])
    _, hit, _ = outlook.expected_loss(np.array([1, 2, 3]))
    assert hit.tolist() == pytest.approx([0.0, 1.0 - math.exp(-1.0), 1.0])
    _, hit, _ = lasting.in_pool("default", [0], [2])[0].expected_loss(np.array([3]))
    assert hit[0] < 1.0, "no more than the job may have"


def test_a_plan_leaves_nodes_alone_that_are_about_to_go():
    c = controller()
    started(c, a=STAYS, b=STAYS)
    play(c, [(6.0, foretold(x=SOON)), (6.0, NodeJoined("x")), (10.0, Tick())])
    assert set(c.jobs["j"].nodes) == {"a", "b"}
    play(c, [(11.0, foretold(y=STAYS)), (11.0, NodeJoined("y")), (15.0, Tick())])
    assert set(c.jobs["j"].nodes) == {"a", "b", "y"}


def test_horizons_are_those_of_the_latest_word():
    c = controller()
    started(c, a=STAYS)
    c.handle(ForecastsUpdated({"a": (123.0, HALF), "elsewhere": (1.0, SOON)}), 7.0)
    assert c.nodes["a"].info == NodeInfo(horizon_s=123.0, cohort=HALF)
    assert c.state.usable["a"].cohort is HALF


def test_gaps_that_became_too_short_are_not_asked_for():
    c = Controller(ControllerSettings(min_horizon_s=60.0))
    play(c, [(0.0, job("j", 1, 4))])
    commands = c.handle_all(
        [gaps("a", "b"), ForecastsUpdated({"a": (30.0, SOON), "b": (90.0, STAYS)})], 1.0
    )
    assert [command.nodes for command in commands] == [("b",)]


def test_a_job_is_told_how_soon_it_is_expected_to_lose_a_node():
    c = controller()
    expected = losses(started(c, a=HALF))
    assert [(s.job, s.in_s) for s in expected] == [("j", pytest.approx(100.0))]


def test_it_is_said_again_when_it_has_changed_and_when_the_job_resumes():
    c = controller()
    started(c, a=HALF)
    again = Cohort((0.0, 100.0), (1.0, math.exp(-1.1)))
    assert not losses(play(c, [(10.0, foretold(a=again)), (10.0, NodeJoined("b")), (10.5, Tick())]))
    # The job grows. It hears of the loss once it trains again, maybe on another first node.
    expected = losses(play(c, [(12.0, Tick()), (15.0, RescaleFinished("j"))]))
    assert [s.in_s for s in expected] == [pytest.approx(100.0 / 1.1)]


def test_nothing_is_said_where_nothing_is_expected_or_foretold():
    c = controller()
    assert not losses(started(c, a=STAYS))
    blind = Controller(ControllerSettings(PlanningSettings(cost=RescaleCost(1.0, 1.0, 1.0))))
    assert not losses(started(blind, a=HALF))


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["", "ann", "bob"])), max_size=24),
    st.integers(1, 30),
)
def test_the_order_of_nodes_is_that_of_how_long_they_last(drawn, most):
    kinds = [Cohort((0.0, 100.0), (1.0, 0.2 * k)) for k in range(5)]
    infos = {f"n{k}": NodeInfo(cohort=kinds[kind]) for k, (kind, _) in enumerate(drawn)}
    owner = {f"n{k}": who for k, (_, who) in enumerate(drawn)}
    kind_of = {f"n{k}": kind for k, (kind, _) in enumerate(drawn)}
    mine = [n for n in infos if owner[n] == "ann"]
    longest = sorted(infos, key=lambda n: -kind_of[n])
    free = [n for n in longest if not owner[n]]
    theirs = [n for n in reversed(longest) if owner[n] == "bob"]
    order = [n for n in longest if owner[n] == "ann"] + (free + theirs)[: max(0, most - len(mine))]
    nodes_of = [[n for n in infos if owner[n] == who] for who in ("bob", "ann")]
    forecast = ExpectedNodeLife(infos, nodes_of, 100.0, 30.0).in_pool("default", [1], [most])[0]
    # The nodes one by one. A cohort that occurs twice counts twice in both forecasts.
    runs = [(infos[n].cohort, sum(1 for _ in same)) for n, same in _runs(order, owner, infos)]
    sizes = np.arange(1, most + 3)
    for one, other in zip(
        forecast.expected_loss(sizes),
        LossForecast(runs, 100.0, 30.0).expected_loss(sizes),
        strict=True,
    ):
        assert one.tolist() == pytest.approx(other.tolist())


@given(st.data())
def test_jobs_that_are_looked_at_together_expect_what_each_expects_alone(data):
    kinds = [Cohort((0.0, 100.0), (1.0, 0.2 * k)) for k in range(5)] + [None]
    infos, nodes_of = {}, [[] for _ in range(4)]
    for k in range(data.draw(st.integers(1, 24))):
        kind, pool = data.draw(st.sampled_from(kinds)), data.draw(st.sampled_from("xy"))
        infos[f"n{k}"] = NodeInfo(pool, cohort=kind)
        job = data.draw(st.integers(-1, 3))
        if job >= 0:
            nodes_of[job].append(f"n{k}")
    jobs = sorted(data.draw(st.sets(st.integers(0, 3), min_size=1)))
    most = [data.draw(st.integers(1, 30)) for _ in jobs]
    lasting = ExpectedNodeLife(infos, nodes_of, 100.0, 30.0)
    for pool in "xyz":
        together = lasting.in_pool(pool, jobs, most)
        for number, its_most, forecast in zip(jobs, most, together, strict=True):
            runs = _expected(infos, nodes_of, number, pool, its_most)
            alone = LossForecast(runs, 100.0, 30.0)
            assert forecast.counts.tolist() == [float(count) for _, count in runs]
            assert forecast.rows.tolist() == alone.rows.tolist()


def _expected(infos, nodes_of, job, pool, most):
    """(cohort, nodes) of a job in a pool in order, counted node by node."""
    cohorts = list(dict.fromkeys(info.cohort for info in infos.values()))
    longest = sorted(cohorts, key=lambda c: -(200.0 if c is None else c.mean_survival_s(100.0)))

    def counted(names, order):
        here = [infos[n].cohort for n in names if infos[n].node_class == pool]
        return [(c, here.count(c)) for c in order if c in here]

    taken = {n for names in nodes_of for n in names}
    runs = counted(nodes_of[job], longest)
    room = most - sum(count for _, count in runs)
    others = counted([n for n in infos if n not in taken], longest)
    others += counted(taken.difference(nodes_of[job]), longest[::-1])
    for cohort, count in others:
        if room > 0:
            runs.append((cohort, min(count, room)))
            room -= count
    return runs


def _runs(order, owner, infos):
    """Nodes that follow each other in one hand and one cohort, with the first of each."""
    for _, group in groupby(order, key=lambda n: (owner[n], id(infos[n].cohort))):
        same = list(group)
        yield same[0], same
