"""Values of many sizes computed together equal those computed one at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator import (
    BidError,
    BidRequest,
    Goal,
    JobTerms,
    RescaleCost,
    ScalingCurve,
    make_bids,
    valuation,
)
from allocator.curves import CurveTable
from tests.allocator.oracles import scalar_valuation

RATES = st.floats(0.0, 1e4).map(lambda rate: rate if rate > 1e-6 else 0.0)
SECONDS = st.floats(0.0, 100.0)
COSTS = st.builds(RescaleCost, SECONDS, SECONDS, SECONDS, SECONDS)


@st.composite
def curves(draw: st.DrawFn, largest: int = 1) -> ScalingCurve:
    sizes = draw(st.sets(st.integers(1, 24), min_size=1, max_size=6)) | {draw(st.just(largest))}
    return ScalingCurve.of({size: draw(RATES) for size in sizes})


@st.composite
def bid_requests(draw: st.DrawFn, job: str) -> BidRequest:
    low = draw(st.integers(1, 6))
    high = draw(st.integers(low, 20))
    classes = draw(st.sampled_from([("x",), ("y", "x"), ("z",)]))
    allowed = draw(st.none() | st.sets(st.integers(low, high), min_size=1).map(tuple))
    bidder = JobTerms(
        job,
        low,
        high,
        allowed,
        draw(st.floats(0.0, 16.0)),
        draw(st.sampled_from(Goal)),
        broken=draw(st.booleans()),
    )
    return BidRequest(
        bidder,
        {name: draw(curves(largest=24)) for name in classes},
        draw(st.integers(0, 22)),
        draw(st.sampled_from(["x", "y"])),
        draw(st.floats(1.0, 1e3)),
        draw(COSTS),
        cost_in=draw(st.dictionaries(st.sampled_from(classes), COSTS)),
        limits=draw(st.dictionaries(st.sampled_from(classes), st.integers(0, 22))),
    )


@given(st.data(), st.integers(1, 7))
def test_not_a_bit_differs_from_one_size_after_the_other(data: st.DataObject, number: int) -> None:
    requests = [data.draw(bid_requests(f"j{each}")) for each in range(number)]
    for request, bid in zip(requests, make_bids(requests), strict=True):
        assert bid.job == request.bidder.job
        for name, options in bid.options.items():
            assert dict(
                zip(options.sizes.tolist(), options.values.tolist(), strict=True)
            ) == scalar_valuation.values(request, name)
        omitted = request.curves.keys() - bid.options.keys()
        assert not any(scalar_valuation.values(request, name) for name in omitted)


@given(st.data(), st.integers(2, 7), st.integers(1, 30))
def test_a_bid_is_the_same_in_whatever_company_it_is_made(
    data: st.DataObject, number: int, block_sizes: int
) -> None:
    requests = [data.draw(bid_requests(f"j{each}")) for each in range(number)]
    alone = [make_bids([request])[0] for request in requests]
    assert make_bids(requests) == alone
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(valuation, "_MAX_BLOCK_SIZES", block_sizes)
        assert make_bids(requests) == alone


@given(st.lists(curves(), min_size=1, max_size=5))
def test_many_curves_are_read_as_each_of_them(curve_list: list[ScalingCurve]) -> None:
    at = np.array([0.0, 0.5, 1.0, 1.75, 2.0, 7.3, 24.0, 24.5, 1e6])
    read = CurveTable(curve_list).rates(
        np.arange(len(curve_list)).repeat(len(at)), np.tile(at, len(curve_list))
    )
    each = [curve.rates(at).tolist() for curve in curve_list]
    assert read.tolist() == pytest.approx(list(itertools.chain.from_iterable(each)), rel=1e-12)


def test_growth_without_a_pause_costs_what_is_added_while_it_is_not_ready() -> None:
    curve = ScalingCurve.of({1: 10.0, 4: 40.0})
    cost = RescaleCost(up_s=1.0, down_s=2.0, start_s=30.0, join_s=30.0)
    [bid] = make_bids([BidRequest(JobTerms("j", 1, 4), {"x": curve}, 2, "x", 100.0, cost)])
    options = bid.options["x"]
    values = dict(zip(options.sizes.tolist(), options.values.tolist(), strict=True))
    assert values == {1: 1000.0 - 40.0, 2: 2000.0, 3: 3000.0 - 20.0 - 300.0, 4: 4000.0 - 620.0}


def test_the_one_that_cannot_be_valued_is_refused() -> None:
    sound = ScalingCurve.of({1: 1.0})
    requests = [
        BidRequest(JobTerms("a"), {"x": sound}),
        BidRequest(JobTerms("b", weight=1e9), {"x": ScalingCurve.of({1: 1e300})}),
    ]
    with np.errstate(over="ignore"), pytest.raises(BidError, match="1 nodes is inf"):
        make_bids(requests)
    assert make_bids([]) == []


def test_the_pool_of_the_nodes_that_a_job_has_is_needed() -> None:
    request = BidRequest(JobTerms("a", 1, 4), {"x": ScalingCurve.of({1: 1.0})}, current=2)
    with pytest.raises(BidError, match="Job a has 2 current nodes; give their pool"):
        make_bids([request])


def test_a_bid_cannot_be_written_to() -> None:
    (bid,) = make_bids([BidRequest(JobTerms("a"), {"x": ScalingCurve.of({1: 1.0})})])
    with pytest.raises(ValueError, match="read-only"):
        bid.options["x"].values[0] = 2.0
