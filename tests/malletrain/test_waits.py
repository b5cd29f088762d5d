"""Waits that are cancelled at any moment."""

import asyncio

import pytest

from malletrain.waits import happens, time_limit
from tests.waiting import NEVER_S, PATIENCE_S


async def for_an_event(event):
    await happens(event, NEVER_S)


async def with_a_time_limit(event):
    async with time_limit(NEVER_S):
        await event.wait()


async def for_a_task(event):
    async with time_limit(NEVER_S):
        await asyncio.ensure_future(event.wait())


@pytest.mark.parametrize("wait", [for_an_event, with_a_time_limit, for_a_task])
@pytest.mark.parametrize("turns", range(6))
def test_a_cancel_at_the_event_is_not_lost(turns, wait):
    async def scene():
        event = asyncio.Event()

        async def for_ever():
            while True:
                await wait(event)
                event.clear()

        task = asyncio.ensure_future(for_ever())
        for _ in range(2):
            await asyncio.sleep(0)
        event.set()
        for _ in range(turns):  # of the loop, between the event and the cancel
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE_S)
        return task.done() and task.cancelled()

    assert asyncio.run(scene())


@pytest.mark.parametrize(("within_s", "happened"), [(0.0, False), (NEVER_S, True), (None, True)])
def test_it_says_whether_the_event_came(within_s, happened):
    async def scene():
        event = asyncio.Event()
        if happened:
            asyncio.get_running_loop().call_soon(event.set)
        return await happens(event, within_s)

    assert asyncio.run(scene()) is happened


def test_an_event_that_is_cleared_at_once_has_come():
    async def scene():
        event = asyncio.Event()
        waiting = asyncio.ensure_future(happens(event, NEVER_S))
        for _ in range(3):
            await asyncio.sleep(0)
        event.set()
        await asyncio.sleep(0)
        event.clear()
        return await waiting

    assert asyncio.run(scene())


def test_a_wait_for_an_event_lets_other_tasks_run():
    async def scene():
        event = asyncio.Event()
        event.set()
        turns = []
        asyncio.get_running_loop().call_soon(turns.append, 1)
        await happens(event, None)
        return turns

    assert asyncio.run(scene()) == [1]


def test_a_time_limit_ends_a_wait():
    async def scene():
        async with time_limit(0.001):
            await asyncio.Event().wait()

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(scene())
