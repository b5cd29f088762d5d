"""Placement: no migration, and similar horizons and groups where there is a choice."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator import NodeInfo, PlacementError, place
from tests.draws import cases


def plain(*names: str) -> dict[str, NodeInfo]:
    return {name: NodeInfo("default") for name in names}


def lasting(**horizons: float | None) -> dict[str, NodeInfo]:
    return {name: NodeInfo("default", horizon_s=horizon) for name, horizon in horizons.items()}


def grouped(**groups: str) -> dict[str, NodeInfo]:
    return {name: NodeInfo("default", group=group) for name, group in groups.items()}


def sizes(**jobs: int) -> dict[str, tuple[str, int]]:
    return {job: ("default", size) for job, size in jobs.items()}


@st.composite
def situations(
    draw: st.DrawFn,
) -> tuple[dict[str, tuple[str, int]], dict[str, list[str]], dict[str, NodeInfo]]:
    classes = ["x", "y"]
    nodes: dict[str, NodeInfo] = {}
    for i in range(draw(st.integers(0, 14))):
        horizon = draw(st.sampled_from([None, 0.0, 30.0, 300.0, 1e9]))
        nodes[f"n{i}"] = NodeInfo(
            draw(st.sampled_from(classes)), horizon, draw(st.sampled_from([None, "g", "h"]))
        )
    owners = {name: draw(st.integers(-1, 3)) for name in [*nodes, "gone1", "gone2"]}
    current = {
        f"j{j}": [name for name in sorted(owners, reverse=True) if owners[name] == j]
        for j in range(4)
    }
    free = {c: sum(info.pool == c for info in nodes.values()) for c in classes}
    requested = {}
    for job in current:
        pool = draw(st.sampled_from(classes))
        size = draw(st.integers(0, free[pool]))
        free[pool] -= size
        requested[job] = (pool, size)
    return requested, current, nodes


@given(situations(), st.randoms(use_true_random=False))
@settings(max_examples=cases(400), deadline=None)
def test_what_holds_for_every_plan(
    situation: tuple[dict[str, tuple[str, int]], dict[str, list[str]], dict[str, NodeInfo]],
    chance: random.Random,
) -> None:
    requested, current, nodes = situation
    plan = place(requested, current, nodes)
    assigned = [name for has in plan.values() for name in has]
    assert len(assigned) == len(set(assigned)), "a node runs one job"
    for job, (pool, size) in requested.items():
        has = plan.get(job, ())
        assert len(has) == size
        assert all(nodes[name].pool == pool for name in has)
        still = [name for name in current[job] if name in nodes and nodes[name].pool == pool]
        staying = [name for name in still if name in has]
        assert len(staying) == min(size, len(still)), (
            "no migration: shrink to a subset, grow by adding"
        )
        assert list(has[: len(staying)]) == staying, "kept nodes come first, in their order"

    def shuffled(mapping: dict) -> dict:  # type: ignore[type-arg]
        items = list(mapping.items())
        chance.shuffle(items)
        return dict(items)

    assert place(requested, shuffled(current), shuffled(nodes)) == plan, (
        "the order of jobs at work and of nodes does not matter"
    )


def test_shrinking_gives_up_the_nodes_that_end_first() -> None:
    nodes = lasting(a=100.0, b=5000.0, c=100.0, d=7000.0)
    assert place(sizes(j=2), {"j": ["a", "b", "c", "d"]}, nodes) == {"j": ("b", "d")}


def test_shrinking_gives_up_the_idle_nodes_first() -> None:
    nodes = {
        "a": NodeInfo("default", horizon_s=9000.0),
        "b": NodeInfo("default", horizon_s=100.0, busy=True),
        "c": NodeInfo("default", horizon_s=9000.0).with_horizon(50.0),
        "d": NodeInfo("default", horizon_s=9000.0, busy=True).with_horizon(50.0),
    }
    assert place(sizes(j=3), {"j": ["a", "b", "c", "d"]}, nodes) == {"j": ("a", "b", "d")}
    assert place(sizes(j=1), {"j": ["a", "b", "c", "d"]}, nodes) == {"j": ("b",)}


def test_of_equal_nodes_shrinking_gives_up_those_with_least_training_data() -> None:
    nodes = {
        "a": NodeInfo("default", reread_s=10.0),
        "b": NodeInfo("default", reread_s=50.0).with_horizon(None),
        "c": NodeInfo("default", reread_s=50.0),
        "d": NodeInfo("default"),
    }
    assert place(sizes(j=3), {"j": ["a", "b", "c", "d"]}, nodes) == {"j": ("a", "b", "c")}
    assert place(sizes(j=1), {"j": ["a", "b", "c", "d"]}, nodes) == {"j": ("b",)}
    nodes["d"] = NodeInfo("default", busy=True)
    assert place(sizes(j=1), {"j": ["a", "b", "c", "d"]}, nodes) == {"j": ("d",)}


def test_shrinking_gives_up_the_groups_where_the_job_has_fewest() -> None:
    nodes = grouped(a="g", b="h", c="g", d="g")
    assert place(sizes(j=3), {"j": ["a", "b", "c", "d"]}, nodes) == {"j": ("a", "c", "d")}


def test_growing_takes_nodes_that_last_about_as_long() -> None:
    nodes = lasting(mine=300.0, short=20.0, alike=330.0, longer=9000.0)
    assert place(sizes(j=2), {"j": ["mine"]}, nodes) == {"j": ("mine", "alike")}


def test_nodes_that_end_together_go_to_one_job() -> None:
    nodes = lasting(a=100.0, b=9000.0, c=100.0, d=9000.0)
    assert place(sizes(small=2, tall=2), {}, nodes) == {"small": ("b", "d"), "tall": ("a", "c")}


def test_a_new_job_prefers_nodes_nobody_expects_back() -> None:
    assert place(sizes(j=1), {}, lasting(a=9000.0, b=None)) == {"j": ("b",)}


def test_of_equal_newcomers_the_first_has_the_nodes_that_last_longest() -> None:
    nodes = lasting(a=100.0, b=9000.0)
    assert place(sizes(j9=1, j10=1), {}, nodes) == {"j9": ("b",), "j10": ("a",)}
    assert place(sizes(j10=1, j9=1), {}, nodes) == {"j10": ("b",), "j9": ("a",)}


def test_growing_stays_in_the_group() -> None:
    nodes = grouped(a="h", mine="g", b="g", c="h", d="h")
    assert place(sizes(j=2), {"j": ["mine"]}, nodes) == {"j": ("mine", "b")}


def test_a_new_job_takes_the_smallest_group_that_has_room() -> None:
    nodes = grouped(a="large", b="large", c="large", d="fits", e="fits", f="tiny")
    assert place(sizes(j=2), {}, nodes) == {"j": ("d", "e")}


def test_a_job_that_changes_class_leaves_all_its_nodes() -> None:
    nodes = {"a": NodeInfo("x"), "b": NodeInfo("y")}
    assert place({"j": ("y", 1)}, {"j": ["a"]}, nodes) == {"j": ("b",)}


def test_a_lost_node_is_replaced() -> None:
    assert place(sizes(j=2), {"j": ["gone", "b"]}, plain("a", "b", "c")) == {"j": ("b", "a")}


def test_a_job_without_nodes_is_not_in_the_plan() -> None:
    assert place(sizes(j=0, k=1), {"j": ["a"]}, plain("a")) == {"k": ("a",)}


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(
        PlacementError,
        match="The plan gives job j 3 nodes of pool default, but besides the 1 that it keeps",
    ):
        place(sizes(j=3), {"j": ["a"]}, plain("a", "b"))


def test_two_jobs_on_one_node_are_refused() -> None:
    with pytest.raises(PlacementError, match="Node a belongs to both j and k"):
        place(sizes(j=1, k=1), {"j": ["a"], "k": ["a"]}, plain("a", "b"))


def test_a_job_with_a_long_start_gets_the_nodes_that_stay_longest() -> None:
    """Even though another one is larger, and its own node is about to go."""
    nodes = lasting(own=40.0, a=50.0, b=60.0, c=5000.0)
    placed = place(sizes(big=2, slow=2), {"slow": ["own"]}, nodes, longest={"slow"})
    assert placed["slow"] == ("own", "c")
    assert set(placed["big"]) == {"a", "b"}
    assert place(sizes(big=2, slow=2), {"slow": ["own"]}, nodes)["slow"] == ("own", "a")
