"""What the cache does when nodes, bytes or descriptors are missing, and what it refuses."""

import asyncio
import errno
import os
import socket

import pytest
from infinicache import AsyncCache, Cache, CacheError, CacheNode, mover, stripes
from infinicache.connection import Peers
from infinicache.values import as_bytes

from tests.jobscripts.infinicache.pool import KEY, MIB, data, heard, run, until, whole
from tests.waiting import NEVER_S, PATIENCE_S


def test_what_is_lost_is_dropped_and_puts_go_on():
    """More nodes than the parity go at once, unannounced: what survives of lost objects must not
    take the room of new ones.
    """

    async def work(make):
        pool = make(8, capacity=8 * MIB)
        async with pool.cache(code=(4, 2), hedge_s=NEVER_S) as cache:
            await heard(cache, pool)
            for i in range(40):  # each takes 1.5 MiB of 64: the pool is full
                await cache.put(f"old{i}", data(MIB, i))
            for node in pool.nodes[4:]:
                await pool.lose(node, announce=False)
            pool.announce()

            async def noticed():
                return len((await cache.summary())[0]["nodes"]) == 4

            await until(noticed, "the proxy knows of the loss")
            lost = (await cache.summary())[0]["lost"]
            assert lost > 20
            receipts = [await cache.put(f"new{i}", data(MIB, 100 + i)) for i in range(20)]
            assert len(receipts) == 20
            stored_keys = {key for node in pool.nodes for key, *_ in node.store.chunks()}
            objects = pool.nodes[0].proxy.table.objects
            assert stored_keys <= objects.keys(), "no node keeps chunks of what nobody can read"
            for i in range(20):
                assert await cache.get(f"new{i}") in (data(MIB, 100 + i), None)
            assert await cache.get("new19") == data(MIB, 119)

    run(work)


def test_what_a_node_has_lost_is_dropped_elsewhere():
    """A node registers anew with less than it had."""

    async def work(make):
        pool = make(5, capacity=8 * MIB)
        async with pool.cache(code=(3, 1)) as cache:
            await heard(cache, pool)
            await cache.put("k", data(MIB))
            proxy = pool.nodes[0].proxy
            at = proxy.table.objects["k"].at
            for index in (0, 1):
                address = at[index]
                node = next(n for n in pool.nodes if n.address == address)
                node.store.forget("k", proxy.table.objects["k"].version, index)
                await (
                    Peers(KEY)
                    .at(pool.nodes[0].address)
                    .call(
                        "register",
                        address=address,
                        capacity=node.store.capacity,
                        slot=node.slot,
                        objects=[],
                        leaving=False,
                    )
                )

            async def dropped():
                return not any(node.store.chunks() for node in pool.nodes)

            await until(dropped, "the other chunks are dropped")
            assert await cache.get("k") is None

    run(work)


def test_answers_of_other_requests_are_not_believed(monkeypatch):
    """A chunk of another key has a check sum that fits."""

    async def work(make):
        pool = make(5)
        async with pool.cache(code=(3, 1)) as cache:
            await cache.put("a", b"a" * 999)
            await cache.put("b", b"b" * 999)
            versions = {key: (await cache.stat(key)).version for key in "ab"}
            for node in pool.nodes:
                serve = node.server.handlers["get"]

                def other_answer(key, version, stripe, index, serve=serve):
                    other = {"a": "b", "b": "a"}[key]
                    return serve(other, versions[other], stripe, index)

                node.server.handlers["get"] = other_answer
            assert await cache.get("a") is None
            assert await cache.get("b") is None

    run(work)


def test_a_client_that_can_read_nothing_takes_nothing_from_others(monkeypatch):
    """As one without descriptors, or behind a wall: to it all chunks are lost."""

    async def work(make):
        pool = make(5)
        async with pool.cache(code=(3, 1)) as cache, pool.cache() as other:
            await cache.put("k", data(900))
            before = await other.stat("k")
            with monkeypatch.context() as patch:
                patch.setattr(stripes, "is_chunk", lambda *_: False)  # its own check of chunks
                assert await cache.get("k") is None
            assert await other.stat("k") == before
            assert await other.get("k") == data(900)
            assert (await other.summary())[0]["lost"] == 0

    run(work)


