"""What is read often: near caches, further copies, and memory that is shared with backups."""

import pytest
from infinicache import CacheError
from infinicache.client import NearCache
from infinicache.connection import Peers
from infinicache.demand import worth
from infinicache.hot import MIN_READS, WINDOW_S, ReadLoad, copy_name, copy_names, is_copy
from infinicache.proxies import Proxies

from tests.jobscripts.infinicache.pool import KEY, MIB, Pool, until
from tests.jobscripts.infinicache.test_cache import data, run
from tests.waiting import PATIENCE_S


def test_the_near_cache_keeps_what_was_used_last():
    near = NearCache(100)
    for key in "abc":
        near.put(key, 1, bytearray(40), 0.0)
    assert near.get("a") is None
    assert near.get("b").value == bytes(40)
    near.put("d", 1, bytearray(40), 0.0)
    assert near.get("c") is None, "b was used since"
    near.put("b", 2, bytearray(b"new"), 0.0)
    assert (near.get("b").version, near.used) == (2, 43)
    near.put("large", 1, bytearray(101), 0.0)
    assert near.get("large") is None
    near.drop("b")
    near.drop("d")
    assert near.used == 0


def test_what_is_near_is_never_old():
    async def work(make):
        pool = make(6)
        async with pool.cache(near_bytes=MIB, hedge_s=60.0) as cache, pool.cache() as other:
            await cache.put("k", b"one")
            served = []
            for node in pool.nodes:
                node.server.delay_s = lambda op: served.append(op) or 0.0
            assert [await cache.get("k") for _ in range(3)] == [b"one"] * 3
            assert served.count("get") == 1, "the chunk of a small object once, then none"
            (await cache.get("k"))[:] = b"bad"
            await other.put("k", b"two")
            assert await cache.get("k") == b"two"
            await other.delete("k")
            assert await cache.get("k") is None
            assert cache.counts["near"] == 3

    run(work)


def test_a_view_of_what_is_near_copies_nothing_and_is_safe_from_others():
    async def work(make):
        pool = make(6)
        async with pool.cache(near_bytes=MIB) as cache, pool.cache() as other:
            await cache.put("k", b"one")
            first, second = [await cache.get_view("k") for _ in range(2)]
            assert first.obj is second.obj, "the same memory"
            with pytest.raises(TypeError, match="read-only"):
                first[0] = 0
            (await cache.get("k"))[:] = b"bad"
            assert first == await cache.get_view("k") == b"one"
            await other.put("k", b"two")
            assert await cache.get_view("k") == b"two"
            assert first == b"one", "what is held stays as it was"
            owned = await cache.get("k")
            owned[:] = b"bad"
            assert await cache.get_view("k") == b"two"
            await other.delete("k")
            assert await cache.get_view("k") is None

    run(work)


def test_a_get_that_changes_what_it_read_first_changes_no_view():
    async def work(make):
        pool = make(3)
        async with pool.cache(near_bytes=MIB) as cache, pool.cache() as far:
            await far.put("k", b"one")
            (await cache.get("k"))[:] = b"bad"
            assert await cache.get_view("k") == b"one"
            loaded = await cache.get_view("l", lambda key: b"made of " + key.encode())
            assert loaded == await far.get_view("l") == b"made of l"

    run(work)


def test_with_leave_to_be_late_the_near_cache_asks_nobody():
    async def work(make):
        pool = make(3)
        async with pool.cache(near_bytes=MIB, near_s=1e6) as cache, pool.cache() as other:
            await cache.put("k", b"one")
            assert await cache.get("k") == b"one"
            await other.put("k", b"two")
            assert await cache.get("k") == b"one"
            await cache.put("k", b"three")
            assert await cache.get("k") == b"three", "what it put itself it knows"

    run(work)


def test_what_this_client_changes_while_it_reads_is_not_kept():
    near = NearCache(100)
    read = near.reads("k")
    assert near.done("k", read)
    first, second, other = near.reads("k"), near.reads("k"), near.reads("j")
    near.changed("k")
    late = near.reads("k")
    assert [near.done("k", one) for one in (first, second, late)] == [False, False, True]
    assert near.done("j", other)


