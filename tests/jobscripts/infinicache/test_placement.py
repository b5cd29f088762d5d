import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infinicache.backup import peer_of
from infinicache.connection import Peers
from infinicache.entries import PoolNode
from infinicache.placement import (
    NO_PROSPECT,
    NodeArrivals,
    Prospect,
    choose,
    departure_groups_of,
)
from infinicache.proxy import Proxy


def chosen(prospects, count, fullness=None, there=()):
    room = [a for a in prospects if a not in there]
    return choose(room, count, prospects, fullness or {}, random.Random(1), there)


def test_chunks_go_to_nodes_that_last():
    prospects = {f"n{i}": Prospect(60.0 * 2**i) for i in range(8)}
    assert set(chosen(prospects, 3)) == {"n7", "n6", "n5"}
    assert chosen(prospects, 99) == [f"n{i}" for i in range(7, -1, -1)]


def test_among_equals_a_rack_that_goes_takes_as_few_chunks_as_can_be():
    prospects = {
        f"r{rack}n{i}": Prospect(600.0 + i, departure_groups_of(f"r{rack}n{i}", f"{i}"))
        for rack in range(3)
        for i in range(4)
    }
    for count, most in ((3, 1), (6, 2), (7, 3)):
        racks = [node[:2] for node in chosen(prospects, count)]
        assert max(racks.count(r) for r in racks) == most
    there = [n for n in prospects if n.startswith("r0")]
    assert {n[:2] for n in chosen(prospects, 2, there=there)} == {"r1", "r2"}, "where it has chunks"


def test_among_equals_the_emptiest():
    prospects = dict.fromkeys(("a", "b", "c"), NO_PROSPECT)
    assert chosen(prospects, 2, {"a": 0.9, "b": 0.1, "c": 0.5}) == ["b", "c"]


@given(
    st.dictionaries(
        st.text("abc1", max_size=3),
        st.tuples(st.floats(0, 1e9), st.lists(st.sampled_from("xyz"), max_size=2)),
    ),
    st.integers(0, 12),
)
def test_as_many_distinct_nodes_as_there_are(nodes, count):
    prospects = {
        a: Prospect(lasts, tuple(departure_groups))
        for a, (lasts, departure_groups) in nodes.items()
    }
    choice = chosen(prospects, count)
    assert len(choice) == len(set(choice)) == min(count, len(nodes))
    assert set(choice) <= set(nodes)


def test_who_came_first_is_expected_to_stay_unless_the_site_foretells():
    arrivals = NodeArrivals()
    arrivals.add("a", "rack1n01", 300.0, 1000.0)
    arrivals.add("b", "rack1n02", 0.0, 1000.0)
    assert arrivals.prospect("a", 1000.0).lasts_s == 300.0
    assert arrivals.prospect("b", 1060.0).lasts_s == 60.0
    assert set(arrivals.prospect("a", 0.0).departure_groups) & set(
        arrivals.prospect("b", 0.0).departure_groups
    ) == {"rack rack1n"}
    arrivals.add("a", "rack1n01", 0.0, 2000.0)
    assert arrivals.prospect("a", 1100.0).lasts_s == 400.0, "registered anew, it is no newcomer"
    arrivals.update_lifetimes({"b": 7200.0}, 1100.0)
    assert arrivals.prospect("b", 1100.0).lasts_s == 7200.0
    assert arrivals.prospect("b", 1200.0).lasts_s == 7100.0
    arrivals.remove("b")
    assert arrivals.prospect("b", 1200.0) == NO_PROSPECT


def test_copies_are_kept_by_a_node_that_does_not_leave_with_it():
    nodes = {
        name: PoolNode(
            1, prospect=Prospect(1.0, departure_groups_of(name, "0" if name < "s" else "9"))
        )
        for name in ("r1", "r2", "q1", "s1")
    }
    assert peer_of(nodes, "r1", None) == "s1", "of another rack, and come at another time"
    assert peer_of(nodes, "r1", "r2") == "r2", "who has the copies keeps them"
    nodes["r2"].leaving = True
    assert peer_of(nodes, "r1", "r2") == "s1"
    del nodes["s1"]
    assert peer_of(nodes, "r1", "s1") == "q1", "any other, where all came together"
    assert peer_of(nodes, "gone", None) is None


def test_the_copies_are_spread_over_the_nodes():
    nodes = {f"n{number}": PoolNode(1) for number in range(6)}
    peers: dict[str, str | None] = {}
    for name in nodes:
        peers[name] = peer_of(nodes, name, None, peers)
    assert sorted(peers.values()) == sorted(nodes), "each keeps those of one"
    del nodes["n3"]
    peers = {name: peer for name, peer in peers.items() if name in nodes}
    joined = {**nodes, "n6": PoolNode(1)}
    peers["n6"] = peer_of(joined, "n6", None, peers)
    orphan = next(name for name, peer in peers.items() if peer == "n3")
    peers[orphan] = peer_of(joined, orphan, "n3", peers)
    assert sorted(map(str, peers.values())) == sorted(joined), "whose peer is lost takes a free one"


@pytest.mark.parametrize("later_slots", [(), (1,)])
def test_a_proxy_that_begins_anew_does_not_count_peers_of_before(later_slots):
    """The node that had its copies at another is gone."""

    async def work():
        proxy = Proxy(Peers(b"key"))
        handlers = proxy.handlers()

        def serve(slot, *addresses):
            proxy.view(addresses, (), (slot,), {})
            for address in addresses:
                handlers["register"](
                    address=address, capacity=1, slot=slot, objects=[], leaving=False
                )

        serve(0, "a", "b", "c")
        assert handlers["beat"](address="c", number=1)["peer"] == "a"
        if not later_slots:
            proxy.view((), (), (), {})
        serve(*(later_slots or (0,)), "a", "b", "d")
        assert handlers["beat"](address="d", number=1)["peer"] == "a"
        proxy.close()

    asyncio.run(work())
