"""Every process computes the same owner, and a change of nodes changes no more than it must."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.datacache.reader import owners

NODES = st.lists(st.text("abcn0123/.", min_size=1, max_size=8), min_size=1, max_size=9, unique=True)
SAMPLES = st.lists(st.integers(0, 10**9), max_size=60)
KNOWN = ["n2", "n3", "n3", "n1", "n1", "n2", "n3", "n2", "n2", "n2", "n2", "n3"]
"""Owners of samples 0 to 11 among n1, n2 and n3, computed with whole numbers of Python."""


def test_a_known_answer_that_no_release_may_change():
    # Nodes of different releases in one job must agree.
    assert owners(range(12), ["n1", "n2", "n3"]) == KNOWN


@given(SAMPLES, NODES, st.randoms(use_true_random=False))
def test_the_order_of_the_nodes_does_not_matter(samples, nodes, random):
    shuffled = random.sample(nodes, len(nodes))
    assert owners(samples, nodes) == owners(samples, shuffled)
    assert set(owners(samples, nodes)) <= set(nodes)


@given(SAMPLES, NODES)
def test_only_the_samples_of_a_node_that_leaves_get_another_owner(samples, nodes):
    if len(nodes) < 2:
        return
    gone, *rest = nodes
    before, after = owners(samples, nodes), owners(samples, rest)
    for old, new in zip(before, after, strict=True):
        assert new == old or old == gone


def test_nodes_own_equal_shares_and_a_newcomer_takes_evenly_from_all():
    nodes, samples = [f"n{n}" for n in range(8)], range(40_000)
    before = owners(samples, nodes)
    for count in Counter(before).values():
        assert count == pytest.approx(5_000, rel=0.06)  # 4.5 standard deviations of a fair draw
    after = owners(samples, [*nodes, "newcomer"])
    moved = Counter(old for old, new in zip(before, after, strict=True) if new != old)
    assert sum(moved.values()) == pytest.approx(40_000 / 9, rel=0.06)
    assert set(moved) == set(nodes)
    assert max(moved.values()) < 2 * min(moved.values())


def test_a_job_without_nodes_is_refused():
    with pytest.raises(ValueError, match="without nodes"):
        owners([1], [])