def test_a_client_that_can_read_nothing_lets_nodes_check_a_chunk_once_in_a_while(monkeypatch):
    """Each check reads the whole chunk."""
    monkeypatch.setattr(mover, "INTACT_S", PATIENCE_S)

    async def work(make):
        pool = make(5)
        checks = []
        for node in pool.nodes:
            handle = node.server.handlers["check"]

            def counting(address=node.address, handle=handle, **arguments):
                checks.extend((address, index) for index in arguments["indices"])
                return handle(**arguments)

            node.server.handlers["check"] = counting
        async with pool.cache(code=(3, 1)) as cache:
            await heard(cache, pool)
            await cache.put("k", data(900))
            place = await cache.stat("k")
            elsewhere = next(n.address for n in pool.nodes if n.address not in place.nodes.values())
            client = Peers(KEY)
            report = client.at(pool.nodes[0].address).call
            for bad in (dict.fromkeys(place.nodes, elsewhere), {0: place.nodes[0]}):
                await report("report", key="k", version=place.version, bad=bad)
            assert checks == [(place.nodes[0], 0)], "not where a chunk is no longer"
            for _ in range(3):
                await report("report", key="k", version=place.version, bad=place.nodes)
            assert sorted(checks) == sorted((node, i) for i, node in place.nodes.items())
            assert (await cache.stat("k")).nodes == place.nodes
            monkeypatch.setattr(mover, "INTACT_S", 0.0)
            lost = next(n for n in pool.nodes if n.address == place.nodes[0])
            lost.store.forget("k", place.version, 0)
            await report("report", key="k", version=place.version, bad=place.nodes)
            await whole(cache, 5)
            assert len(checks) == 8
            client.close()

    run(work)


@pytest.mark.parametrize("damage", ["absent", "changed"])
def test_of_the_chunks_that_a_client_cannot_read_those_that_are_bad_are_rebuilt(damage):
    async def work(make):
        pool = make(5)
        async with pool.cache(code=(3, 1)) as cache:
            await heard(cache, pool)
            await cache.put("k", data(900))
            there = await cache.stat("k")
            for node in pool.nodes:
                if node.address == there.nodes[1] and damage == "absent":
                    node.store.forget("k", there.version, 1)
                elif node.address == there.nodes[1]:
                    chunk, _ = node.store.get("k", there.version, 0, 1)
                    chunk[0] ^= 1
            proxy = Peers(KEY)
            await proxy.at(pool.nodes[0].address).call(
                "report", key="k", version=there.version, bad=there.nodes
            )
            proxy.close()

            async def repaired():
                return (await cache.stat("k")).protection == 1

            await until(repaired, "the bad chunk is rebuilt")
            now = await cache.stat("k")
            assert {i: now.nodes[i] for i in (0, 2, 3)} == {i: there.nodes[i] for i in (0, 2, 3)}
            assert await cache.get("k") == data(900)

    run(work)


def test_another_cache_at_the_address_of_a_member_that_has_left_is_passed_over():
    async def work(make):
        pool = make(3)
        other = CacheNode(MIB, b"another secret")
        other.view([other.address])
        addresses = [other.address, *(node.address for node in pool.nodes)]
        async with AsyncCache(addresses, KEY) as cache:
            await cache.put("k", b"x")
            assert await cache.get("k") == b"x"
        async with AsyncCache([other.address], KEY) as cache:
            with pytest.raises(CacheError, match="Its key is that of its job"):
                await cache.get("k")
        await other.close()

    run(work)


def arrays():
    numpy = pytest.importorskip("numpy")
    table = numpy.arange(12, dtype="<i4").reshape(3, 4)
    return {
        "strided": (table[:, ::2], table[:, ::2].tobytes()),
        "transposed": (table.T, table.T.tobytes()),
        "fortran": (numpy.asfortranarray(table), table.tobytes()),
        "empty": (numpy.empty((0, 5)), b""),
        "scalar": (numpy.array(7, dtype="<i4"), b"\7\0\0\0"),
        "structured": (numpy.zeros(2, dtype=[("NO", "i4"), ("b", "f8")]), bytes(24)),
        "of another machine": (table.astype(">i4"), table.astype(">i4").tobytes()),
        "memoryview": (memoryview(b"abcdef")[::2], b"ace"),
    }


def test_arrays_are_stored_in_the_order_of_c():
    async def work(make):
        async with make(3).cache() as cache:
            for name, (value, expected) in arrays().items():
                assert (await cache.put(name, value)).size == len(expected)
                assert await cache.get(name) == expected, name
                assert await cache.get(f"{name} loaded", lambda key, value=value: value) == expected

            async def pieces():
                for value, _ in arrays().values():
                    yield value

            expected = b"".join(e for _, e in arrays().values())
            await cache.put_stream("all", len(expected), pieces())
            assert await cache.get("all") == expected

    run(work)


