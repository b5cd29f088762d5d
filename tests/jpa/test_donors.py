"""The source of a profile's nodes: a table of cases, and the rules for any cluster."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpa.donors import Donor, choose_nodes

TABLE = [
    # requested, free, donors, minimum → from_free, donor, count
    (4, 6, [Donor("a", 5)], 1, (4, None, 0)),
    (4, 4, [], 1, (4, None, 0)),
    (0, 3, [Donor("a", 5)], 0, (0, None, 0)),
    # the donor left alone for longest gives; never interrupted comes first
    (4, 2, [Donor("a", 5, 1, 100.0), Donor("b", 5, 1, 50.0)], 1, (2, "b", 2)),
    (4, 2, [Donor("a", 5, 1, 100.0), Donor("b", 5, 1, None)], 1, (2, "b", 2)),
    (4, 2, [Donor("a", 5, 1, 0.0), Donor("b", 5, 1, None)], 1, (2, "b", 2)),
    # of equals, the one with most to spare; then by name
    (4, 0, [Donor("b", 3), Donor("a", 8)], 1, (0, "a", 4)),
    (4, 0, [Donor("b", 8), Donor("a", 8)], 1, (0, "a", 4)),
    # never the last node, never below the minimum
    (4, 2, [Donor("a", 1)], 1, (2, None, 0)),
    (4, 2, [Donor("a", 5, 5)], 1, (2, None, 0)),
    (4, 0, [Donor("a", 5, 4)], 1, (0, "a", 1)),
    (4, 0, [Donor("a", 3, 0)], 1, (0, "a", 2)),
    # too little for the job's minimum: nothing moves, nobody is interrupted
    (4, 1, [Donor("a", 2)], 3, (0, None, 0)),
    (4, 0, [], 1, (0, None, 0)),
    # a donor that does not help is passed over for one that does
    (6, 0, [Donor("a", 2, 1, None), Donor("b", 9, 1, 99.0)], 4, (0, "b", 6)),
    # allowed sizes of the donor: it gives the fewest that are enough
    (3, 0, [Donor("a", 8, 1, None, (1, 2, 4, 8))], 1, (0, "a", 4)),
    (7, 0, [Donor("a", 8, 2, None, (1, 2, 4, 8))], 1, (0, "a", 6)),
    (3, 0, [Donor("a", 4, 1, None, (4, 8))], 1, (0, None, 0)),
]


@pytest.mark.parametrize(("requested", "free", "donors", "minimum", "expected"), TABLE)
def test_table(requested, free, donors, minimum, expected):
    offer = choose_nodes(requested, free, donors, minimum=minimum)
    assert (offer.from_free, offer.from_donor, offer.count) == expected
    assert offer.reason.endswith(".")


DONORS = st.builds(
    Donor,
    st.sampled_from("abcdefgh"),
    st.integers(1, 20),
    st.integers(0, 20),
    st.none() | st.floats(0, 1e4),
    st.none() | st.lists(st.integers(1, 20), unique=True, max_size=6).map(tuple),
)


@settings(deadline=None)
@given(
    st.integers(0, 30),
    st.integers(0, 30),
    st.lists(DONORS, max_size=6, unique_by=lambda d: d.job),
    st.integers(0, 30),
)
def test_the_rules_hold_for_any_cluster(requested, free, donors, minimum):
    offer = choose_nodes(requested, free, donors, minimum=minimum)
    assert 0 <= offer.from_free <= min(free, requested)
    assert offer.total <= requested
    if offer.total:
        assert offer.total >= min(minimum, requested)
    if offer.from_donor is None:
        assert offer.count == 0
        return
    assert offer.from_free == free  # free ones first
    donor = next(d for d in donors if d.job == offer.from_donor)
    remaining = donor.nodes - offer.count
    assert offer.count >= 1
    assert remaining >= max(1, donor.min_nodes)
    assert donor.sizes is None or remaining in donor.sizes
    missing = requested - offer.from_free
    able = [d for d in donors if d.spare > 0 and offer.from_free + min(d.spare, missing) >= minimum]
    assert all(
        donor.last_interrupted is None or (d.last_interrupted or 0) >= donor.last_interrupted
        for d in able
        if d.last_interrupted
    )
    if donor.last_interrupted is not None:
        assert all(d.last_interrupted is not None for d in able)


def test_the_refusal_says_what_is_missing():
    offer = choose_nodes(8, 1, [Donor("a", 3)], minimum=4)
    assert offer.total == 0
    assert "4 nodes more" in offer.reason
    assert "1 is free" in offer.reason
    assert "more than 2" in offer.reason


def test_negative_numbers_are_refused():
    with pytest.raises(ValueError, match="negative"):
        choose_nodes(-1, 0, [])
