"""The node-by-node reference: the same optimum as ours, and the published form's flaws."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allocator import BidError, RescaleCost, ScalingCurve, make_bid, solve
from tests.allocator.oracles.nodewise import Form, NodewiseJob
from tests.allocator.oracles.nodewise import solve as nodewise
from tests.allocator.strategies import curves
from tests.draws import cases

COST = RescaleCost(up_s=18.0, down_s=12.0, start_s=15.0)
LINE = ScalingCurve.of({1: 10.0, 64: 640.0})


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[NodewiseJob], list[str]]:
    nodes = [f"n{i}" for i in range(draw(st.integers(1, 7)))]
    owner = [draw(st.integers(-1, 2)) for _ in nodes]
    jobs = []
    for j in range(draw(st.integers(1, 3))):
        low = draw(st.integers(1, 4))
        current = tuple(n for n, who in zip(nodes, owner, strict=True) if who == j)
        jobs.append(
            NodewiseJob(
                f"j{j}",
                draw(curves(8)),
                low,
                low + draw(st.integers(0, 6)),
                current,
                draw(st.sampled_from([1.0, 2.5])),
            )
        )
    return jobs, nodes


def ours(jobs: list[NodewiseJob], nodes: list[str], cost: RescaleCost) -> float:
    bids = [
        make_bid(
            j.name,
            j.curve,
            current=len(j.current),
            min_nodes=j.min_nodes,
            max_nodes=j.max_nodes,
            weight=j.weight,
            cost=cost,
        )
        for j in jobs
    ]
    return solve(bids, {"default": len(nodes)}, time_limit_s=30.0).objective


@given(machines())
@settings(max_examples=cases(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_corrected_form_has_our_optimum(machine: tuple[list[NodewiseJob], list[str]]) -> None:
    jobs, nodes = machine
    reference = nodewise(jobs, nodes, cost=COST)
    assert reference.allocation.status == "optimal"
    assert reference.allocation.objective == pytest.approx(
        ours(jobs, nodes, COST), rel=1e-7, abs=1e-4
    )
    assigned = [name for has in reference.nodes.values() for name in has]
    assert len(assigned) == len(set(assigned))
    for job in jobs:
        has = set(reference.nodes[job.name])
        assert not has or job.min_nodes <= len(has) <= job.max_nodes
        assert has <= set(job.current) or has >= set(job.current), "nobody migrates"


@given(machines())
@settings(max_examples=cases(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_published_form_is_never_better_than_ours_with_free_starts(
    machine: tuple[list[NodewiseJob], list[str]],
) -> None:
    jobs, nodes = machine
    free_start = RescaleCost(COST.up_s, COST.down_s, 0.0)
    reference = nodewise(jobs, nodes, cost=COST, form=Form.PUBLISHED)
    best = ours(jobs, nodes, free_start)
    assert reference.allocation.status in ("optimal", "infeasible")
    assert reference.allocation.objective <= best + 1e-6 * abs(best) + 1e-4


def test_the_published_big_m_caps_a_change_at_half_the_machine() -> None:
    nodes = [f"n{i}" for i in range(9)]
    job = NodewiseJob("a", LINE, 1, 9)
    assert nodewise([job], nodes, form=Form.CORRECTED).allocation.size("a") == 9
    assert nodewise([job], nodes, form=Form.PUBLISHED).allocation.size("a") == 5


def test_in_the_published_form_a_job_that_holds_the_machine_cannot_shrink() -> None:
    nodes = [f"n{i}" for i in range(4)]
    job = NodewiseJob("a", LINE, 1, 1, current=tuple(nodes))
    assert nodewise([job], nodes, form=Form.PUBLISHED).allocation.status == "infeasible"
    assert nodewise([job], nodes, form=Form.CORRECTED).allocation.size("a") in (0, 1)


def test_starting_is_free_in_the_published_form() -> None:
    job = NodewiseJob("a", ScalingCurve.of({1: 10.0}), 1, 1)
    published = nodewise([job], ["n"], cost=COST, form=Form.PUBLISHED)
    corrected = nodewise([job], ["n"], cost=COST)
    assert published.allocation.objective == pytest.approx(120 * 10.0)
    assert corrected.allocation.objective == pytest.approx((120 - 15) * 10.0)


def test_kept_nodes_come_first_in_their_order() -> None:
    job = NodewiseJob("a", LINE, 1, 4, current=("n2", "n0"))
    assert nodewise([job], ["n0", "n1", "n2", "n3"]).nodes["a"] == ("n2", "n0", "n1", "n3")


@pytest.mark.parametrize(
    ("jobs", "says"),
    [
        ([NodewiseJob("a", LINE, 1, 2, ("gone",))], "Job a runs on gone"),
        (
            [NodewiseJob("a", LINE, 1, 2, ("n",)), NodewiseJob("b", LINE, 1, 2, ("n",))],
            "Node n belongs to both a and b",
        ),
    ],
)
def test_a_map_that_makes_no_sense_is_refused(jobs: list[NodewiseJob], says: str) -> None:
    with pytest.raises(BidError, match=says):
        nodewise(jobs, ["n"])


def test_without_jobs_or_nodes_the_plan_is_empty() -> None:
    assert nodewise([], ["n"]).nodes == {}
    assert nodewise([NodewiseJob("a", LINE, 1, 2)], []).allocation.sizes == {}
