"""What is interrupted, by a client that dies or a node that does not answer, leaves no memory that
nobody counts, and stops nothing else.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from infinicache import mover, proxy
from infinicache import node as cache_node
from infinicache.codec import Code
from infinicache.connection import CallFailed, Peers
from infinicache.objects import CacheError
from infinicache.table import Table

from tests.jobscripts.infinicache.pool import KEY, data, heard, run, until, whole
from tests.jobscripts.infinicache.test_races import account, delayed


def stored(pool):
    """(address, key, index) of all chunks on nodes."""
    return {
        (node.address, key, index)
        for node in pool.nodes
        for key, _, _, index in node.store.chunks()
    }


def placed(pool):
    """(address, key, index) of all chunks in the proxy's table."""
    objects = pool.nodes[0].proxy.table.objects
    return {(node, e.key, index) for e in objects.values() for index, node in e.at.items()}


@pytest.mark.parametrize("how", ["the client dies", "the request is cancelled"])
def test_a_put_that_is_interrupted_while_it_evicts_leaves_nothing(monkeypatch, how):
    async def work(make):
        pool = make(3, capacity=1000)
        async with pool.cache(code=(2, 1)) as cache:
            await heard(cache, pool)
            for i in range(2):
                await cache.put(f"k{i}", data(900, i))
            begun, go = delayed(pool, "drop")
            client = Peers(KEY)
            put = asyncio.ensure_future(
                client.at(pool.nodes[0].address).call(
                    "begin", key="new", size=900, code=[2, 1], stripe_bytes=900
                )
            )
            await begun.wait()
            if how == "the client dies":
                client.close()
            else:
                put.cancel()
            await asyncio.gather(put, return_exceptions=True)
            await cache.stat("k0")  # the proxy has heard of it
            with monkeypatch.context() as patch:
                patch.setattr(proxy, "MAX_PUT_S", 0.0)
                go.set()

                async def given_up():
                    return "new" not in pool.nodes[0].proxy.table.objects

                await until(given_up, "the put is given up")

            async def counted():
                return stored(pool) == placed(pool)

            await until(counted, "what was evicted is dropped")
            account(pool)
            client.close()

    run(work)


def test_a_node_that_is_lost_while_a_put_evicts_costs_a_chunk():
    async def work(make):
        pool = make(4, capacity=1000)
        async with pool.cache(code=(2, 1)) as cache:
            await heard(cache, pool)
            for i in range(2):
                await cache.put(f"k{i}", data(900, i))
            begun, go = delayed(pool, "drop")
            put = asyncio.ensure_future(cache.put("new", data(900, 7)))
            await begun.wait()
            at = pool.nodes[0].proxy.table.objects["new"].at
            await pool.lose(next(n for n in pool.nodes[1:] if n.address in at.values()))
            go.set()
            receipt = await put
            assert receipt.protection < receipt.target_protection
            assert await cache.get("new") == data(900, 7)

    run(work)


def test_what_a_node_did_not_drop_is_dropped_when_it_is_heard_of():
    async def work(make):
        pool = make(3)
        async with pool.cache(code=(2, 1)) as cache:
            await heard(cache, pool)
            await cache.put("k", data(900))
            other, refused = pool.nodes[1], []
            drop = other.server.handlers["drop"]

            def refusing(items):
                if not refused:
                    refused.append(items)
                    raise CacheError("not now")
                return drop(items)

            other.server.handlers["drop"] = refusing
            assert await cache.delete("k")
            assert refused

            async def dropped():
                return not stored(pool)

            await until(dropped, "the node drops it")

    run(work)


class RefusingPeers:
    """Nodes that refuse each request, after ``meanwhile`` has happened."""

    def __init__(self, meanwhile) -> None:
        self._meanwhile = meanwhile

    def at(self, address):
        return self

    async def call(self, op, /, **arguments):
        self._meanwhile()
        raise CallFailed("not now", "refused")


