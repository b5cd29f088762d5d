"""Nodes that are no members are forgotten when they do not answer, and not before."""

from __future__ import annotations

import asyncio

import pytest
from infinicache import CacheError, mover, silence
from infinicache.silence import Silence

from tests.jobscripts.infinicache.pool import heard, run, until


def test_a_silent_node_is_asked_once_until_it_is_heard_of():
    nodes = Silence()
    nodes.overdue((), 100.0)
    looks = [nodes.overdue(["a"], 100.0 + s) for s in range(1, 13)]
    assert looks == [[]] * 10 + [["a"], []]
    assert nodes.lasts("a")
    nodes.end("a")
    assert not nodes.lasts("a")
    assert nodes.overdue(["a"], 113.0) == []


def test_the_time_for_which_the_proxy_was_stopped_is_no_silence():
    nodes = Silence()
    nodes.overdue(["a"], 100.0)
    assert nodes.overdue(["a"], 1000.0) == []


async def never(**arguments):
    await asyncio.Event().wait()


def test_a_node_is_heard_of_by_a_proxy_while_another_proxy_is_stopped():
    """Its processes accept connections and do not answer."""

    async def work(make):
        pool = make(6, proxies=2)
        async with pool.cache(code=(1, 1)) as cache:
            await heard(cache, pool)
            stranger = pool.nodes[5]
            pool.cut_off(stranger)
            for name in pool.nodes[0].server.handlers:
                pool.nodes[0].server.handlers[name] = never
            handlers, beats = pool.nodes[1].server.handlers, []
            beat = handlers["beat"]

            def counted(address, **arguments):
                beats.append(address)
                return beat(address=address, **arguments)

            handlers["beat"] = counted

            async def is_heard_of():
                return beats.count(stranger.address) > 4

            await until(is_heard_of, "it is heard of")
        await stranger.close()

    run(work)


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_silent_node_is_forgotten_if_it_does_not_answer(monkeypatch, is_alive):
    async def work(make):
        pool = make(4)
        stranger = pool.nodes[3]
        proxy = pool.nodes[0].proxy
        async with pool.cache(code=(3, 0)) as cache:
            await heard(cache, pool)
            pool.cut_off(stranger)
            nodes = proxy.table.nodes

            async def is_known():
                return stranger.address in nodes

            await until(is_known, "it registers again")
            health, questions = stranger.server.handlers["health"], []
            register = pool.nodes[0].server.handlers["register"]

            async def counted():
                questions.append(None)
                return health() if is_alive else await never()

            def without_stranger(handle):
                def others(address, **arguments):
                    if address == stranger.address:
                        raise CacheError("Lost on the way.")
                    return handle(address=address, **arguments)

                return others

            stranger.server.handlers["health"] = counted
            for name in ("beat", "register"):
                handle = pool.nodes[0].server.handlers[name]
                pool.nodes[0].server.handlers[name] = without_stranger(handle)
            monkeypatch.setattr(silence, "MAX_SILENCE_S", 0.0)
            if not is_alive:
                monkeypatch.setattr(mover, "ANSWER_TIMEOUT_S", 0.05)

            async def decided():
                return len(questions) > 2 or not await is_known()

            await until(decided, "it is asked, and asked again or forgotten")
            assert await is_known() == is_alive
            if not is_alive:  # another process may get its address
                register(stranger.address, 1, 0, [], False, "rack7", 0.0)
                assert "rack rack" in nodes[stranger.address].prospect.departure_groups
        await stranger.close()

    run(work)
