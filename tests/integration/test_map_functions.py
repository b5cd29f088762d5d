"""``client.map``: a function for each item, in processes of a farm on the embedded site."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from malletrain import AsyncClient, Client
from malletrain.training.functions import FunctionLost, FunctionTraceback

pytestmark = pytest.mark.slow


@pytest.fixture
def client(shared, monkeypatch):
    monkeypatch.chdir(shared.work)
    with Client(shared.state) as client:
        yield client


@pytest.mark.check
def test_results_come_in_the_order_of_the_items(client):
    seen = []
    results = client.map(
        lambda x: x * x, range(20), nodes="1:3", progress=lambda done, total: seen.append(done)
    )
    assert list(results) == [x * x for x in range(20)]
    assert (results.done, results.total, seen[-1]) == (20, 20, 20)
    assert results.job.wait(timeout=600) == "completed"


def test_items_are_grouped(client, shared):
    results = client.map(lambda x: os.getpid(), range(10), chunk=4, nodes=1)
    pids = list(results)
    assert [len(set(pids[k : k + 4])) for k in (0, 4, 8)] == [1, 1, 1]
    assert len(set(pids)) == 3
    assert shared.until_state(results.job.id, "completed").samples == 3


def test_results_come_as_they_are_there(client, shared):
    def ends(path):
        while path and not os.path.exists(path):
            time.sleep(0.05)
        return path

    slow = str(shared.work / "go")
    results = client.map(ends, [slow, ""], ordered=False, nodes="1:2")
    assert next(results) == ""
    shared.script("go", "")
    assert list(results) == [slow]


def test_an_exception_is_raised_where_its_item_stands(client):
    def invert(x):
        return 1 / x

    results = client.map(invert, [1, 0, 2], chunk=3)
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError) as raised:
        next(results)
    assert isinstance(raised.value.__cause__, FunctionTraceback)
    assert "in invert" in str(raised.value.__cause__)
    assert list(results) == [0.5]


def test_a_process_that_dies_has_no_result(client):
    def leave(x):
        if x == 1:
            print("no memory", flush=True)
            os._exit(9)
        return x

    results = client.map(leave, [0, 1, 2], nodes="1:2")
    assert next(results) == 0
    with pytest.raises(FunctionLost, match=r"ended with exit code 9\.\nno memory"):
        next(results)
    assert list(results) == [2]


def test_leaving_the_block_cancels_the_rest(client):
    with client.map(time.sleep, [0, 1000]) as results:
        assert next(results) is None
    assert results.job.wait(timeout=600) == "cancelled"
    with pytest.raises(FunctionLost, match="was cancelled without a result of task 1"):
        next(results)


def test_no_items_are_no_farm(client, shared):
    before = len(client.jobs())
    assert list(client.map(abs, [])) == []
    assert len(client.jobs()) == before


def test_a_restart_of_the_daemon_loses_nothing(client, shared):
    def ends(x):
        while not os.path.exists("go"):
            time.sleep(0.05)
        return x

    results = client.map(ends, range(6), nodes="1:3")
    shared.until(lambda: results.job.refresh().state == "running", "it runs")
    shared.kill_daemon()
    shared.script("go", "")
    shared.start_daemon()
    assert list(results) == list(range(6))


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"nodes": "0"}, ValueError, "asks for 0 nodes"),
        ({"profile": True}, TypeError, "map.. has no option 'profile'"),
        ({"chunk": -1}, ValueError, "chunk is -1"),
    ],
)
def test_what_is_refused(client, options, kind, sentence):
    with pytest.raises(kind, match=sentence):
        client.map(abs, [1], **options)


def test_an_item_that_cannot_be_packed_is_refused(client):
    with pytest.raises(TypeError, match="An item cannot be sent"):
        client.map(abs, [threading.Lock()])


def test_a_farm_is_mapped_and_looked_at_with_asyncio(client, shared):
    async def session():
        async with AsyncClient(shared.state) as other:
            results = other.map(lambda x: x + 1, range(3), nodes="1:2", name="async")
            assert [result async for result in results] == [1, 2, 3]
            job = await other.job("async")
            assert await job.wait(timeout=600) == "completed"
            return [task.state async for task in job.tasks()], [
                task async for task in job.tasks("failed")
            ]

    assert asyncio.run(session()) == (["done"] * 3, [])
    assert [task.number for task in client.job("async").tasks()] == [0, 1, 2]


def test_failed_tasks_are_retried(client, shared):
    def needs(path):
        while path == "wait" and not os.path.exists("end"):
            time.sleep(0.05)
        if not os.path.exists(path) and path != "wait":
            os._exit(1)
        return path

    results = client.map(needs, ["ready", "wait"], nodes="1:2", ordered=False)
    shared.until(lambda: [t.number for t in results.job.tasks("failed")] == [0], "one fails")
    shared.script("ready", "")
    assert results.job.retry(0) == 1
    assert next(results) == "ready"
    shared.script("end", "")
    assert next(results) == "wait"