def test_hot_is_what_makes_its_nodes_busier_than_the_others():
    def read_load(shares, reads=100):
        made = ReadLoad()
        for key, share in shares.items():
            for _ in range(reads * share):
                made.read(key, 1000, 1.0)
        made.read("later", 1, 1.0 + WINDOW_S)
        return made

    half = read_load({"hot": 5, "cold": 5})
    assert half.copies("hot", 10, 12, 32) == 0, "ten of 32 nodes serve half: 1.6 of the average"
    assert half.copies("hot", 1, 3, 32) == 3, "one node serves half"
    assert half.copies("hot", 10, 12, 100) == 2, "ten of a hundred serve half: 5 of the average"
    assert half.copies("hot", 10, 12, 24) == 0
    assert half.copies("cold", 1, 3, 2) == 0
    assert read_load({"hot": 1}, MIN_READS - 1).copies("hot", 1, 3, 32) == 0, "too few reads to say"
    assert ReadLoad().copies("hot", 1, 3, 32) == 0
    empty = ReadLoad()
    for _ in range(MIN_READS + 1):
        empty.read("flag", 0, 1.0)
    empty.read("later", 0, 1.0 + WINDOW_S)
    assert empty.copies("flag", 1, 3, 32) == 0, "an object without bytes makes no node busy"


def test_a_hot_object_is_read_from_more_nodes_and_never_from_an_old_copy():
    async def work(make):
        pool = make(12)
        proxy = pool.nodes[0].proxy
        async with pool.cache(code=(2, 1)) as cache:
            now = [0.0]
            read = proxy.read_load.read
            proxy.read_load.read = lambda key, size, _: read(key, size, now[0])
            await cache.put("k", data(1000))
            first = set((await cache.stat("k")).nodes.values())
            for _ in range(MIN_READS + 1):
                await cache.get("k")
            now[0] += WINDOW_S
            version = (await cache.stat("k")).version
            while (there := len(proxy.table.objects)) < 3:
                await cache.get("k")
                assert len(proxy.table.objects) > there, "each get makes one"
            assert set(proxy.table.objects) - {"k"} <= set(copy_names("k", version))
            nodes = {a for e in proxy.table.objects.values() for a in e.at.values()}
            assert len(nodes) == 9, "each copy is on nodes of its own"
            assert first < nodes
            served = set()
            for node in pool.nodes:
                node.server.delay_s = lambda op, a=node.address: (
                    (served.add(a) if op == "get" else None) or 0.0
                )
            for _ in range(60):
                assert await cache.get("k") == data(1000)
            assert len(served) > 2, "the two nodes with the data chunks are not alone any more"
            await cache.put("k", data(1000, 1))
            assert [await cache.get("k") for _ in range(20)] == [data(1000, 1)] * 20
            assert not any(is_copy(key) and str(version) in key for key in proxy.table.objects)
            with pytest.raises(CacheError, match="reserved for the cache"):
                await cache.put(copy_name("k", version, 1), b"x")

    run(work)


def test_backups_are_within_the_memory():
    async def work(make):
        pool = make(4, capacity=MIB, backup_s=0.02)
        async with pool.cache(code=(1, 1)) as cache:
            for i in range(30):
                await cache.put(f"k{i}", data(MIB // 10, i))

            async def copied():
                return any(n.backups.store.used for n in pool.nodes)  # two may have one peer

            await until(copied, "there are copies")
            assert [n.capacity for n in proxy_nodes(pool)] == [MIB // 2] * 4
            assert all(n.store.used + n.backups.store.used <= MIB for n in pool.nodes)

    run(work)


def proxy_nodes(pool: Pool):
    return list(pool.nodes[0].proxy.table.nodes.values())


def test_the_proxies_together_say_what_the_cache_is_asked_for():
    async def work(make):
        pool = make(6, proxies=2)
        async with pool.cache(code=(2, 1)) as cache:
            for i in range(20):
                await cache.put(f"k{i}", data(3000, i))
            for _ in range(3):
                for i in range(20):
                    await cache.get(f"k{i}")
            await cache.stat("k0")
            curves = await pool.nodes[0].demand()
            assert sorted(curves) == [0, 1]
            assert all(c.hits_s for c in curves.values())
            # Twenty objects of 4,500 bytes, read in turn: 90,000 bytes hit always, half never.
            of_all = worth(curves, 1.0, 1e6)
            assert list(of_all) == [1]
            assert of_all[1] > 0
            assert worth(curves, 1.0, 30_000.0)[1] == 0.0
            assert await pool.nodes[0].demand(observed_s=1e9) == {}

    run(work)


def test_one_reader_makes_a_copy_and_leaves_one_that_is_there():
    async def work(make):
        pool = make(6)
        proxy = pool.nodes[0].proxy
        async with pool.cache(code=(2, 1)) as cache:
            await cache.put("k", data(1000))
            name = copy_name("k", (await cache.stat("k")).version, 1)
            request = {"key": "k", "size": 1000, "code": [2, 1], "stripe_bytes": 1000, "copy": name}
            peers = Peers(KEY)
            proxies = Proxies([node.address for node in pool.nodes], peers, PATIENCE_S)
            first = await proxies.ask("k", "begin", **request)
            with pytest.raises(CacheError, match="Another reader"):
                await proxies.ask("k", "begin", **request)
            assert proxy.table.objects[name].version == first["version"]
            peers.close()

    run(work)
