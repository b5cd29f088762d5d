"""Slots of proxies that move between processes: which process answers for a key, and what it knows
of the nodes.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from infinicache.connection import CallFailed, Peers
from infinicache.objects import Shape, StoredObject
from infinicache.proxies import Ring
from infinicache.proxy import Proxy

from tests.jobscripts.infinicache.pool import KEY, data, heard, run
from tests.jobscripts.infinicache.test_races import delayed


def key_of(slot, slots=2):
    """A key of this slot."""
    ring = Ring(slots)
    return next(key for key in (f"k{i}" for i in range(1000)) if ring.slot(key) == slot)


async def within_loop(work):
    """Let a test use a proxy without nodes; it needs a running loop."""
    proxy = Proxy(Peers(b"key"), slots=2)

    def register(slot, *addresses, objects=()):
        for address in addresses:
            answer = proxy.handlers()["register"](
                address=address,
                capacity=1,
                slot=slot,
                objects=msgspec.to_builtins(list(objects)),
                leaving=False,
            )
        return answer

    try:
        work(proxy, register)
    finally:
        proxy.close()


@pytest.mark.parametrize("leaves", ["in the same view", "before it registers again"])
def test_a_proxy_that_gains_a_slot_forgets_a_node_that_leaves(leaves):
    """It would go on placing chunks there."""

    def work(proxy, register):
        proxy.view(["a", "b", "c"], (), (0,), {})
        register(0, "a", "b", "c")
        if leaves == "in the same view":
            proxy.view(["a", "b"], (), (0, 1), {})
        else:
            proxy.view(["a", "b", "c"], (), (0, 1), {})
            proxy.view(["a", "b"], (), (0, 1), {})
        register(0, "a", "b")
        assert set(proxy.table.nodes) == {"a", "b"}

    asyncio.run(within_loop(work))


def test_a_proxy_that_gives_a_slot_back_forgets_its_nodes():
    def work(proxy, register):
        proxy.view(["a", "b"], (), (0, 1), {})
        register(0, "a")
        register(1, "b")
        proxy.view(["a", "b"], (), (0,), {})
        assert set(proxy.table.nodes) == {"a"}
        assert not proxy.handlers()["beat"](address="b", number=1)["served"]
        proxy.view(["a", "b"], (), (0, 1), {})
        assert not proxy.handlers()["beat"](address="b", number=1)["registered"], (
            "what it has stored meanwhile is not known"
        )

    asyncio.run(within_loop(work))


def test_another_process_at_the_address_of_a_node_may_have_another_slot():
    """As with --port: it is started again, and has the slot of its place among the members."""

    def work(proxy, register):
        proxy.view(["a", "b"], (), (0,), {})
        register(0, "a", "b")
        register(1, "b")
        assert set(proxy.table.nodes) == {"a"}
        assert proxy.handlers()["beat"](address="b", number=1)["registered"]

    asyncio.run(within_loop(work))


def test_a_client_that_knows_an_earlier_proxy_does_not_write_past_the_others():
    """The second node is leaving and stays: for a while the first one served its slot too."""

    async def work(make):
        pool, key = make(2, proxies=2), key_of(1)
        second = pool.nodes[1]
        pool.announce((second,))
        async with pool.cache() as early, pool.cache() as late:
            await heard(early, pool)
            await early.put(key, b"1")
            assert await early.get(key) == b"1"
            pool.announce()
            await early.put(key, b"2")
            assert await late.get(key) == await early.get(key) == b"2"
            await late.put(key, b"3")
            assert await early.get(key) == b"3"
            assert await early.delete(key)
            assert await late.get(key) is None

    run(work)


@pytest.mark.parametrize("change", ["put", "delete"])
def test_a_slot_that_moves_while_nodes_are_waited_for_takes_the_change_along(change):
    async def work(make):
        pool, key = make(2, proxies=2), key_of(1)
        first, second = pool.nodes
        pool.announce((second,))
        async with pool.cache() as cache, pool.cache() as other:
            await heard(cache, pool)
            await cache.put(key, b"old")
            begun, go = delayed(pool, "drop")
            blocking = asyncio.ensure_future(cache.put(key, b"between"))
            await begun.wait()
            changing = asyncio.ensure_future(
                other.put(key, b"new") if change == "put" else other.delete(key)
            )
            await other.stat(key)  # the other request waits behind the first one
            pool.announce()
            go.set()
            await asyncio.gather(blocking, changing, return_exceptions=True)
            assert key not in first.proxy.table.objects
            values = [await each.get(key) for each in (cache, other, cache)]
            assert len(set(map(bytes, filter(None, values)))) <= 1
            assert await cache.put(key, b"last")
            assert await other.get(key) == b"last"
            assert not any(k == key for k, *_ in first.store.chunks())

    run(work)


def test_an_old_value_does_not_return_with_a_slot():
    async def work(make):
        pool, key, other = make(2, proxies=2), key_of(1), key_of(0)
        first, second = pool.nodes
        pool.announce((second,))
        async with pool.cache() as cache:
            await heard(cache, pool)
            await cache.put(key, b"old")
            await cache.put(other, b"kept")
            assert first.store.chunks(), "the first node has the slot of the other"
            pool.announce()
            assert await cache.get(key) is None, "its proxy does not know it"
            await cache.put(key, b"new")
            await cache.delete(key)
            await pool.lose(second)
            assert await cache.get(key) is None
            assert await cache.get(other) == b"kept"
            assert {k for k, *_ in first.store.chunks()} == {other}

    run(work)


def test_chunks_of_keys_of_another_proxy_are_dropped_when_a_node_registers():
    """From when one process served both slots: they could replace what is newer."""

    def work(proxy, register):
        proxy.view(["a", "b"], (), (0,), {})
        shape = Shape(1, 1, 0)
        objects = [StoredObject(key_of(slot), 7, shape, [0], 0.0) for slot in (0, 1)]
        answer = register(0, "a", objects=objects)
        assert answer["drop"] == [(key_of(1), 7)]
        assert set(proxy.table.objects) == {key_of(0)}

    asyncio.run(within_loop(work))


@pytest.mark.parametrize(("count", "proxies", "leaver"), [(5, 1, 0), (5, 2, 1), (2, 2, 1)])
def test_a_proxy_that_leaves_hands_over_to_one_that_does_not_know_it_yet(count, proxies, leaver):
    """The list of members reaches the one that leaves first."""

    async def work(make):
        pool = make(count, proxies=proxies)
        node, request = pool.nodes[leaver], asyncio.Event()
        for other in pool.nodes:
            for name in ("register", "beat"):
                handle = other.server.handlers[name]

                def noting(handle=handle, **arguments):
                    if arguments["address"] == node.address and drains:
                        request.set()
                    return handle(**arguments)

                other.server.handlers[name] = noting
        drains = False
        async with pool.cache(code=(2, 1)) as cache:
            await heard(cache, pool)
            for i in range(20):
                await cache.put(f"k{i}", data(3000, i))
            stored = node.store.used
            assert stored
            node.view([n.address for n in pool.nodes], [node.address], pool.number + 1)
            drains = True
            draining = asyncio.ensure_future(node.drain())
            await asyncio.wait([draining, asyncio.ensure_future(request.wait())],
                               return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
            pool.announce((node,))
            assert await draining == stored
            await pool.lose(node)
            for i in range(20):
                assert await cache.get(f"k{i}") == data(3000, i)

    run(work)


def test_a_request_for_a_key_of_another_proxy_is_refused():
    async def work(make):
        pool = make(4, proxies=2)
        async with pool.cache() as cache:
            await heard(cache, pool)
        peers = Peers(KEY)
        for name in ("find", "delete"):
            with pytest.raises(CallFailed, match=r"not the proxy of 'k\d+'; ask") as failed:
                await peers.at(pool.nodes[0].address).call(name, key=key_of(1))
            assert failed.value.code == "unavailable"
        peers.close()

    run(work)
