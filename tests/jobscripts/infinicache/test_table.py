import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infinicache import moves
from infinicache.codec import Code
from infinicache.objects import StoredObject, TooLarge, Unavailable
from infinicache.proxies import Ring
from infinicache.table import Table


def table(nodes=6, capacity=1000):
    t = Table(random.Random(1))
    for i in range(nodes):
        t.add_node(f"n{i}", capacity)
    return t


def put(t, key, size=400, code=(4, 2), version=None, evicted=None):
    entry = t.begin(
        key, size, Code(*code), 1 << 20, version or t.newest + 1, [] if evicted is None else evicted
    )
    entry.committed = True
    return entry


def test_chunks_go_to_distinct_nodes_and_room_is_accounted():
    t = table()
    entry = put(t, "a")
    assert len(set(entry.at.values())) == 6
    assert all(n.reserved == 100 for n in t.nodes.values())
    t.remove("a")
    assert all(n.reserved == 0 for n in t.nodes.values())


def test_clock_spares_what_was_read():
    t, evicted = table(), []
    for i in range(10):
        put(t, f"k{i}")
    for entry in t.objects.values():
        entry.touched = entry.key == "k0"
    put(t, "new", evicted=evicted)
    assert [e.key for e in evicted] == ["k1"]
    assert "k0" in t.objects


def test_what_is_too_large_is_said_and_evicts_nothing():
    t = table()
    put(t, "a")
    with pytest.raises(TooLarge, match="needs 1250 bytes on each of 6 nodes"):
        put(t, "b", size=5000)
    assert "a" in t.objects
    with pytest.raises(Unavailable):
        put(table(0), "c")


def test_a_small_pool_stores_with_less_and_says_so():
    entry = put(table(3), "a", code=(10, 2))
    assert (entry.shape.d, entry.shape.p, entry.shape.target_p) == (1, 2, 2)
    entry = put(table(1), "a", code=(10, 2))
    assert (entry.shape.d, entry.shape.p, entry.shape.target_p) == (1, 0, 2)


def test_loss_degrades_then_loses():
    t = table()
    put(t, "a")
    for i in range(2):
        degraded, lost = t.lose_node(f"n{i}")
        assert [e.key for e in degraded] == ["a"]
        assert not lost
    assert [e.key for e in t.lose_node("n2")[1]] == ["a"]
    assert not t.objects
    assert t.lost == 1


def test_the_most_valuable_is_handed_over_first():
    t = table(8)
    for key, reads in (("cold", 0), ("hot", 9), ("weak", 0)):
        entry = put(t, key, code=(4, 2))
        entry.reads = reads
    t.set_chunk(t.objects["weak"], 0, None)
    common = next(n for n in t.nodes if all(n in e.at.values() for e in t.objects.values()))
    t.nodes[common].leaving = True
    handed = moves.drain(t, common)
    assert [m.key for m in handed] == ["weak", "hot", "cold"]
    assert all(m.source == common and m.target not in t.objects[m.key].at.values() for m in handed)


def test_a_shrinking_pool_puts_chunks_together_and_a_growing_one_apart():
    t = table(6)
    entry = put(t, "a")
    for name in ("n0", "n1", "n2", "n3"):
        t.nodes[name].leaving = True
        for move in moves.drain(t, name):
            t.set_chunk(t.objects[move.key], move.index, None)
            t.set_chunk(t.objects[move.key], move.index, move.target)
        degraded, lost = t.lose_node(name)
        assert not degraded
        assert not lost
    assert Counter(entry.at.values()) == {"n4": 3, "n5": 3}
    assert entry.protection == 0, "each of the two nodes is needed"
    for i in range(6, 10):
        t.add_node(f"n{i}", 1000)
    for move in moves.repair(t, entry):
        assert move.source is not None
        t.set_chunk(entry, move.index, None)
        t.set_chunk(entry, move.index, move.target)
    assert len(set(entry.at.values())) == 6
    assert entry.protection == 2


def test_a_new_node_is_filled_until_it_is_like_the_others():
    t = table(6, 10_000)
    for i in range(30):
        put(t, f"k{i}")
    t.add_node("new", 10_000)
    while (move := moves.rebalance(t, slack=0.05)) is not None:
        t.set_chunk(t.objects[move.key], move.index, None)
        t.set_chunk(t.objects[move.key], move.index, move.target)
    assert t.nodes["new"].reserved >= 2000
    assert all(len(set(e.at.values())) == 6 for e in t.objects.values())


