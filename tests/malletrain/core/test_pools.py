"""Pools: a class of nodes and whose leases they are."""

from __future__ import annotations

import pytest

from malletrain.core.pools import by_class, class_of, largest, owner_of, pool


@pytest.mark.parametrize(
    ("node_class", "owner"), [("default", ""), ("gpu", "alice"), ("a b", "x-y_z$")]
)
def test_a_pool_is_a_class_and_an_owner(node_class, owner):
    name = pool(node_class, owner)
    assert (class_of(name), owner_of(name)) == (node_class, owner)
    assert owner or name == node_class


def test_pools_added_up():
    nodes = {
        pool("gpu", "alice"): 2,
        pool("gpu", "bob"): 3,
        pool("cpu", "bob"): 4,
        pool("cpu", "carol"): 0,
    }
    assert by_class(nodes) == {"gpu": 5, "cpu": 4}
    assert {owner: largest(nodes, owner) for owner in ("alice", "bob", "carol", "dave")} == {
        "alice": 2,
        "bob": 4,
        "carol": 0,
        "dave": 0,
    }
