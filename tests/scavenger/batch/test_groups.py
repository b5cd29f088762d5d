"""Which leases share a job, and what it is called."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scavenger.batch.groups import MAX_NAME, leases_in, name_of, packs

NUMBERS = st.sets(st.integers(1, 400), min_size=1, max_size=64)


@given(NUMBERS)
def test_a_name_says_which_leases_share_the_job(numbers):
    leases = [f"l{number}" for number in sorted(numbers)]
    name = name_of(leases)
    if name is None:
        assert len(leases) > 20
    elif len(leases) == 1:
        assert (name, leases_in(name)) == (leases[0], ())
    else:
        assert leases_in(name) == tuple(leases)
        assert len(name) <= MAX_NAME


@pytest.mark.parametrize(
    "name", ["l7", "check", "l", "l1-", "l1-99999999999", "l1+", "l1-3-5", "1-3", "l1-3@n2", ""]
)
def test_other_names_are_of_no_such_job(name):
    assert leases_in(name) == ()


@pytest.mark.parametrize(
    "name", ["l1-65", "l1-33+100-131", "l" + "+".join(["1-60"] * 140), "l" + "0" * 170 + "1-2"]
)
def test_a_name_of_more_leases_than_a_job_can_have_is_none_of_ours(name):
    assert leases_in(name) == ()
    assert len(leases_in("l1-64")) == 64


def test_what_the_store_does_not_number_shares_no_job():
    assert name_of(["l1", "m2"]) is None
    assert name_of(["l1", "lease"]) is None


LIMITS = st.lists(
    st.tuples(st.sampled_from(["ann", "bob"]), st.floats(60.0, 50_000.0)), min_size=1, max_size=30
)


@given(LIMITS, st.integers(1, 8))
def test_leases_of_one_kind_and_of_similar_limits_share_jobs(requests, most):
    numbered = [(f"l{i}", *one) for i, one in enumerate(requests, 1)]
    groups = packs(numbered, most, lambda w: w[0], lambda w: w[1], lambda w: w[2])
    assert sorted(one for pack in groups for one in pack) == sorted(numbered)
    for pack in groups:
        assert len(pack) <= most
        assert len({owner for _, owner, _ in pack}) == 1
        limits = [limit for _, _, limit in pack]
        assert max(limits) <= 2.0 * min(limits)


def test_no_more_jobs_than_there_must_be():
    requests = [(f"l{i}", 600.0 + i) for i in range(20)]
    sizes = [len(p) for p in packs(requests, 8, lambda w: w[0], lambda w: "", lambda w: w[1])]
    assert sizes == [8, 8, 4]
