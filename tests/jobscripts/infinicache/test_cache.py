"""The cache over real sockets: what it promises, and what it says to bad input."""

import asyncio
import contextlib
import random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from infinicache import AsyncCache, Cache, CacheError, TooLarge, Unavailable
from infinicache.connection import CallFailed, Peers

from tests.draws import cases
from tests.jobscripts.infinicache.pool import KEY, MIB, data, heard, run, until, whole
from tests.waiting import NEVER_S


def test_put_get_stat_delete():
    async def work(make):
        pool = make(6)
        async with pool.cache(code=(4, 2)) as cache:
            for size in (0, 1, 5, 1000, MIB + 1):
                receipt = await cache.put("k", data(size))
                assert (receipt.protection, receipt.target_protection, receipt.size) == (2, 2, size)
                assert await cache.get("k") == data(size)
            stat = await cache.stat("k")
            assert stat.size == MIB + 1
            assert len(set(stat.nodes.values())) == 6
            assert await cache.delete("k")
            assert await cache.get("k") is None
            assert not await cache.delete("k")
            assert await cache.stat("never there") is None
            assert sum(n.store.used for n in pool.nodes) == 0

    run(work)


def test_streams_in_stripes_and_several_proxies():
    async def work(make):
        pool = make(9, proxies=2)
        whole_object = data(3 * MIB + 17)

        async def pieces():
            for start in range(0, len(whole_object), 100_001):
                yield whole_object[start : start + 100_001]

        async with pool.cache(stripe_bytes=MIB) as cache:
            for i in range(8):
                await cache.put_stream(f"s{i}", len(whole_object), pieces(), code=(2, 1))
                parts = [part async for part in cache.get_stream(f"s{i}")]
                assert len(parts) == 4
                assert b"".join(parts) == whole_object == await cache.get(f"s{i}")
            assert all(p["objects"] for p in await cache.summary()), "both proxies have their share"
            with pytest.raises(CacheError, match="ended 1 bytes before"):
                await cache.put_stream("short", len(whole_object) + 1, pieces())
            with pytest.raises(CacheError, match="more than the 100 bytes"):
                await cache.put_stream("long", 100, pieces())
            assert await cache.get("short") is None
            assert await cache.get("long") is None
            assert [part async for part in cache.get_stream("never there")] == []

    run(work)


def test_a_miss_loads_once():
    async def work(make):
        calls = []

        async def load(key):
            calls.append(key)
            await asyncio.sleep(0.01)
            return data(1000)

        async with make(3).cache() as cache:
            assert (
                await asyncio.gather(*(cache.get("k", load) for _ in range(5))) == [data(1000)] * 5
            )
            assert await cache.get("k", load) == data(1000)
            assert calls == ["k"]

            def fail(key):
                raise KeyError(key)

            with pytest.raises(KeyError):
                await cache.get("other", fail)

    run(work)


def test_each_get_of_one_load_has_bytes_of_its_own():
    """A get may change what it returns: neither the loader nor another get sees that."""

    async def work(make):
        source = bytearray(data(1000))
        async with make(3).cache() as cache:
            first, second = await asyncio.gather(
                *(cache.get("k", lambda key: source) for _ in range(2))
            )
            first[:] = bytes(1000)
            assert second == source == data(1000)
            alone = await cache.get("other", lambda key: source)
            alone[:] = bytes(1000)
            view = await cache.get_view("third", lambda key: source)
            source[:] = bytes(1000)
            assert view == data(1000)

    run(work)


def test_damaged_chunks_are_not_believed_and_made_anew():
    async def work(make):
        pool = make(8)
        async with pool.cache(code=(4, 2), hedge_s=NEVER_S) as cache:
            await cache.put("k", data(MIB))
            for node in pool.nodes:
                for key, version, stripe, index in node.store.chunks():
                    if index in (0, 3):
                        content, _ = node.store.get(key, version, stripe, index, touch=False)
                        memoryview(content)[7] ^= 1
            assert await cache.get("k") == data(MIB)
            assert cache.counts["degraded"] == 1
            await whole(cache, 8)
            assert await cache.get("k") == data(MIB)
            assert cache.counts["degraded"] == 1

    run(work)


def test_a_straggler_is_not_waited_for():
    async def work(make):
        pool = make(6)
        async with pool.cache(code=(4, 2)) as cache, pool.cache(code=(4, 2), hedge_s=0) as eager:
            await cache.put("k", data(MIB))
            slow = (await cache.stat("k")).nodes[1]
            for node in pool.nodes:
                if node.address == slow:
                    node.server.delay_s = lambda op: 20.0 if op == "get" else 0.0
            assert await cache.get("k") == data(MIB)
            assert await eager.get("k") == data(MIB)
            assert cache.counts["hedged"] == 1
            assert (await cache.stat("k")).protection == 2, "slow is not lost"

    run(work)


