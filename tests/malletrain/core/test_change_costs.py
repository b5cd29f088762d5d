"""What a change of nodes costs in a plan: the start of a service's processes, and training data
that are read again.
"""

from __future__ import annotations

import math

import pytest

from allocator import NodeInfo, RescaleCost, ScalingCurve
from malletrain.core.change_costs import (
    MAX_MEASURED,
    NodeLifetimes,
    StartCost,
    append_measured,
    charged_s,
    expected_start_s,
    reread_changed,
    reread_s,
    with_reread,
)
from malletrain.core.events import (
    CurveChanged,
    DataCached,
    NodeJoined,
    RescaleFinished,
    StartCostChanged,
    Tick,
)
from malletrain.core.planning import Candidate, make_plan
from malletrain.core.pools import Pool
from malletrain.core.settings import PlanningSettings
from tests.malletrain.core.controller_script import CHEAP, controller, job, nodes, play, running

BASE = RescaleCost(up_s=1.0, down_s=1.0, start_s=5.0)


@pytest.mark.parametrize(
    ("start_s", "horizon_s", "charged"),
    [
        (5.0, None, 5.0),  # paid back within the forward-looking time
        (30.0, None, 30.0),
        (60.0, None, 30.0),  # 120 · 60 / 240
        (600.0, None, 30.0),
        (60.0, 600.0, 30.0),  # a node that lasts longer is not worth more
        (60.0, 120.0, 60.0),  # half of the node's time is for loading
        (60.0, 80.0, 90.0),  # three quarters of it
        (60.0, 60.0, 120.0),  # all of it
        (60.0, 1.0, 120.0),
        (0.0, 0.0, 120.0),  # the node is gone
    ],
)
def test_a_start_is_charged_in_proportion_to_the_time_of_the_node(start_s, horizon_s, charged):
    assert charged_s(start_s, 120.0, horizon_s) == pytest.approx(charged)


def test_the_expected_start_is_the_median_of_the_last_ones():
    measured = ()
    for seconds in (170.0, 900.0, 180.0):  # one met a slow file system
        measured = append_measured(measured, seconds)
    assert measured == (170.0, 900.0, 180.0)
    assert expected_start_s(measured) == 180.0
    for _ in range(MAX_MEASURED):
        measured = append_measured(measured, 60.0)
    assert measured == (60.0,) * MAX_MEASURED
    start = StartCost(5.0, {"fat": 60.0})
    assert (start.expected_s("fat"), start.expected_s("thin")) == (60.0, 60.0), (
        "as on the other class"
    )
    assert StartCost(5.0, {"a": 60.0, "b": 70.0}).expected_s("thin") == 70.0
    assert StartCost(5.0).expected_s("thin") == 5.0


def horizons(*values, node_class="default"):
    return {f"n{i}": NodeInfo(Pool(node_class), horizon) for i, horizon in enumerate(values)}


def test_a_job_may_have_its_own_nodes_and_those_that_outlast_a_start():
    nodes = {**horizons(50.0, 400.0, 61.0, None), "other": NodeInfo(Pool("fat"), 900.0)}
    terms = NodeLifetimes(nodes).start_terms(Pool("default"), (), 60.0, 120.0, BASE)
    assert terms.limit == 3
    # the middle one of those that last stays for 400 s: longer than what a start is charged over
    assert terms.cost == RescaleCost(1.0, 1.0, start_s=30.0, join_s=30.0)
    beside = NodeLifetimes(nodes).start_terms(Pool("default"), ("n0", "n2"), 60.0, 120.0, BASE)
    assert beside.limit == 4, "n0 is loaded already"
    assert NodeLifetimes(nodes).start_terms(Pool("thin"), (), 60.0, 120.0, BASE).limit == 0


def plan(candidates, nodes):
    return make_plan(candidates, nodes, PlanningSettings(cost=CHEAP)).nodes