def test_nobody_waits_for_what_nodes_that_have_left_did_not_drop():
    table = Table()
    for name in ("stays", "leaves"):
        table.add_node(name, 1000)
    moves = mover.Mover(RefusingPeers(lambda: table.lose_node("leaves")), lambda: table)
    assert not asyncio.run(moves.drop("leaves", [("k", 1)]))
    assert moves.undropped == {}
    assert not asyncio.run(moves.drop("stays", [("k", 1)]))
    assert moves.undropped == {"stays": {"k": 1}}
    table.lose_node("stays")
    table.add_node("other", 1000)
    assert not asyncio.run(moves.drop("other", [("k", 2)]))
    assert moves.undropped == {"other": {"k": 2}}


def test_a_move_that_fails_leaves_no_part_of_a_chunk():
    async def work(make):
        pool = make(3)
        async with pool.cache(code=(2, 0), stripe_bytes=500) as cache:
            await heard(cache, pool)
            await cache.put("k", data(1000))
            leaver = next(n for n in pool.nodes[1:] if n.store.chunks())
            get = leaver.server.handlers["get"]

            def failing(key, version, stripe, index):
                if stripe == 1:
                    raise CacheError("not this one")
                return get(key, version, stripe, index)

            leaver.server.handlers["get"] = failing
            pool.announce((leaver,))
            assert await leaver.drain() == 0

            async def counted():
                return stored(pool) == placed(pool)

            await until(counted, "the other node has no part of it")
            account(pool)

    run(work)


def test_a_drain_that_is_cancelled_ends_the_move_that_it_has_begun():
    """The leaver stays after all, and the chunk may be at the other node already."""

    async def work(make):
        pool = make(4)
        async with pool.cache(code=(2, 1)) as cache:
            await heard(cache, pool)
            for i in range(30):
                await cache.put(f"k{i}", data(900, i))
            leaver = pool.nodes[-1]
            begun, go = asyncio.Event(), asyncio.Event()
            for other in pool.nodes:
                pull = other.server.handlers["pull"]

                async def slow(pull=pull, **arguments):
                    answer = await pull(**arguments)
                    begun.set()
                    await go.wait()
                    return answer

                other.server.handlers["pull"] = slow
            before = len(leaver.store.chunks())
            pool.announce((leaver,))
            draining = asyncio.ensure_future(leaver.drain())
            await begun.wait()
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
            pool.announce()
            await cache.stat("k0")  # the proxy has heard of it
            go.set()

            async def counted():
                return stored(pool) == placed(pool)

            await until(counted, "each chunk is where the proxy says")
            account(pool)
            assert len(leaver.store.chunks()) >= before - proxy.MAX_PARALLEL_MOVES, "it stopped"
            for i in range(30):
                assert await cache.get(f"k{i}") == data(900, i)

    run(work)


def test_a_repair_that_fails_is_tried_again(monkeypatch):
    """No node joins, and none is lost."""
    monkeypatch.setattr(mover, "FIRST_RETRY_S", 0.1)

    async def work(make):
        pool = make(5)
        async with pool.cache(code=(2, 1)) as cache:
            await heard(cache, pool)
            await cache.put("k", data(900))
            at = (await cache.stat("k")).nodes
            failed = []
            for other in pool.nodes:
                pull = other.server.handlers["pull"]

                async def failing(pull=pull, **arguments):
                    if len(failed) < 3:
                        failed.append(arguments)
                        raise CacheError("not now")
                    return await pull(**arguments)

                other.server.handlers["pull"] = failing
            lost = next(n for n in pool.nodes[1:] if n.address in at.values())
            await pool.lose(lost)
            await whole(cache, 4)
            assert len(failed) == 3
            assert (await cache.stat("k")).protection == 1

    run(work)


