"""A wait for an event that is cancelled at any moment."""

import asyncio

import pytest

from malletrain.daemon.site.clock import happens
from tests.waiting import NEVER_S, PATIENCE_S


@pytest.mark.parametrize("turns", range(6))
def test_a_cancel_at_the_event_is_not_lost(turns):
    async def scene():
        event = asyncio.Event()

        async def for_ever():
            while True:
                await happens(event, NEVER_S)
                event.clear()

        task = asyncio.ensure_future(for_ever())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        event.set()
        for _ in range(turns):  # of the loop, between the event and the cancel
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE_S)
        return task.done() and task.cancelled()

    assert asyncio.run(scene())


@pytest.mark.parametrize(("within_s", "happened"), [(0.0, False), (NEVER_S, True)])
def test_it_says_whether_the_event_came(within_s, happened):
    async def scene():
        event = asyncio.Event()
        if happened:
            asyncio.get_running_loop().call_soon(event.set)
        return await happens(event, within_s)

    assert asyncio.run(scene()) is happened