def service(start_s, high=4, nodes=(), rate=100.0, **more):
    return Candidate(
        "s",
        1,
        high,
        nodes,
        curve=ScalingCurve.of({1: rate, high: rate * high}),
        cost=BASE,
        start=StartCost(start_s),
        **more,
    )


def test_short_gaps_are_not_worth_a_long_start():
    nodes = horizons(30.0, 90.0, 500.0)
    assert plan([service(5.0)], nodes)["s"] == ("n2", "n1", "n0")
    assert plan([service(60.0)], nodes)["s"] == ("n2", "n1")
    assert plan([service(180.0)], nodes)["s"] == ("n2",)
    assert plan([service(600.0)], nodes)["s"] == ()
    assert plan([service(600.0, must_run=True)], nodes)["s"] == (), "it would never be ready"


def test_a_start_that_is_longer_than_the_plan_still_pays():
    assert len(plan([service(600.0)], horizons(None, None))["s"]) == 2


def test_the_nodes_that_stay_longest_go_to_the_job_with_the_long_start():
    """Also if it has nodes already, to whose horizons those of others would be closer."""
    nodes = {**horizons(100.0, 5000.0, 110.0), "own": NodeInfo(Pool("default"), 105.0)}
    other = Candidate("t", 1, 2, (), curve=ScalingCurve.of({1: 500.0, 2: 1000.0}), cost=CHEAP)
    # A gain of 100 nodes' worth: both are placed.
    result = plan([other, service(60.0, high=2, nodes=("own",))], nodes)
    assert result["s"] == ("own", "n1")
    assert set(result["t"]) == {"n0", "n2"}


def test_growth_is_charged_for_the_added_nodes_only():
    """A second node adds 120·100 − 30·100 − 1·100 = 8900; a training of r samples/s adds 119·r."""
    own = service(60.0, high=2, nodes=("n0",))
    for rate, sizes in ((74.0, 2), (76.0, 1)):
        training = Candidate("t", 1, 1, (), curve=ScalingCurve.of({1: rate}), cost=CHEAP)
        result = plan([own, training], horizons(None, None))
        assert len(result["s"]) == sizes, rate


def test_a_measured_start_changes_what_is_planned():
    c = controller()
    curve = ScalingCurve.of({1: 10.0, 2: 20.0})
    play(
        c,
        [
            (0.0, job("s", 1, 2)),
            (0.0, CurveChanged("s", curve, BASE)),
            (0.0, StartCostChanged("s", StartCost(5.0))),
            (0.0, NodeJoined("a", horizon_s=1000.0)),
            (5.0, Tick()),
            (6.0, RescaleFinished("s")),
            (7.0, StartCostChanged("s", StartCost(5.0, {"default": 200.0}))),
            (8.0, NodeJoined("b", horizon_s=150.0)),
            (12.0, Tick()),
        ],
    )
    assert c.jobs["s"].nodes == ("a",), "b is gone before a process on it would be ready"
    play(c, [(20.0, NodeJoined("c", horizon_s=math.inf)), (25.0, Tick())])
    assert c.jobs["s"].nodes == ("a", "c")


# --- what nodes are worth now ---


def at_work(c, curve, on=("a", "b", "c")):
    """A service on these nodes; return the time."""
    play(
        c,
        [
            (0.0, job("s", 1, 4)),
            (0.0, CurveChanged("s", ScalingCurve.of(curve), BASE, returns_useless=True)),
            *((0.0, NodeJoined(name)) for name in on),
            (5.0, Tick()),
            (6.0, RescaleFinished("s")),
        ],
    )
    return 10.0


def revalued(curve):
    return CurveChanged("s", ScalingCurve.of(curve), BASE, returns_useless=True)