def test_a_full_pool_evicts_and_what_never_fits_is_refused():
    async def work(make):
        pool = make(6, capacity=MIB)
        async with pool.cache(code=(4, 2)) as cache:
            for i in range(12):
                await cache.put(f"k{i}", data(MIB, i))
            values = [await cache.get(f"k{i}") for i in range(12)]
            assert all(f is None or f == data(MIB, i) for i, f in enumerate(values))
            assert 2 <= sum(f is not None for f in values) <= 4
            assert values[11] is not None
            assert all(n.store.used <= MIB for n in pool.nodes)
            with pytest.raises(TooLarge, match="needs 5242880 bytes on each of 6 nodes"):
                await cache.put("large", data(20 * MIB))
            with pytest.raises(CacheError, match="1024 bytes"):
                await cache.put("k" * 2000, b"")

    run(work)


def test_a_small_pool_tells_of_its_weakness():
    async def work(make):
        async with make(4).cache() as cache:
            receipt = await cache.put("k", data(2 * MIB))
            assert (str(receipt.code), receipt.protection, receipt.target_protection) == (
                "(2+2)",
                2,
                2,
            )
        async with make(2).cache() as cache:
            receipt = await cache.put("k", data(2 * MIB))
            assert (str(receipt.code), receipt.protection, receipt.target_protection) == (
                "(1+1)",
                1,
                2,
            )
            assert (await cache.summary())[0]["weak"] == 1

    run(work)


def test_a_half_written_put_is_a_miss():
    async def work(make):
        pool = make(6)
        async with pool.cache(code=(4, 2)) as cache:
            await cache.put("k", data(1000, 1))
            peers = Peers(KEY)
            proxy = peers.at(pool.nodes[0].address)
            begun, _ = await proxy.call("begin", key="k", size=1000, code=[4, 2], stripe_bytes=MIB)
            assert await cache.get("k") is None, (
                "from the beginning of a put the old value is not read"
            )
            with pytest.raises(CallFailed, match="not put"):
                await proxy.call("commit", key="k", version=begun["version"], missing=[0, 1, 2])
            assert await cache.get("k") is None
            stale = {
                "key": "k",
                "version": begun["version"],
                "shape": begun["shape"],
                "stripe": 0,
                "index": 0,
                "crc": 0,
            }
            with pytest.raises(CallFailed, match="overtaken"):
                await peers.at(begun["at"][0]).call("put", [b"x" * 250], **stale)
            peers.close()

    run(work)


def test_nobody_there_and_strangers():
    async def work(make):
        pool = make(3)
        address = pool.nodes[0].address
        async with AsyncCache([address], b"guessed", timeout_s=NEVER_S) as stranger:
            with pytest.raises(CacheError, match="does not accept this client's key") as refused:
                await stranger.get("k")
            assert not isinstance(refused.value, Unavailable), "it is no outage: it is told at once"
        reader, writer = await asyncio.open_connection(*address.split(":"))
        await reader.readexactly(16)
        with contextlib.suppress(ConnectionResetError):
            writer.write(b"GET / HTTP/1.0\r\n\r\n" + b"x" * 100)
            await writer.drain()
            assert len(await reader.read()) < 100, "it hangs up"
        writer.close()
        await pool.close()
        pool.nodes.clear()
        async with AsyncCache([address], KEY, timeout_s=0.5) as cache:
            with pytest.raises(Unavailable, match="No member of the cache answers"):
                await cache.put("k", b"x")

    run(work)
    with pytest.raises(ValueError, match="at least one address"):
        AsyncCache([])


def test_a_lost_proxy_is_replaced_with_all_it_knew():
    async def work(make):
        pool = make(8)
        async with pool.cache(code=(4, 2)) as cache:
            for i in range(5):
                await cache.put(f"k{i}", data(10_000, i))
            await cache.delete("k4")
            await pool.lose(pool.nodes[0])
            assert [await cache.get(f"k{i}") for i in range(5)] == [
                *(data(10_000, i) for i in range(4)),
                None,
            ]
            await cache.put("k0", data(5000))
            assert await cache.get("k0") == data(5000)
            await whole(cache, 7)

    run(work)