class FailingMover:
    """Moves nothing. ``tried``: keys of the objects, in order."""

    def __init__(self) -> None:
        self.tried: list[str] = []

    async def carry_out(self, move, why):
        self.tried.append(move.key)
        return False


def degraded_table(objects):
    """A table with objects of 300 bytes as 3 + 1 chunks, of which one is missing."""
    table = Table(random.Random(1))  # in one of many placements there is something to rebalance
    for i in range(5):
        table.add_node(f"n{i}", 10_000)
    for i in range(objects):
        entry = table.begin(f"k{i}", 300, Code(3, 1), 300, i + 1, [])
        entry.committed = True
        table.set_chunk(entry, 0, None)
    return table


def test_repairs_that_fail_for_ever_take_turns_and_ever_longer_pauses():
    """Else each attempt would read what it can of all of them at once, and for nothing."""
    now, failing, table = 0.0, FailingMover(), degraded_table(20)

    async def drop(entries):
        raise AssertionError("nothing is lost")

    async def work():
        nonlocal now
        upkeep = mover.Upkeep(failing, drop, lambda: now)
        upkeep.find_degraded(table)
        attempts = []
        while now < 2000.0:
            failing.tried.clear()
            spent = await upkeep.one_piece(table)
            assert len(failing.tried) <= 1, "one object"
            assert spent == len(failing.tried) * 100 * 3, "what the node may have read for it"
            attempts += [now] * ("k7" in failing.tried)
            now += 0.25
        assert len(upkeep) == 20
        pauses = np.diff(attempts)
        np.testing.assert_allclose(pauses, [10, 20, 40, 80, 160, 320, 600, 600], atol=5.0)
        del table.objects["k7"]
        now += 600.0
        await upkeep.one_piece(table)
        assert len(upkeep) == 19, "what is gone does not wait"

    asyncio.run(work())


def test_a_put_that_takes_long_for_its_size_is_not_given_up(monkeypatch):
    monkeypatch.setattr(proxy, "MAX_PUT_S", 0.0)
    monkeypatch.setattr(proxy, "MIN_PUT_BYTES_S", 1e-3)
    looked = asyncio.Event()
    one_piece = mover.Upkeep.one_piece

    async def noted(*arguments):
        looked.set()
        return await one_piece(*arguments)

    monkeypatch.setattr(mover.Upkeep, "one_piece", noted)

    async def work(make):
        pool = make(3)

        async def pieces():
            yield data(400)
            for _ in range(2):  # the proxy has looked for puts that have died
                looked.clear()
                await looked.wait()
            yield data(500)

        async with pool.cache(code=(2, 1)) as cache:
            await cache.put_stream("k", 900, pieces())
            assert await cache.get("k") == data(400) + data(500)

    run(work)


@pytest.mark.parametrize(("size", "limit_s"), [(0, 60), (10**9, 80), (10**10, 260), (10**11, 300)])
def test_the_memory_of_a_client_that_died_is_free_in_minutes(size, limit_s):
    assert proxy.put_limit_s(size) == limit_s


def test_a_node_that_is_stopped_stops_no_repair(monkeypatch):
    """As a process that Slurm suspends: its connections stay open."""
    monkeypatch.setattr(cache_node, "SOURCE_TIMEOUT_S", 0.05)

    async def work(make):
        pool = make(6)
        async with pool.cache(code=(2, 2)) as cache:
            await heard(cache, pool)
            await cache.put("k", data(900))
            at = (await cache.stat("k")).nodes
            by_address = {node.address: node for node in pool.nodes}
            lost = next(i for i, address in at.items() if address != pool.nodes[0].address)
            stopped = next(i for i in at if i != lost and at[i] != pool.nodes[0].address)
            never = asyncio.Event()

            async def silent(**arguments):
                await never.wait()

            by_address[at[stopped]].server.handlers["get"] = silent
            await pool.lose(by_address[at[lost]])
            await whole(cache, 5)
            assert (await cache.stat("k")).protection == 2

    run(work)