def test_a_service_gives_back_the_nodes_that_are_worth_nothing_more():
    c = controller(release_after_s=10.0)
    now = at_work(c, {1: 10.0, 4: 40.0})
    assert len(c.jobs["s"].nodes) == 3
    play(c, [(now, revalued({1: 10.0, 4: 10.0})), (now + 5.0, Tick())])
    assert len(c.jobs["s"].nodes) == 1
    commands = play(c, [(now + 60.0, Tick())])
    assert any(type(each).__name__ == "ReleaseLeases" for each in commands)
    assert len(c.nodes) == 1


def test_a_worthless_service_has_no_nodes_and_does_not_wait_for_any():
    c = controller(release_after_s=10.0)
    now = at_work(c, {1: 10.0, 4: 40.0})
    play(c, [(now, revalued({1: 0.0})), (now + 5.0, Tick())])
    assert c.jobs["s"].nodes == ()
    play(c, [(now + 20.0, NodeJoined("d")), (now + 1000.0, Tick())])  # starvation: 100 s
    assert c.jobs["s"].nodes == ()
    assert c.next_wakeup() is None, "nothing is due for it"


def test_a_service_at_zero_nodes_asks_for_some():
    c = controller(release_after_s=10.0)
    now = at_work(c, {1: 0.0})
    assert c.jobs["s"].nodes == ()
    play(c, [(now + 1000.0, revalued({2: 10.0, 4: 10.0})), (now + 1005.0, NodeJoined("x"))])
    play(c, [(now + 1006.0, NodeJoined("y")), (now + 1010.0, Tick())])
    assert len(c.jobs["s"].nodes) == 2
    assert not c.jobs["s"].guaranteed_until, "it has not starved meanwhile"


def test_a_farm_keeps_nodes_that_nobody_else_wants():
    c = controller()
    now = at_work(c, {1: 10.0, 4: 40.0})
    flat = CurveChanged("s", ScalingCurve.of({1: 10.0, 4: 10.0}), BASE)
    play(c, [(now, flat), (now + 5.0, Tick())])
    assert len(c.jobs["s"].nodes) == 3


def test_a_service_for_which_no_node_lasts_takes_no_guarantee_from_others():
    """Both starve; the one that has waited longer could not use its turn."""
    c = controller(shares=None)
    play(
        c,
        [
            (0.0, job("s", 1, 1)),
            (0.0, CurveChanged("s", ScalingCurve.of({1: 10.0}), BASE)),
            (0.0, StartCostChanged("s", StartCost(600.0))),
            (1.0, job("big", 1, 1, curve=ScalingCurve.of({1: 1000.0}))),
            (2.0, job("small", 1, 1, curve=ScalingCurve.of({1: 1.0}))),
            (3.0, NodeJoined("a", horizon_s=300.0)),
            (8.0, Tick()),
            (9.0, RescaleFinished("big")),
        ],
    )
    assert c.jobs["big"].nodes == ("a",)
    play(c, [(130.0, Tick())])  # starvation: 100 s
    assert c.jobs["small"].nodes == ("a",)
    assert c.jobs["s"].nodes == ()