def test_leavers_hand_over_and_newcomers_are_filled():
    async def work(make):
        pool = make(8, capacity=4 * MIB)
        async with pool.cache(code=(4, 2)) as cache:
            for i in range(10):
                await cache.put(f"k{i}", data(MIB, i))
            for node in pool.nodes[5:]:  # one after another more than p of them
                await pool.leave(node)
                pool.join()
                await whole(cache, 8)
            assert [await cache.get(f"k{i}") for i in range(10)] == [
                data(MIB, i) for i in range(10)
            ]
            assert cache.counts["misses"] == 0
            moved = (await cache.summary())[0]["moved_bytes"]
            assert moved["drain"] > 0

            async def filled():
                return pool.nodes[-1].store.used > MIB

            await until(filled, "the newest node got its share")

    run(work)


def test_backups_save_what_lost_too_many_nodes():
    async def work(make):
        pool = make(9, backup_s=0.02)
        async with pool.cache(code=(3, 1)) as cache:
            for i in range(6):
                await cache.put(f"k{i}", data(50_000, i))
            await cache.delete("k5")

            def copied():
                return {c for n in pool.nodes for c in n.backups.store.chunks()} == {
                    c for n in pool.nodes for c in n.store.chunks()
                }

            async def backups_complete():
                peers = pool.nodes[0].proxy.backup_of
                return copied() and all(n.address in peers for n in pool.nodes)

            await until(
                backups_complete,
                "every chunk has a copy, deleted ones have none, and the proxy knows where",
            )
            ordered = list(pool.nodes)
            for node in (
                ordered[2],
                ordered[4],
                ordered[6],
            ):  # not neighbours, and more than p at once
                pool.nodes.remove(node)
                await node.close()
            pool.announce()

            async def all_back():
                return [await cache.get(f"k{i}") for i in range(5)] == [
                    data(50_000, i) for i in range(5)
                ]

            await until(all_back, "restored from the copies")
            await whole(cache, 6)
            assert (await cache.summary())[0]["lost"] == 0
            assert await cache.get("k5") is None

    run(work)


def test_sync():
    async def work(make):
        pool = make(3)

        def use():
            with Cache([n.address for n in pool.nodes], KEY, code=(2, 1)) as cache:
                assert cache.put("k", b"value").protection == 1
                assert cache.get("k") == b"value"
                assert list(cache.get_stream("k")) == [b"value"]
                assert cache.put_stream("s", 4, [b"ab", b"cd"]).size == 4
                assert cache.get("s", lambda key: b"") == b"abcd"
                assert cache.stat("s").size == 4
                assert cache.summary()[0]["objects"] == 2
                assert cache.delete("s")

        await asyncio.to_thread(use)

    run(work)


STEPS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 3), st.integers(0, 40_000)),
    st.tuples(st.just("get"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("delete"), st.integers(0, 3), st.just(0)),
    st.tuples(
        st.sampled_from(["lose", "lose unseen", "leave", "join"]), st.integers(0, 99), st.just(0)
    ),
)


@example([("lose", 0, 0), ("join", 0, 0), ("lose", 0, 0)], random.Random(0))
@settings(max_examples=cases(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, min_size=4, max_size=16), st.randoms(use_true_random=False))
def test_a_get_returns_the_right_bytes_or_a_miss(steps, rng):
    """Never wrong bytes, whatever happens; and no miss while no more than p nodes were lost between
    repairs.
    """

    async def work(make):
        pool = make(6)
        values: dict[str, bytes | None] = {}
        lost = 0
        async with pool.cache(code=(3, 2)) as cache:
            for what, i, size in steps:
                key = f"k{i}"
                if what == "put":
                    value = rng.randbytes(size)
                    await cache.put(key, value)
                    values[key] = value
                elif what == "get":
                    assert await cache.get(key) == values.get(key)
                elif what == "delete":
                    assert await cache.delete(key) == (values.pop(key, None) is not None)
                elif what == "join":
                    if len(pool.nodes) < 8:
                        pool.join()
                elif len(pool.nodes) > 5:
                    node = pool.nodes[i % len(pool.nodes)]
                    if what == "leave":
                        await pool.leave(node)
                    else:
                        if what == "lose unseen":
                            await heard(cache, pool)
                        lost += 1
                        await pool.lose(node, announce=what == "lose" or node is pool.nodes[0])
                        if lost == 2:  # p: before the next loss what is degraded has to be repaired
                            pool.announce()
                            while len(pool.nodes) < 6:
                                pool.join()
                            await whole(cache, len(pool.nodes))
                            lost = 0
            pool.announce()
            for key in ("k0", "k1", "k2", "k3"):
                assert await cache.get(key) == values.get(key)

    run(work)
