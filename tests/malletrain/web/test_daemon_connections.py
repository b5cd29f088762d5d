"""The page's connections to the daemon: whatever happens, each is closed."""

import asyncio
import os
import threading

import pytest

pytest.importorskip("fastapi")

from malletrain.client import ClientError, Connection, Unreachable, operations
from malletrain.web.poller import ConnectionPool
from tests.malletrain.cli.fake_daemon import FakeDaemon, Refuse, default_answers
from tests.waiting import until


class FakeClient:
    """Counts those that are open."""

    open = 0

    def __init__(self):
        FakeClient.open += 1

    def close(self):
        FakeClient.open -= 1


@pytest.fixture(autouse=True)
def none_open():
    FakeClient.open = 0


def test_a_call_that_is_under_way_at_the_end_leaves_no_connection():
    going, go_on = threading.Event(), threading.Event()

    def slow(client):
        going.set()
        go_on.wait()

    async def ended_meanwhile():
        pool = ConnectionPool(FakeClient)
        task = asyncio.ensure_future(pool.run(slow))
        await asyncio.to_thread(going.wait)
        pool.close()
        go_on.set()
        await task

    asyncio.run(ended_meanwhile())
    until(lambda: FakeClient.open == 0, "it is closed")


@pytest.mark.parametrize(
    "error", [ClientError("no", "refused"), Unreachable("gone"), ValueError("x")]
)
def test_a_call_that_fails_leaves_none(error):
    def fails(client):
        raise error

    async def tried():
        pool = ConnectionPool(FakeClient)
        for _ in range(3):
            with pytest.raises(type(error)):
                await pool.run(fails)
        assert FakeClient.open <= 1
        pool.close()

    asyncio.run(tried())
    assert FakeClient.open == 0


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_connection_has_no_descriptor_left_when_it_is_closed(tmp_path):
    def refuse(params):
        raise Refuse("no")

    daemon = FakeDaemon(tmp_path / "state", {**default_answers(), "weigh": refuse})
    try:
        with Connection.of(tmp_path / "state") as client:  # what is opened once for all
            client.status()
        before = descriptors()
        for _ in range(5):
            with Connection.of(tmp_path / "state") as client:
                client.status()
            refused = Connection.of(tmp_path / "state")
            with pytest.raises(ClientError):
                refused.do(operations.weigh("j1", 2.0))
            refused.close()
        until(lambda: descriptors() <= before, "all are closed", details=lambda: str(descriptors()))
    finally:
        daemon.stop()