@pytest.mark.parametrize(
    ("present", "sample_s", "expected"),
    [
        ({"a": 1000, "b": 500, "c": 0}, 0.01, {"a": 5.0, "b": 2.5, "c": 0.0}),  # by two others
        ({"a": 1000, "b": 500}, 0.01, {"a": 10.0, "b": 5.0}),
        ({"a": 1000}, 0.01, {"a": 10.0}),  # by a node that replaces it
        ({}, 0.01, {}),
    ],
)
def test_the_other_nodes_read_side_by_side_what_a_node_had(present, sample_s, expected):
    assert reread_s(present, sample_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("reread", "up_s", "down_s"),
    [
        # Six samples of 40 s on three nodes: the fourth one owns 60 s of them, four nodes read it.
        ([30.0, 50.0, 40.0], 1.0 + 15.0, 2.0 + 30.0),
        ([60.0], 1.0 + 15.0, 2.0 + 60.0),
        ([0.0, 36.0], 1.0 + 4.0, 2.0),  # it gives up the cold one
        ([0.0, 0.0], 1.0, 2.0),
        ([1e12, 1e9], 1.0 + 60.0, 2.0 + 60.0),  # half of the forward-looking time
        ([], 1.0, 2.0),
    ],
)
def test_reading_again_lengthens_the_pauses(reread, up_s, down_s):
    changed = with_reread(RescaleCost(up_s=1.0, down_s=2.0, start_s=3.0, join_s=4.0), reread, 120.0)
    assert (changed.up_s, changed.down_s) == pytest.approx((up_s, down_s))
    assert (changed.start_s, changed.join_s) == (3.0, 4.0)


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        ({"a": 100.0}, {"a": 91.0}, False),
        ({"a": 101.0}, {"a": 91.0}, True),
        ({"a": 0.9}, {}, False),  # less than a second
        ({"a": 1.1}, {}, True),
        ({}, {"a": 50.0}, True),
        ({"a": 50.0}, {"a": 50.0, "b": 0.0}, False),
        ({}, {}, False),
    ],
)
def test_small_changes_are_not_told(new, old, expected):
    assert reread_changed(new, old) is expected


@pytest.mark.parametrize(
    ("warm_s", "rate", "size"),
    [(0.0, 102.0, 2), (0.0, 103.0, 1), (30.0, 152.5, 2), (30.0, 153.5, 1)],
)
def test_a_warm_node_is_worth_what_reading_its_data_again_would_cost(warm_s, rate, size):
    """Its second node adds 120 · 100 + (1 + warm) · 200; another job adds 119 · rate."""
    own = Candidate("j", 1, 2, ("a", "b"), curve=ScalingCurve.of({1: 100.0, 2: 200.0}), cost=CHEAP)
    other = Candidate("k", 1, 1, (), curve=ScalingCurve.of({1: rate}), cost=CHEAP)
    infos = dict.fromkeys("ab", NodeInfo(Pool("default"), reread_s=warm_s))
    result = make_plan([own, other], infos, PlanningSettings(t_fwd_s=120.0, cost=CHEAP)).nodes
    assert len(result["j"]) == size


@pytest.mark.parametrize(
    ("reread", "given_up"),
    [
        ({}, "c"),  # all equal: the last rank
        ({"a": 5.0, "b": 40.0, "c": 60.0}, "a"),
        ({"a": 60.0, "c": 60.0}, "b"),
    ],
)
def test_a_warm_node_is_kept_where_all_else_is_equal(reread, given_up):
    c = controller()
    now = running(c, 1, 3, on=("a", "b", "c"))
    play(
        c,
        [
            (now, CurveChanged("j", ScalingCurve.of({1: 10.0, 3: 12.0}), CHEAP)),
            (now, DataCached("j", reread)),
            (now, job("k", 1, 1)),
            (now, CurveChanged("k", ScalingCurve.of({1: 100.0}), CHEAP)),
            (now + 5.0, Tick()),
        ],
    )
    assert c.jobs["k"].nodes == (given_up,)
    assert c.nodes[given_up].info.reread_s == 0.0, "the other job has nothing there"
    reread_there = {name: c.nodes[name].info.reread_s for name in c.jobs["j"].nodes}
    assert reread_there == {name: reread.get(name, 0.0) for name in {"a", "b", "c"} - {given_up}}


def test_a_node_that_becomes_cold_is_told_too():
    c = controller()
    now = running(c, 1, 3, on=("a", "b"))
    play(c, [(now, DataCached("j", {"a": 9.0, "b": 7.0})), (now + 1, DataCached("j", {"a": 3.0}))])
    assert [c.nodes[name].info.reread_s for name in "ab"] == [3.0, 0.0]
    play(c, [*nodes("c", at=now + 2), (now + 10, Tick())])
    assert set(c.jobs["j"].nodes) == {"a", "b", "c"}
