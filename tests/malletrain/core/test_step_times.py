"""Shares of a step, its cause and the advice: known answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.core.step_times import (
    ADVICE,
    SHARES,
    Bottleneck,
    RankTimes,
    breakdown,
)


def rank(number, step_s, data_s=None, exchange_s=None, snapshot_s=None):
    return RankTimes(number, f"n{number}", step_s, data_s, exchange_s, snapshot_s)


def test_shares_of_two_ranks():
    """Rank 1 comes last: it is in exchanges for 10 ms, which is the transfer."""
    result = breakdown([rank(0, 0.1, 0.01, 0.03), rank(1, 0.1, 0.02, 0.01)])
    assert result is not None
    assert result.step_s == pytest.approx(0.1)
    assert result.shares == pytest.approx(
        {"data": 0.15, "computing": 0.65, "others": 0.1, "transfer": 0.1}
    )
    assert list(result.shares) == ["data", "computing", "others", "transfer"]


def test_what_is_not_measured_is_computing_and_has_no_share():
    result = breakdown([rank(0, 0.2)])
    assert result is not None
    assert result.shares == {"computing": 1.0}
    assert result.cause is Bottleneck.NOTHING
    assert result.advice() == "No part of a step stands out: 100 % is computing."


def test_there_are_no_shares_without_steps():
    assert breakdown([]) is None
    assert breakdown([rank(0, 0.0)]) is None


@pytest.mark.parametrize(
    ("ranks", "cause", "share", "place"),
    [
        # all wait for data
        ([rank(0, 1.0, 0.4, 0.1), rank(1, 1.0, 0.4, 0.1)], Bottleneck.DATA, 0.4, ""),
        # data is not measured on one rank alone: that of the last one counts
        ([rank(0, 1.0, 0.05)], Bottleneck.NOTHING, 0.95, ""),
        # one rank waits for data, the other for it
        (
            [rank(0, 1.0, 0.1, 0.4), rank(1, 1.0, 0.4, 0.1)],
            Bottleneck.DATA_OF_ONE_RANK,
            0.4,
            "rank 1 on n1",
        ),
        # one rank computes for 0.9 s, the others for 0.5 s, and wait
        (
            [rank(0, 1.0, 0.0, 0.5), rank(1, 1.0, 0.0, 0.1), rank(2, 1.0, 0.0, 0.5)],
            Bottleneck.SLOW_RANK,
            0.4,
            "rank 1 on n1",
        ),
        # rank 0 saves, the other waits for it
        ([rank(0, 1.0, 0.0, 0.1, 0.3), rank(1, 1.0, 0.0, 0.4)], Bottleneck.SNAPSHOT, 0.3, ""),
        # all ranks save, as with a sharded model
        ([rank(k, 1.0, 0.0, 0.1, 0.2) for k in range(4)], Bottleneck.SNAPSHOT, 0.2, ""),
        # a slow network
        ([rank(0, 1.0, 0.1, 0.45), rank(1, 1.0, 0.1, 0.4)], Bottleneck.TRANSFER, 0.4, ""),
        ([rank(0, 1.0, 0.1, 0.75), rank(1, 1.0, 0.1, 0.7)], Bottleneck.MOSTLY_TRANSFER, 0.7, ""),
        # exchanges that are not measured: waits for others look like computing
        ([rank(0, 1.0, 0.05), rank(1, 1.0, 0.4)], Bottleneck.DATA_OF_ONE_RANK, 0.4, "rank 1 on n1"),
        ([rank(0, 1.0, 0.01), rank(1, 1.0, 0.05)], Bottleneck.NOTHING, 0.97, ""),
        ([rank(0, 1.0, None, None, 0.04), rank(1, 1.0)], Bottleneck.NOTHING, 0.98, ""),
        ([rank(0, 0.8), rank(1, 1.0)], Bottleneck.NOTHING, 1.0, ""),
        # several causes: the largest counts
        ([rank(0, 1.0, 0.3, 0.2), rank(1, 1.0, 0.3, 0.2)], Bottleneck.DATA, 0.3, ""),
        ([rank(0, 1.0, 0.2, 0.3), rank(1, 1.0, 0.2, 0.3)], Bottleneck.TRANSFER, 0.3, ""),
        # just below the thresholds
        ([rank(0, 1.0, 0.09, 0.14, 0.04), rank(1, 1.0, 0.09, 0.14)], Bottleneck.NOTHING, 0.75, ""),
    ],
)
def test_the_cause_is_that_of_the_rank_that_comes_last(ranks, cause, share, place):
    result = breakdown(ranks)
    assert result is not None
    assert (result.cause, result.place) == (cause, place)
    assert result.cause_share == pytest.approx(share)


def test_every_cause_has_advice():
    assert [cause for cause in Bottleneck if cause not in {row[0] for row in ADVICE}] == []


def test_the_advice_names_the_share_and_the_place():
    result = breakdown([rank(0, 1.0, 0.0, 0.5), rank(1, 1.0, 0.0, 0.1)])
    assert result is not None
    assert result.advice() == (
        "40 % of a step waits for rank 1 on n1, which computes longer than the others. Tell "
        "the operator of that node. Where it pays, the job moves off it, unless the site has "
        "turned that off ([nodes] slow_nodes)."
    )


seconds = st.none() | st.floats(0.0, 10.0)


@given(st.lists(st.tuples(st.floats(1e-6, 10.0), seconds, seconds, seconds), min_size=1))
def test_shares_are_those_of_a_whole(steps):
    """Whatever the reports are: parts and steps are read at different moments."""
    result = breakdown([rank(k, *step) for k, step in enumerate(steps)])
    assert result is not None
    assert sum(result.shares.values()) == pytest.approx(1.0)
    assert all(-1e-9 <= share <= 1.0 + 1e-9 for share in result.shares.values())
    assert set(result.shares) <= set(SHARES)
    assert 0.0 <= result.cause_share <= 1.0
    assert result.advice()
