"""Training data in the memory of nodes: what they cost in a plan, and which nodes a job keeps."""

import pytest

from allocator import NodeInfo, RescaleCost, ScalingCurve
from malletrain.core.events import CurveChanged, DataCached, Tick
from malletrain.core.planning import Candidate, make_plan
from malletrain.core.pools import Pool
from malletrain.core.reread_costs import differs, reread_s, with_reread
from malletrain.core.settings import PlanningSettings
from tests.malletrain.core.controller_script import CHEAP, controller, job, nodes, play, running


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
    assert differs(new, old) is expected


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
