"""How much a trial counts by how far it has come."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator import NodeInfo
from malletrain.core.planning import Candidate, make_plan
from malletrain.core.pools import Pool
from malletrain.core.settings import PlanningSettings
from malletrain.sweep.engine import rung, weights


@pytest.mark.parametrize(
    ("step", "passed"), [(None, 0), (0, 0), (1, 0), (2, 1), (5, 1), (6, 2), (17, 2), (18, 3)]
)
def test_rungs_passed(step, passed):
    assert rung(step, first=2, reduction=3) == passed


def test_those_above_count_more_and_the_last_have_all_of_it():
    result = weights({1: 0, 2: 1, 3: 3}, 8.0)
    assert result[1] < result[2] < result[3] == 8.0
    assert weights({3: 3}, 8.0) == {3: 8.0}
    assert weights({}, 8.0) == {}


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 12), min_size=1))
def test_no_trial_counts_more_than_the_sweep_was_given(rungs):
    result = weights(rungs, 1.0)
    assert max(result.values()) == 1.0
    assert min(result.values()) > 0
    for a, b in zip(rungs, list(rungs)[1:], strict=False):
        assert (result[a] >= result[b]) or rungs[a] < rungs[b]


def plan_of(trials, nodes):
    """Nodes of each trial: (rungs passed, nodes that it has) by name."""
    weight = weights({name: rungs for name, (rungs, _) in trials.items()}, 1.0)
    machine = {f"n{i}": NodeInfo(Pool("default")) for i in range(nodes)}
    free = iter(machine)
    candidates = [
        Candidate(name, 1, 4, tuple(islice(free, node_count)), weight=weight[name])
        for name, (_, node_count) in trials.items()
    ]
    plan = make_plan(candidates, machine, PlanningSettings())
    return {name: len(plan.nodes.get(name, ())) for name in trials}


def test_many_begin_small_before_one_of_promise_grows():
    waiting = {f"new{n}": (0, 0) for n in range(3)}
    assert plan_of({"far": (4, 1), **waiting}, 4) == {"far": 1, "new0": 1, "new1": 1, "new2": 1}


def test_what_is_left_over_goes_to_those_of_most_promise():
    assert plan_of({"far": (3, 1), "new": (0, 1)}, 4) == {"far": 3, "new": 1}
    assert plan_of({"far": (3, 1), "new": (0, 1)}, 3) == {"far": 2, "new": 1}


def test_the_last_one_takes_all_that_it_can_use():
    assert plan_of({"last": (3, 1)}, 6) == {"last": 4}