def test_a_mask_that_masks_nothing_is_not_stored():
    numpy = pytest.importorskip("numpy")
    pairs = numpy.ma.zeros(2, dtype=[("a", "i4"), ("b", "f8")])
    numbers = [numpy.ma.masked_array([1, 2], mask) for mask in (numpy.ma.nomask, [0, 0])]
    for value in (*numbers, pairs):
        assert as_bytes(value) == value.data.tobytes()
    pairs["b"][1] = numpy.ma.masked
    with pytest.raises(TypeError, match="mask of this MaskedArray would be lost"):
        as_bytes(pairs)


def test_what_has_no_bytes_is_refused():
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    refused = [
        (numpy.array([{}, None]), "holds Python objects.* Pickle it"),
        (numpy.zeros(2, dtype=[("a", "i4"), ("b", "O")]), "holds Python objects.* Pickle it"),
        (numpy.ma.masked_array([1, 2], [0, 1]), r"mask .* lost; give .*value\.filled\(\)"),
        (numpy.zeros(2, dtype="M8[s]"), r"its type datetime64\[s\] has none"),
        (torch.zeros(2), r"Tensor has no bytes .*value\.detach\(\)\.cpu\(\)\.numpy\(\)"),
        ("text", r"encode it: value\.encode\(\)"),
        (7, "A int has no bytes.* pickle it"),
        (None, "A NoneType has no bytes.* pickle it"),
    ]

    async def work(make):
        async with make(3).cache() as cache:
            for value, words in refused:
                with pytest.raises(TypeError, match=words):
                    await cache.put("k", value)
                with pytest.raises(TypeError, match=words):
                    await cache.get("k", lambda key, value=value: value)
            for key, words in ((7, r"give str\(key\)"), (b"k", r"give key\.decode\(\)")):
                for call in (cache.get, cache.stat, cache.delete, lambda key: cache.put(key, b"")):
                    with pytest.raises(TypeError, match=words):
                        await call(key)
            with pytest.raises(ValueError, match="half of a character"):
                await cache.put("\udc80", b"")
            assert [p["objects"] for p in await cache.summary()] == [0]

    run(work)


def test_a_cache_that_is_closed_during_a_load_returns_what_is_loaded():
    async def work(make):
        async with make(3).cache() as cache:
            begun, go = asyncio.Event(), asyncio.Event()

            async def load(key):
                begun.set()
                await go.wait()
                return b"loaded"

            loading = asyncio.ensure_future(cache.get("k", load))
            await begun.wait()
            cache.close()
            go.set()
            assert await loading == b"loaded"

    run(work)


def test_a_closed_cache_says_so():
    async def work(make):
        pool = make(3)
        cache = pool.cache(near_bytes=MIB, near_s=NEVER_S)
        await cache.put("k", b"x")
        assert await cache.get("k") == b"x"
        cache.close()
        for call in (cache.get, cache.stat, cache.delete, lambda key: cache.put(key, b"")):
            with pytest.raises(CacheError, match="This cache is closed; make a new one"):
                await call("k")

        def use():
            closed = Cache([n.address for n in pool.nodes], KEY)
            closed.close()
            closed.close()
            with pytest.raises(CacheError, match="This cache is closed; make a new one"):
                closed.get("k")

        await asyncio.to_thread(use)
        waiting = Cache([n.address for n in pool.nodes], KEY)
        with pytest.raises(CacheError, match="use AsyncCache there"):
            waiting.get("k")
        waiting.close()

    run(work)


def test_a_cache_of_one_loop_is_not_used_in_another():
    async def work(make):
        pool = make(3)
        cache = pool.cache()
        await cache.put("k", b"x")

        def elsewhere():
            with pytest.raises(CacheError, match="in use by another event loop"):
                asyncio.run(cache.get("k"))

        await asyncio.to_thread(elsewhere)
        assert await cache.get("k") == b"x"

        def one_after_another():
            later = pool.cache()
            for _ in range(2):
                assert asyncio.run(later.get("k")) == b"x"
            later.close()

        await asyncio.to_thread(one_after_another)
        cache.close()

    run(work)


def test_without_descriptors_the_node_rests_and_then_accepts(monkeypatch):
    """A listener stays readable while a connection waits: it must not be asked all the time."""

    async def work(make):
        pool = make(3)
        accept, tries, short = socket.socket.accept, [], True

        def accepted(listener):
            tries.append(listener)
            if short:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return accept(listener)

        monkeypatch.setattr(socket.socket, "accept", accepted)
        async with pool.cache() as cache:
            putting = asyncio.ensure_future(cache.put("k", b"x"))
            while not tries:  # noqa: ASYNC110
                await asyncio.sleep(0)
            begun = len(tries)
            for _ in range(1000):
                await asyncio.sleep(0)
            assert len(tries) - begun < 100
            short = False
            await putting
            assert await cache.get("k") == b"x"

    run(work)
