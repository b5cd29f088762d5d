"""A put takes a key while the proxy waits for nodes because of what was there before."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from infinicache import CacheError, loads, proxy

from tests.jobscripts.infinicache.pool import data, heard, run, until


def delayed(pool, name):
    """Have the first request of this name wait at each node. Return (begun, go): events."""
    begun, go = asyncio.Event(), asyncio.Event()
    for node in pool.nodes:
        handle = node.server.handlers[name]

        async def first(handle=handle, **arguments):
            if not begun.is_set():
                begun.set()
                await go.wait()
            return handle(**arguments)

        node.server.handlers[name] = first
    return begun, go


def account(pool):
    """Assert that the proxy counts on each node what its objects have there, and nothing else."""
    table = pool.nodes[0].proxy.table
    expected = {address: {} for address in table.nodes}
    for entry in table.objects.values():
        for index, address in entry.at.items():
            expected[address].setdefault(entry.key, set()).add(index)
    assert {a: n.chunks for a, n in table.nodes.items()} == expected
    for address, node in table.nodes.items():
        shares = (len(i) * table.objects[k].shape.share for k, i in expected[address].items())
        assert node.reserved == sum(shares)


async def replaced(cache, pool, begun, go, waiting=None):
    """Put another value while ``waiting`` waits; then all is as if nothing had been before."""
    await begun.wait()
    table, put = pool.nodes[0].proxy.table, asyncio.ensure_future(cache.put("k", data(900, 2)))

    async def gone():  # a put waits until what is forgotten is dropped
        return put.done() or "k" not in table.objects

    await until(gone, "the put is over, or waits for the nodes")
    go.set()
    await put
    if waiting is not None:
        await waiting
    for _ in range(10):  # answers that are under way in this process arrive
        await cache.stat("k")
    assert await cache.get("k") == data(900, 2)
    account(pool)


@pytest.mark.parametrize("change", ["put", "delete", "nothing"])
def test_a_load_does_not_undo_what_another_client_does_meanwhile(change):
    async def work(make):
        pool = make(3)
        async with pool.cache(near_bytes=9999) as cache, pool.cache() as other:
            begun, go = asyncio.Event(), asyncio.Event()

            async def load(key):
                begun.set()
                await go.wait()
                return b"old"

            loading = asyncio.ensure_future(cache.get("k", load))
            await begun.wait()
            if change == "put":
                await other.put("k", b"new")
            elif change == "delete":
                await other.delete("k")
            go.set()
            assert await loading == b"old", "it was so when it was asked for"
            expected = {"put": b"new", "delete": None, "nothing": b"old"}[change]
            assert await cache.get("k") == await other.get("k") == expected
            assert await cache.get("k", lambda key: b"again") == (expected or b"again")
            account(pool)

    run(work)


@pytest.mark.parametrize("order", ["put, get", "get, put, find"])
@pytest.mark.parametrize("end", ["commits", "stays unfinished"])
def test_a_load_does_not_replace_a_put_that_is_under_way_at_its_miss_and_ends_before_it(order, end):
    """The version of that put is older than the miss. One that does not end is overtaken: its
    client may have died.
    """

    async def work(make):
        pool = make(3)
        async with pool.cache(code=(2, 1)) as putter, pool.cache(code=(2, 1)) as cache:
            await heard(cache, pool)
            begun, go, request, find, missed, loaded = (asyncio.Event() for _ in range(6))

            async def pieces():
                begun.set()
                await go.wait()
                yield b"new"

            async def load(key):
                missed.set()
                await loaded.wait()
                return b"old"

            handlers = pool.nodes[0].server.handlers
            find_object = handlers["find"]

            async def later(**arguments):
                request.set()
                await find.wait()
                return await find_object(**arguments)

            handlers["find"] = later
            if order == "get, put, find":
                loading = asyncio.ensure_future(cache.get("k", load))
                await request.wait()
            putting = asyncio.ensure_future(putter.put_stream("k", 3, pieces()))
            await begun.wait()
            if order == "put, get":
                loading = asyncio.ensure_future(cache.get("k", load))
            find.set()
            await missed.wait()
            if end == "commits":
                go.set()
                await putting
            loaded.set()
            assert await loading == b"old"
            assert await cache.get("k") == (b"new" if end == "commits" else b"old")
            if end != "commits":
                go.set()
                with pytest.raises(CacheError, match="overtaken"):
                    await putting
            account(pool)

    run(work)


@pytest.fixture
def clock(monkeypatch):
    """The clock of proxies, which is ``ahead_s`` ahead."""
    clock = SimpleNamespace(
        ahead_s=0.0,
        monotonic=lambda: time.monotonic() + clock.ahead_s,
        time=lambda: time.time() + clock.ahead_s,
        time_ns=lambda: time.time_ns() + int(clock.ahead_s * 1e9),
    )
    monkeypatch.setattr(proxy, "time", clock)
    monkeypatch.setattr(loads, "time", clock)
    return clock


@pytest.mark.parametrize("change", ["put", "delete"])
def test_a_load_that_reaches_the_proxy_late_does_not_undo_what_was_done_meanwhile(clock, change):
    """As if its put was under way for half a minute: its age counts from the miss."""

    async def work(make):
        pool = make(3)
        async with pool.cache() as cache, pool.cache() as other:
            handlers = pool.nodes[0].server.handlers
            begin_put = handlers["begin"]

            async def later(**arguments):
                if "loaded_s" in arguments:
                    clock.ahead_s = 30.0
                return await begin_put(**arguments)

            handlers["begin"] = later

            async def load(key):
                await other.put("k", b"new")
                if change == "delete":
                    await other.delete("k")
                return b"old"

            assert await cache.get("k", load) == b"old"
            assert clock.ahead_s
            assert await other.get("k") == (b"new" if change == "put" else None)
            account(pool)

    run(work)


def test_a_load_that_waits_for_a_slow_delete_does_not_undo_it(clock):
    """The delete begins after the miss and takes longer than the load."""

    async def work(make):
        pool = make(3)
        async with pool.cache() as cache, pool.cache() as other:
            missed, loaded, waits = (asyncio.Event() for _ in range(3))

            async def load(key):
                missed.set()
                await loaded.wait()
                return b"old"

            loading = asyncio.ensure_future(cache.get("k", load))
            await missed.wait()
            await other.put("k", b"new")
            begun, go = delayed(pool, "drop")
            deleting = asyncio.ensure_future(other.delete("k"))
            await begun.wait()
            handlers = pool.nodes[0].server.handlers
            begin_put = handlers["begin"]

            async def entered(**arguments):
                put = asyncio.ensure_future(begin_put(**arguments))
                await asyncio.sleep(0)  # it runs up to the lock
                waits.set()
                return await put

            handlers["begin"] = entered
            loaded.set()
            await waits.wait()
            clock.ahead_s = 30.0
            go.set()
            assert await deleting
            assert await loading == b"old"
            assert await other.get("k") is None
            account(pool)

    run(work)


def test_a_proxy_of_an_older_version_stores_what_was_loaded():
    """It has no argument ``loaded_s``."""

    async def work(make):
        pool = make(3)
        handlers = pool.nodes[0].server.handlers
        begin_put = handlers["begin"]

        async def older(key, size, code, stripe_bytes, copy=""):
            return await begin_put(key, size, code, stripe_bytes, copy)

        handlers["begin"] = older
        async with pool.cache() as cache:
            await cache.put("put", b"1")
            assert await cache.get("loaded", lambda key: b"2") == b"2"
            assert (await cache.get("put"), await cache.get("loaded")) == (b"1", b"2")

    run(work)


def test_a_load_replaces_what_cannot_be_read():
    async def work(make):
        pool = make(3)
        async with pool.cache(code=(2, 0)) as cache:
            await cache.put("k", b"lost")
            for node in pool.nodes:
                node.store.drop("k", (await cache.stat("k")).version)
            assert await cache.get("k", lambda key: b"again") == b"again"
            assert await cache.get("k") == b"again"

    run(work)


def test_a_report_of_bad_chunks_is_about_the_object_that_was_there():
    async def work(make):
        pool = make(3)
        async with pool.cache(code=(2, 1)) as cache:
            await cache.put("k", data(900, 1))
            there = await cache.stat("k")
            for node in pool.nodes:
                for index in range(2):
                    node.store.forget("k", there.version, index)
            begun, go = delayed(pool, "forget")
            report = pool.nodes[0].server.handlers["report"](
                key="k", version=there.version, bad={i: there.nodes[i] for i in range(2)}
            )
            await replaced(cache, pool, begun, go, asyncio.ensure_future(report))

    run(work)


def test_while_a_report_is_checked_another_object_may_take_the_key():
    async def work(make):
        pool = make(3)
        async with pool.cache(code=(2, 1)) as cache:
            await cache.put("k", data(900, 1))
            there = await cache.stat("k")
            begun, go = delayed(pool, "check")
            report = pool.nodes[0].server.handlers["report"](
                key="k", version=there.version, bad={i: there.nodes[i] for i in range(2)}
            )
            await replaced(cache, pool, begun, go, asyncio.ensure_future(report))

    run(work)


async def begin(pool, cache):
    """Begin a put, and return its version."""
    await heard(cache, pool)
    arguments = {"key": "k", "size": 900, "code": [2, 1], "stripe_bytes": 900}
    return (await pool.nodes[0].server.handlers["begin"](**arguments))["version"]


def test_a_put_that_fails_takes_nothing_from_the_next_one():
    async def work(make):
        pool = make(3)
        async with pool.cache(code=(2, 1)) as cache:
            version = await begin(pool, cache)
            begun, go = delayed(pool, "drop")

            async def fail():
                commit = pool.nodes[0].server.handlers["commit"]
                with pytest.raises(CacheError, match="was not put"):
                    await commit(key="k", version=version, missing=[0, 1, 2])

            await replaced(cache, pool, begun, go, asyncio.ensure_future(fail()))

    run(work)


def test_a_put_that_died_takes_nothing_from_the_next_one(monkeypatch):
    async def work(make):
        pool = make(3)
        async with pool.cache(code=(2, 1)) as cache:
            begun, go = delayed(pool, "drop")
            await begin(pool, cache)
            with monkeypatch.context() as patch:
                patch.setattr(proxy, "MAX_PUT_S", 0.0)
                await begun.wait()
            await replaced(cache, pool, begun, go)

    run(work)
