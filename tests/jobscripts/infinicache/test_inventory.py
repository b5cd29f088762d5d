"""A node that has more objects than one message can tell a proxy of."""

from __future__ import annotations

import msgspec
import pytest
from infinicache import node as cache_node
from infinicache.node import latest
from infinicache.objects import MAX_KEY_BYTES, Shape, StoredObject

from malletrain.streams import connection
from tests.jobscripts.infinicache.pool import data, heard, run


def stored(number, used):
    return StoredObject(f"k{number:03}", number, Shape(9, 1, 1), [0], used)


def test_those_read_last_are_told_of_in_their_order():
    objects = [stored(i, used) for i, used in enumerate([3.0, 1.0, 4.0, 2.0])]
    size = len(msgspec.msgpack.encode(objects[0]))
    for count, expected in ((4, [0, 1, 2, 3]), (3, [0, 2, 3]), (2, [0, 2]), (0, [])):
        first, rest = latest(objects, count * size)
        assert [o.version for o in first] == expected
        assert sorted([o.version for o in [*first, *rest]]) == [0, 1, 2, 3]


def test_the_longest_object_is_no_longer_than_it_is_taken_for():
    most = 2**63
    shape = Shape(most, 128, 127, most, 127)
    longest = StoredObject("k" * MAX_KEY_BYTES, most, shape, [*range(255)], 1.5e9)
    assert len(msgspec.msgpack.encode(longest)) <= cache_node.MAX_OBJECT_BYTES


@pytest.mark.parametrize("count", [5, 21])
def test_a_new_proxy_learns_of_what_one_message_can_tell(monkeypatch, count):
    """It learned of nothing: the message was refused, again and again."""
    monkeypatch.setattr(cache_node, "MAX_OBJECT_BYTES", 110)
    monkeypatch.setattr(cache_node, "MAX_INVENTORY_BYTES", 1200, raising=False)

    async def work(make):
        pool = make(3)
        async with pool.cache(code=(1, 1)) as cache:
            await heard(cache, pool)
            for i in range(count):
                await cache.put(f"k{i}", data(100, i))
            monkeypatch.setattr(connection, "MAX_HEAD", 1500)
            await pool.lose(pool.nodes[0])
            values = [await cache.get(f"k{i}") for i in range(count)]
            hits = [i for i in range(count) if values[i] is not None]
            assert all(values[i] == data(100, i) for i in hits)
            assert len(hits) == count if count == 5 else 5 < len(hits) < count
            proxy = pool.nodes[0].proxy
            stored_keys = {key for node in pool.nodes for key, *_ in node.store.chunks()}
            assert stored_keys <= proxy.table.objects.keys(), (
                "nothing stays that the proxy does not know"
            )
            for i in range(count):
                await cache.put(f"k{i}", data(100, -i))
                assert await cache.get(f"k{i}") == data(100, -i)

    run(work)
