"""Pools: a class of nodes and whose leases they are."""

from __future__ import annotations

import copy
import pickle

import pytest

from allocator import NodeInfo
from malletrain.core.events import NodeJoined
from malletrain.core.pools import Pool, by_class, largest, pool_sizes
from malletrain.core.state import ControllerState
from scavenger.horizon import GapForecast


@pytest.mark.parametrize(
    ("pool", "words"),
    [(Pool("default"), "default"), (Pool("gpu", "alice"), "gpu of alice")],
)
def test_the_name_of_a_pool_in_sentences(pool, words):
    assert f"{pool}" == str(pool) == words


def test_there_is_one_object_for_a_pool():
    pool = Pool("gpu", "alice")
    assert Pool("gpu", "alice") is pool
    assert pickle.loads(pickle.dumps(pool)) is copy.deepcopy(pool) is pool
    assert len({pool, Pool("gpu", "alice"), Pool("gpu", "bob"), Pool("gpu")}) == 3
    with pytest.raises(AttributeError, match="cannot be changed"):
        pool.owner = "bob"
    with pytest.raises(AttributeError, match="cannot be changed"):
        del pool.owner


def test_pools_are_ordered_by_class_then_by_owner():
    first, second, third = Pool("a", "z"), Pool("b"), Pool("b", "a")
    assert sorted([third, first, second], key=lambda pool: pool.order) == [first, second, third]
    assert repr(first) == "Pool('a', 'z')"


def test_a_pool_is_of_its_class_and_of_any():
    pool = Pool("gpu", "alice")
    assert pool.is_of_class("gpu")
    assert pool.is_of_class("")
    assert not pool.is_of_class("cpu")


def test_pools_added_up():
    sizes = {
        Pool("gpu", "alice"): 2,
        Pool("gpu", "bob"): 3,
        Pool("cpu", "bob"): 4,
        Pool("cpu", "carol"): 0,
    }
    assert by_class(sizes) == {"gpu": 5, "cpu": 4}
    assert {owner: largest(sizes, owner) for owner in ("alice", "bob", "carol", "dave")} == {
        "alice": 2,
        "bob": 4,
        "carol": 0,
        "dave": 0,
    }


def test_the_nodes_of_each_pool_are_counted():
    nodes = {
        "a": NodeInfo(Pool("gpu", "alice")),
        "b": NodeInfo(Pool("gpu", "alice"), 60.0),
        "c": NodeInfo(Pool("gpu")),
    }
    assert pool_sizes(nodes) == {Pool("gpu", "alice"): 2, Pool("gpu"): 1}


@pytest.mark.parametrize("owner", ["", "alice"])
def test_a_node_has_one_set_of_properties_in_both_its_pools(owner):
    state = ControllerState()
    state.node_joined(NodeJoined("a", "gpu", 60.0, "rack", owner=owner), 0.0)
    state.forecasts_updated({"a": GapForecast(0.0, 900.0, 0.0)})
    node = state.nodes["a"]
    assert node.info == state.usable["a"] == NodeInfo(Pool("gpu", owner), 900.0, "rack")
    assert node.ownerless_info == NodeInfo(Pool("gpu"), 900.0, "rack")
    assert (node.owner, node.pool) == (owner, Pool("gpu", owner))
