"""Members that MalleTrain has lost and clients have not, and clients whose members are all gone."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from infinicache import silence
from infinicache.objects import Unavailable

from tests.jobscripts.infinicache.pool import MIB, data, heard, run, until
from tests.waiting import PATIENCE_S


async def says(cache, value):
    """Return whether the cache says that "k" is this value. One with a short limit may not say it
    at once.
    """
    try:
        return await cache.get("k") == value
    except Unavailable:
        return False


@pytest.mark.parametrize("near_bytes", [0, MIB])
def test_a_proxy_that_is_cut_off_learns_from_the_others_that_it_was_replaced(near_bytes):
    """It would go on with an old table, from which clients read old bytes."""

    async def work(make):
        pool = make(6)
        former = pool.nodes[0]
        early = pool.cache(code=(2, 1), near_bytes=near_bytes)
        async with early, pool.cache(code=(2, 1)) as other:
            await heard(early, pool)
            await early.put("k", b"1")
            assert await early.get("k") == b"1"
            pool.cut_off(former)

            async def replaced():
                return former.proxies() == [pool.nodes[0].address]

            await until(replaced, "it knows the new proxy")
            assert await other.get("k") == b"1"
            await other.put("k", b"2")
            assert await early.get("k") == b"2"
            for i in range(10):
                await early.put(f"k{i}", data(900, i))
                assert await other.get(f"k{i}") == data(900, i)
                await other.put(f"k{i}", data(900, -i))
                assert await early.get(f"k{i}") == data(900, -i)
            assert await other.delete("k")
            assert await early.get("k") is None
        await former.close()

    run(work)


@contextlib.asynccontextmanager
async def replaced_proxy(make, keys):
    """A pool of which MalleTrain has lost the proxy, which does not learn of it. Yield all nodes,
    that proxy first; a client that knows it and has put b"old" under ``keys``; and a client of the
    new one.
    """
    pool = make(4)
    former = pool.nodes[0]
    async with pool.cache(code=(2, 1)) as early:
        await heard(early, pool)
        await asyncio.gather(*(early.put(key, b"old") for key in keys))
        former.view = lambda *_: None
        pool.cut_off(former)
        async with pool.cache(code=(2, 1)) as other:
            await heard(other, pool)
            yield [former, *pool.nodes], early, other
    await former.close()


def test_a_put_at_a_proxy_that_was_replaced_is_refused():
    """Before that proxy itself learns of it: the nodes that store the chunks know it."""

    async def work(make):
        async with replaced_proxy(make, ["k"]) as (_, early, other):
            assert await other.get("k") == b"old"
            with pytest.raises(Unavailable, match=r"'k' was not put: the proxy at .* was replaced"):
                await early.put("k", b"2")
            assert await other.get("k") is None, "the old value does not return"
            await early.put("k", b"3")
            assert await other.get("k") == b"3"
            await other.put("k", b"4")
            assert await early.get("k") == b"4"

    run(work)


def test_puts_at_a_proxy_that_was_replaced_are_refused_at_once():
    """All of one client: one of them learns of the new proxy, and the others wait for it."""

    async def work(make):
        keys = [f"k{i}" for i in range(8)]
        async with replaced_proxy(make, keys) as (_, early, other):
            puts = (early.put(key, b"new") for key in keys)
            results = await asyncio.gather(*puts, return_exceptions=True)
            for key, result in zip(keys, results, strict=True):
                value = await other.get(key)
                assert value is None if isinstance(result, Unavailable) else value == b"new"
            assert any(isinstance(result, Unavailable) for result in results)

    run(work)


def test_a_put_that_is_cancelled_while_it_learns_leaves_that_to_the_others():
    """Such as by the time limit of its caller."""

    async def work(make):
        async with replaced_proxy(make, ["k"]) as (nodes, early, other):
            request, go = asyncio.Event(), asyncio.Event()
            for node in nodes:

                async def later(topology=node.server.handlers["topology"]):
                    request.set()
                    await go.wait()
                    return topology()

                node.server.handlers["topology"] = later
            putting = asyncio.ensure_future(early.put("a", b"new"))
            await request.wait()
            putting.cancel()
            await asyncio.gather(putting, return_exceptions=True)
            go.set()
            for i in range(3):
                with contextlib.suppress(Unavailable):
                    await early.put(f"k{i}", b"new")
                    assert await other.get(f"k{i}") == b"new"
            await early.put("k", b"new")
            assert await other.get("k") == b"new"

    run(work)


def test_a_view_that_is_older_than_the_present_one_is_ignored():
    """A proxy may hear of a change from another member first."""

    async def work(make):
        pool = make(2)
        first, second = pool.nodes
        addresses = [first.address, second.address]
        first.view([second.address], (), 7)
        first.view(addresses, (), 6)
        assert first.proxies() == [second.address]
        first.view(addresses, (), 8)
        assert first.proxies() == [first.address]

    run(work)


def test_a_view_that_another_member_tells_of_keeps_the_forecasts():
    """Members do not tell them: a proxy that is cut off places chunks by those of before."""

    async def work(make):
        pool = make(3)
        former = pool.nodes[0]
        async with pool.cache() as cache:
            await heard(cache, pool)
            addresses = [n.address for n in pool.nodes]
            lasts = dict.fromkeys(addresses, 1e6)
            former.view(addresses, (), former.number, lasts)
            pool.nodes[1].view(addresses, (), former.number + 1)

            async def informed():
                return former.number == pool.nodes[1].number

            await until(informed, "it knows the newer view")
            beats, handlers = [], former.server.handlers
            beat = handlers["beat"]

            def counted(address, **arguments):
                beats.append(address)
                return beat(address=address, **arguments)

            handlers["beat"] = counted

            async def computed():
                return set(addresses) <= set(beats)

            await until(computed, "the prospects are computed again")
            nodes = former.proxy.table.nodes
            assert all(nodes[address].prospect.lasts_s > 1e5 for address in addresses)

    run(work)


def test_the_chunks_of_a_node_that_is_cut_off_are_used_until_it_ends(monkeypatch):
    """Its end is not announced: puts would be placed there for ever."""

    async def work(make):
        pool = make(4)
        lost = pool.nodes[3]
        nodes = pool.nodes[0].proxy.table.nodes
        async with pool.cache(code=(3, 1)) as cache:
            await heard(cache, pool)
            await cache.put("k", data(900))
            pool.cut_off(lost)

            async def is_known():
                return lost.address in nodes

            async def forgotten():
                return not await is_known()

            await until(is_known, "it registers again")
            assert await cache.get("k") == data(900)
            await lost.close()
            monkeypatch.setattr(silence, "MAX_SILENCE_S", 0.0)
            await until(forgotten, "the proxy forgets it")
            assert await cache.get("k") == data(900)
            assert lost.address not in (await cache.stat("k")).nodes.values()

    run(work)


def test_a_client_learns_of_members_that_join_while_its_proxy_stays():
    """When the proxy is lost, none of the members that it knew at first is left."""

    async def work(make):
        pool = make(3)
        async with pool.cache(code=(1, 1)) as cache:
            await heard(cache, pool)
            await cache.put("k", b"1")
            for _ in range(2):
                pool.join()
                await heard(cache, pool)
                await pool.lose(pool.nodes[1])
            assert await cache.get("k") in (b"1", None)
            await cache.put("k", b"2")
            await pool.lose(pool.nodes[0])
            assert await cache.get("k") == b"2"
            await cache.put("k", b"3")

    run(work)


@pytest.mark.parametrize("answers", [True, False])
def test_a_client_outlives_all_members_that_it_knew(answers):
    async def work(make):
        pool = make(3)
        calls, limit_s = [], PATIENCE_S if answers else 3.0

        def members():
            calls.append(None)
            if not answers:
                raise OSError("The daemon does not answer.")
            return [node.address for node in pool.nodes]

        async with pool.cache() as patient:
            await patient.put("k", b"1")
        async with pool.cache(near_bytes=MIB, members=members, timeout_s=limit_s) as cache:
            await until(lambda: says(cache, b"1"), "the members that it knows answer")
            assert not (answers and calls), "they were not looked up"
            for node in pool.nodes[:]:
                await pool.lose(node, announce=False)
            for _ in range(3):
                pool.join()
            if answers:
                assert await cache.get("k") is None
                await cache.put("k", b"2")
                assert await cache.get("k") == b"2"
                assert len(calls) == 1
            else:
                with pytest.raises(Unavailable, match="looked up: The daemon does not answer"):
                    await cache.get("k")

    run(work)


def test_a_put_whose_proxy_is_lost_at_its_end_is_said_to_be_in_doubt():
    async def work(make):
        pool = make(3)
        async with pool.cache() as cache:
            handlers = pool.nodes[0].server.handlers
            commit = handlers["commit"]

            async def lost(**arguments):
                await commit(**arguments)
                for connection in [*pool.nodes[0].server.connections]:
                    connection.close()

            handlers["commit"] = lost
            with pytest.raises(Unavailable, match="Whether 'k' was put is not known"):
                await cache.put("k", b"1")
            handlers["commit"] = commit
            assert await cache.get("k") == b"1"

    run(work)


def test_a_stopped_proxy_is_asked_once(monkeypatch):
    """Such as one whose job is suspended: it accepts connections, and never answers."""

    async def work(make):
        pool = make(3)
        former = pool.nodes[0]
        async with pool.cache() as patient:
            await heard(patient, pool)
        async with pool.cache(timeout_s=0.3) as cache:
            await until(lambda: says(cache, None), "it knows the proxy")
            for name, handle in former.server.handlers.items():

                async def silent(handle=handle, **arguments):
                    await asyncio.Event().wait()

                former.server.handlers[name] = silent
            with pytest.raises(Unavailable, match="did not answer within"):
                await cache.get("k")
            pool.cut_off(former)

            async def registered():
                return len(pool.nodes[0].proxy.table.nodes) >= 2

            await until(registered, "the new proxy is ready")
            await until(lambda: says(cache, None), "the new proxy is asked")

        await former.close()

    run(work)