def test_a_lost_memory_is_made_anew_and_old_versions_stay_gone():
    t = table()
    old, new = put(t, "a", version=1), None
    shape = old.shape
    t.remove("a")
    new = put(t, "a", version=5)
    again = table(0)
    stale = []
    for i, (index, node) in enumerate(new.at.items()):
        again.add_node(node, 1000)
        objects = (
            [StoredObject("a", 5, shape, [index], 0.0)]
            if i < 3
            else [StoredObject("a", 1, shape, [index], 0.0)]
        )
        stale += again.restore(node, objects, settled=False)
    half = again.settle()
    assert [e.version for e in half] == [5], (
        "three chunks of the new version are too few, and the old one is not looked at"
    )
    assert {(k, v) for _, k, v in stale} == {("a", 1)}
    assert again.newest == 5
    assert again.restore("n0", [StoredObject("gone", 3, shape, [0], 0.0)], settled=True) == [
        ("n0", "gone", 3)
    ]


@given(
    st.lists(
        st.tuples(st.sampled_from("pprlafd"), st.integers(0, 9), st.integers(1, 3000)), max_size=60
    )
)
def test_reservations_are_what_the_entries_say(steps):
    t = table(4, 2000)
    count = 4
    for what, i, size in steps:
        try:
            if what == "p":
                t.remove(f"k{i}")
                put(t, f"k{i}", size, (3, 1))
            elif what == "r":
                t.remove(f"k{i}")
            elif what == "l" and t.nodes:
                t.lose_node(sorted(t.nodes)[i % len(t.nodes)])
            elif what == "d" and len(t.nodes) > 1:
                leaver = sorted(t.nodes)[i % len(t.nodes)]
                t.nodes[leaver].leaving = True
                for move in moves.drain(t, leaver):
                    t.set_chunk(t.objects[move.key], move.index, None)
                    t.set_chunk(t.objects[move.key], move.index, move.target)
                t.lose_node(leaver)
            elif what == "a":
                count += 1
                t.add_node(f"n{count}", 2000)
            elif what == "f" and f"k{i}" in t.objects:
                for move in moves.repair(t, t.objects[f"k{i}"]):
                    t.set_chunk(t.objects[move.key], move.index, move.target)
        except (TooLarge, Unavailable):
            pass
        shares = Counter()
        for entry in t.objects.values():
            assert entry.protection >= 0
            for node in entry.at.values():
                assert entry.key in t.nodes[node].chunks
            for node in entry.at.values():
                shares[node] += entry.shape.share
        assert {a: n.reserved for a, n in t.nodes.items()} == {a: shares[a] for a in t.nodes}
        assert all(n.reserved <= n.capacity for n in t.nodes.values())


def test_few_keys_move_when_a_proxy_is_added():
    keys = [f"key {i}" for i in range(4000)]
    three, four = Ring(3), Ring(4)
    moved = [k for k in keys if three.slot(k) != four.slot(k)]
    assert all(four.slot(k) == 3 for k in moved)
    assert 0.15 < len(moved) / len(keys) < 0.35
    shares = Counter(four.slot(k) for k in keys)
    assert min(shares.values()) > 0.15 * len(keys)


def test_whole_objects_outlive_a_departure_that_leaves_no_room_for_all():
    t = table(12, 1000)
    for i in range(20):  # 6 chunks of 90 each: 20 objects fill 10,800 of 12,000
        put(t, f"k{i}", 360).reads = i
    for i in range(8):
        t.nodes[f"n{i}"].leaving = True
    evicted = moves.make_room_for_leavers(t)
    assert [e.key for e in evicted] == [f"k{i}" for i in range(len(evicted))], "read least"
    for i in range(8):
        for move in moves.drain(t, f"n{i}"):
            t.set_chunk(t.objects[move.key], move.index, None)
            t.set_chunk(t.objects[move.key], move.index, move.target)
        t.lose_node(f"n{i}")
    assert t.lost == 0
    assert len(t.objects) == 7, "4,000 bytes hold seven objects of 540"
    assert all(len(e.at) == 6 for e in t.objects.values())


def test_no_room_is_made_where_there_is_room_or_nobody_stays():
    t = table(12, 1000)
    put(t, "a")
    t.nodes["n0"].leaving = True
    assert moves.make_room_for_leavers(t) == []
    for node in t.nodes.values():
        node.leaving = True
    assert moves.make_room_for_leavers(t) == []


def test_puts_leave_the_reserve_free_and_leavers_may_use_it():
    t = Table(random.Random(1), reserve=0.25)
    for i in range(7):
        t.add_node(f"n{i}", 1000)
    for i in range(30):
        put(t, f"k{i}")
    assert max(n.reserved for n in t.nodes.values()) <= 750
    assert t.evicted > 0
    count = len(t.objects)
    t.nodes["n0"].leaving = True
    for move in moves.drain(t, "n0"):
        t.set_chunk(t.objects[move.key], move.index, None)
        t.set_chunk(t.objects[move.key], move.index, move.target)
    assert t.lose_node("n0") == ([], [])
    assert len(t.objects) == count
    with pytest.raises(TooLarge, match="750 each at most"):
        put(t, "large", 4 * 800)
