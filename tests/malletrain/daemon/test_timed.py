"""What an answer takes of the processor, and that it is the same answer."""

from __future__ import annotations

import asyncio
import time

import pytest

from malletrain.daemon.server.rates import TimedCall


def busy(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def answer(event, value):
    busy(0.01)
    await event.wait()
    busy(0.01)
    return value


def test_its_own_time_counts_and_what_others_do_meanwhile_does_not():
    async def both():
        event = asyncio.Event()
        timed = TimedCall(answer(event, 7))

        async def wait():
            return await timed

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        assert timed.seconds >= 0.01
        before = timed.seconds
        busy(0.1)
        assert timed.seconds == before
        event.set()
        return await task, timed.seconds - before

    value, later = asyncio.run(both())
    assert value == 7
    assert later >= 0.01


def test_errors_and_cancels_go_through():
    heard = []

    async def fails():
        raise KeyError("x")

    async def hears():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heard.append("cancel")
            raise

    async def run():
        with pytest.raises(KeyError):
            await TimedCall(fails())

        async def wait():
            await TimedCall(hears())

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert heard == ["cancel"]
