"""Planning: what a candidate's bid says, whose turn there is room for, and that every plan is one
that can be carried out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from allocator import Allocation, Goal, NodeInfo, RescaleCost, ScalingCurve, make_bid
from malletrain.core.planning import Candidate, guarantees, make_plan, neutral_curve, smallest_size
from malletrain.core.pools import Pool
from malletrain.core.settings import PlanningSettings
from tests.draws import cases

COST = RescaleCost(up_s=15.0, down_s=10.0, start_s=20.0)
SETTINGS = PlanningSettings(t_fwd_s=100.0, cost=COST)


DEFAULT, GPU = Pool("default"), Pool("gpu")


def machine(*names, node_class="default"):
    return {name: NodeInfo(Pool(node_class)) for name in names}


def sizes(plan):
    return {job: len(nodes) for job, nodes in plan.nodes.items()}


# --- the bid of a broken job ---


@pytest.mark.parametrize(
    ("size", "running", "restarting"),
    [
        (1, 100 * 10 - 20 * 10, 100 * 10 - 20 * 10),
        (2, 100 * 20, 100 * 20 - 20 * 10),
        (3, 100 * 25 - 20 * 15, 100 * 25 - 20 * 15),
    ],
)
def test_a_job_that_restarts_anyway_pays_for_it_at_its_own_size_too(size, running, restarting):
    curve = ScalingCurve.of({1: 10.0, 2: 20.0, 3: 25.0})
    bids = [
        make_bid("j", curve, current=2, max_nodes=3, t_fwd_s=100.0, cost=COST, broken=r)
        for r in (False, True)
    ]
    assert [bid.value(("default", size)) for bid in bids] == [running, restarting]


def test_a_candidate_but_for_some_fields_is_one_made_of_them_anew():
    c = Candidate("j", 2, 8, ("a", "b"), weight=2.0, sizes=(2, 4))
    assert c.but(weight=3.0, must_run=True) == replace(c, weight=3.0, must_run=True)
    assert (c.weight, c.must_run) == (2.0, False), "it is left as it was"


def test_starting_from_nothing_costs_a_start_restarting_or_not():
    curve = ScalingCurve.of({1: 10.0})
    bids = [
        make_bid("j", curve, max_nodes=1, t_fwd_s=100.0, cost=COST, broken=r) for r in (False, True)
    ]
    assert bids[0].value(("default", 1)) == bids[1].value(("default", 1)) == 800.0


def test_a_broken_job_grows_where_a_running_one_stays():
    curve = ScalingCurve.of(
        {2: 100.0, 3: 112.0}
    )  # 3 nodes: 100 s · 12/s gained for 15 s · 100/s, or for 5 s · 100/s more
    nodes = machine("a", "b", "c")
    for broken, size in ((False, 2), (True, 3)):
        candidate = Candidate("j", 2, 3, ("a", "b"), curve=curve, broken=broken)
        assert sizes(make_plan([candidate], nodes, SETTINGS)) == {"j": size}


# --- plans ---


def test_kept_nodes_come_first_and_in_their_order():
    plan = make_plan([Candidate("j", 1, 3, ("c", "b"))], machine("a", "b", "c"), SETTINGS)
    assert plan.nodes == {"j": ("c", "b", "a")}


def test_nodes_that_are_gone_are_not_kept():
    plan = make_plan([Candidate("j", 1, 3, ("x", "b"), broken=True)], machine("a", "b"), SETTINGS)
    assert plan.nodes == {"j": ("b", "a")}


def test_fixed_jobs_keep_what_they_have_and_nobody_else_gets_it():
    jobs = [
        Candidate("still", 1, 4, ("a",), fixed=True),
        Candidate("other", 1, 4, (), weight=100.0),
    ]
    plan = make_plan(jobs, machine("a", "b", "c"), SETTINGS)
    assert plan.nodes == {"still": ("a",), "other": ("b", "c")}


def test_every_candidate_is_in_the_plan_even_when_there_is_nothing_for_it():
    jobs = [
        Candidate("wide", 9, 9, ()),
        Candidate("odd", 3, 3, (), sizes=(2,)),
        Candidate("j", 1, 1, ()),
    ]
    assert sizes(make_plan(jobs, machine("a", "b"), SETTINGS)) == {"wide": 0, "odd": 0, "j": 1}
    assert sizes(make_plan(jobs, {}, SETTINGS)) == {"wide": 0, "odd": 0, "j": 0}
    assert make_plan([], machine("a"), SETTINGS).nodes == {}


def test_must_run_beats_any_value():
    jobs = [
        Candidate("rich", 2, 2, ("a", "b"), weight=1e6),
        Candidate("poor", 1, 1, (), weight=1e-6, must_run=True),
    ]
    assert sizes(make_plan(jobs, machine("a", "b"), SETTINGS)) == {"rich": 0, "poor": 1}


def test_a_job_moves_to_another_class_only_where_that_pays_for_a_start():
    nodes = {**machine("a", "b"), **machine("g1", "g2", "g3", node_class="gpu")}
    few = Candidate("j", 1, 3, ("a", "b"), curve=ScalingCurve.of({2: 100.0, 3: 110.0}))
    much = Candidate("j", 1, 3, ("a", "b"), curve=ScalingCurve.of({2: 100.0, 3: 150.0}))
    assert make_plan([few], nodes, SETTINGS).nodes == {"j": ("a", "b")}
    assert make_plan([much], nodes, SETTINGS).nodes == {"j": ("g1", "g2", "g3")}


def test_a_job_that_asks_for_a_kind_gets_nodes_of_that_kind_or_none():
    nodes = {**machine("a", "b", "c"), **machine("h/gpu.0", "h/gpu.1", node_class="gpu")}
    jobs = [
        Candidate("g", 1, 8, (), node_class="gpu"),
        Candidate("any", 1, 8, ()),
        Candidate("x", 1, 8, (), node_class="xpu"),
    ]
    plan = make_plan(jobs, nodes, SETTINGS)
    assert {job: set(nodes) for job, nodes in plan.nodes.items()} == {
        "g": {"h/gpu.0", "h/gpu.1"},
        "any": {"a", "b", "c"},
        "x": set(),
    }


def test_a_tie_between_classes_goes_to_the_favoured_one():
    nodes = {**machine("a"), **machine("g", node_class="gpu"), **machine("x", node_class="xpu")}
    for node, node_class in (("a", "default"), ("g", "gpu"), ("x", "xpu")):
        plan = make_plan([Candidate("j", 1, 1, ())], nodes, SETTINGS, {Pool(node_class)})
        assert plan.nodes == {"j": (node,)}


def test_nodes_that_are_worth_nothing_are_left_free():
    flat = ScalingCurve.of({1: 10.0, 2: 20.0, 3: 20.0})
    assert sizes(
        make_plan([Candidate("j", 1, 8, (), curve=flat)], machine(*"abcdefgh"), SETTINGS)
    ) == {"j": 2}


def test_efficiency_shares_equally_between_a_light_and_a_heavy_model():
    jobs = [
        Candidate(
            name,
            1,
            4,
            (),
            goal=Goal.EFFICIENCY,
            curve=ScalingCurve.of({1: rate, 2: 1.9 * rate, 4: 3.0 * rate}),
        )
        for name, rate in (("light", 1000.0), ("heavy", 1.0))
    ]
    assert sizes(make_plan(jobs, machine(*"abcd"), SETTINGS)) == {"light": 2, "heavy": 2}


def test_an_unmeasured_job_is_taken_to_be_like_the_measured_ones():
    curve = ScalingCurve.of({1: 1000.0, 2: 1900.0, 4: 3500.0})
    candidates = [Candidate("known", 1, 4, (), curve=curve), Candidate("new", 1, 4, ())]
    plan = make_plan(candidates, machine(*"abcd"), SETTINGS)
    assert sizes(plan) == {"known": 2, "new": 2}


def test_another_solver_decides_the_sizes_and_placement_stays():
    def one_each(bids, capacity, settings):
        return Allocation({bid.job: (DEFAULT, 1) for bid in bids}, 0.0, 0.0, 0.0, "heuristic", 0.0)

    plan = make_plan(
        [Candidate("j", 1, 3, ("c",)), Candidate("k", 1, 3, ())],
        machine(*"abc"),
        SETTINGS,
        solver=one_each,
    )
    assert plan.nodes == {"j": ("c",), "k": ("a",)}


@pytest.mark.parametrize(
    ("largest", "points"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])]
)
def test_neutral_curve(largest, points):
    curve = neutral_curve(largest, 0.9, 7.0)
    assert [k for k, _ in curve.points] == points
    assert curve.at(largest) == pytest.approx(7.0 * largest**0.9)


@pytest.mark.parametrize(
    ("low", "high", "allowed", "smallest"),
    [
        (2, 8, None, 2),
        (3, 8, (1, 2, 4, 8), 4),
        (3, 3, (2, 4), None),
        (1, 1, (1,), 1),
        (5, 9, (16, 8), 8),
    ],
)
def test_smallest_size(low, high, allowed, smallest):
    assert smallest_size(low, high, allowed) == smallest


# --- turns ---


def waiting(name, low, *, on=(), high=99, allowed=None):
    return Candidate(name, low, high, tuple(on), sizes=allowed)


@pytest.mark.parametrize(
    ("holders", "queue", "free", "granted"),
    [
        ([], [waiting("a", 2), waiting("b", 2)], {DEFAULT: 4}, {"a", "b"}),
        ([], [waiting("a", 2), waiting("b", 2)], {DEFAULT: 3}, {"a"}),
        ([], [waiting("a", 3), waiting("b", 1)], {DEFAULT: 2}, set()),
        ([waiting("h", 2)], [waiting("a", 2)], {DEFAULT: 3}, {"h"}),
        ([waiting("h", 9), waiting("k", 1)], [waiting("a", 2)], {DEFAULT: 3}, {"k", "a"}),
        ([], [waiting("a", 3), waiting("b", 3)], {DEFAULT: 3, GPU: 3}, {"a", "b"}),
        ([], [waiting("a", 4), waiting("b", 1)], {DEFAULT: 3, GPU: 3}, set()),
        ([], [waiting("a", 1, allowed=(4,)), waiting("b", 1)], {DEFAULT: 4}, {"a"}),
        ([], [waiting("a", 3, allowed=(2,))], {DEFAULT: 4}, set()),
        ([], [waiting("a", 1)], {}, set()),
    ],
)
def test_guarantees(holders, queue, free, granted):
    assert guarantees(holders, queue, free, {}) == granted


def test_a_holder_keeps_its_turn_on_its_own_class():
    nodes = machine("a", "b")
    holders = [waiting("h", 2, on=("a", "b"))]
    assert guarantees(holders, [waiting("q", 3)], {DEFAULT: 2, GPU: 3}, nodes) == {"h", "q"}


def test_who_comes_twice_in_the_queue_takes_its_minimum_once():
    """A job that starves and of which nothing is known is there for both."""
    both = waiting("a", 2)
    queue = [both, both, waiting("b", 2)]
    assert guarantees([], queue, {DEFAULT: 4}, {}) == {"a", "b"}
    assert guarantees([both], queue, {DEFAULT: 4}, {}) == {"a", "b"}


# --- every plan can be carried out ---


@st.composite
def situations(draw):
    classes = draw(st.lists(st.sampled_from(["default", "gpu"]), min_size=0, max_size=8))
    nodes = {f"n{i}": NodeInfo(Pool(c)) for i, c in enumerate(classes)}
    free = list(nodes)
    candidates = []
    for j in range(draw(st.integers(1, 4))):
        low = draw(st.integers(1, 4))
        high = low + draw(st.integers(0, 4))
        allowed = draw(st.sampled_from([None, (1, 2, 4), (3,)]))
        mine = [n for n in free if nodes[n].pool.node_class == "default"][
            : draw(st.integers(0, min(3, high)))
        ]
        free = [n for n in free if n not in mine]
        lost = ("gone",) * draw(st.integers(0, 1)) if mine else ()
        fits = low <= len(mine) and (allowed is None or len(mine) in allowed)
        curve = draw(
            st.sampled_from(
                [None, ScalingCurve.of({1: 10.0, 3: 5.0, 4: 40.0}), ScalingCurve.of({2: 0.0})]
            )
        )
        candidates.append(
            Candidate(
                f"j{j}",
                low,
                high,
                (*mine, *lost),
                weight=draw(st.sampled_from([0.0, 1.0, 3.0])),
                curve=curve,
                sizes=allowed,
                fixed=fits and not lost and draw(st.booleans()),
                must_run=draw(st.booleans()),
                broken=bool(lost) or draw(st.booleans()),
            )
        )
    return candidates, nodes


@settings(max_examples=cases(100), deadline=None)
@given(situations())
def test_a_plan_gives_nobody_what_it_may_not_have(situation):
    candidates, nodes = situation
    plan = make_plan(candidates, nodes, SETTINGS)
    assert set(plan.nodes) == {c.job for c in candidates}
    use = Counter(node for job_nodes in plan.nodes.values() for node in job_nodes)
    assert max(use.values(), default=0) <= 1
    for c in candidates:
        job_nodes = plan.nodes[c.job]
        assert set(job_nodes) <= set(nodes)
        if c.fixed:
            assert job_nodes == c.nodes
        elif job_nodes:
            assert c.min_nodes <= len(job_nodes) <= c.max_nodes
            assert c.sizes is None or len(job_nodes) in c.sizes
            assert len({nodes[n].pool for n in job_nodes}) == 1
            common = [n for n in c.nodes if n in job_nodes]
            assert list(job_nodes[: len(common)]) == common, "they come first, in their order"
