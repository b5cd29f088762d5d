"""Clients that wait until one of their jobs has reported a value, or has ended."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from malletrain.client import ClientError, operations
from malletrain.daemon.engine.state import WOKEN_AT_ONCE, JobNews, MemberNews
from malletrain.protocol import messages
from tests.malletrain.daemon.test_forged_reports import World
from tests.waiting import NEVER_S, until


def test_what_came_since_is_told_of_each_job():
    news = JobNews()
    assert news.since(0, ["a", "b"]) == []
    news.came("a")
    first = news.number
    news.came("b")
    assert news.since(0, ["a", "b", "c"]) == ["a", "b"]
    assert news.since(first, ["a", "b"]) == ["b"]
    news.came("a")
    assert news.since(first, ["a"]) == ["a"]


def test_of_what_is_forgotten_it_is_not_said_that_nothing_came():
    news = JobNews(most=2)
    for job in ("a", "b", "c", "d"):
        news.came(job)
    assert news.since(0, ["a", "b", "c"]) == ["a", "b", "c"]
    assert news.since(1, ["a"]) == ["a"], "it may have been the one that is forgotten"
    assert news.since(2, ["a", "b", "c"]) == ["c"]


def test_who_waits_is_woken():
    async def woken() -> list[str]:
        news = JobNews()
        waiting = asyncio.ensure_future(news.more(NEVER_S))
        await asyncio.sleep(0)
        news.came("a")
        await waiting
        return news.since(0, ["a"])

    assert asyncio.run(woken()) == ["a"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("news"))
    yield world
    world.close()


def test_a_value_and_an_end_are_news_to_a_client_that_waits(world):
    job, other = world.job["ann"], world.daemon.submit("ann")
    waiting = world.daemon.components.state.news

    def ask(cursor):
        with world.daemon.client("ann") as client:
            return client.do(operations.news([job, other], cursor=cursor, wait_s=10.0))

    def news_after(cursor, act):
        """The reply to a client that waits while ``act`` happens, and asks again if it is empty."""
        with ThreadPoolExecutor(1) as thread:
            answer, before = thread.submit(ask, cursor), waiting.number
            act()
            until(lambda: waiting.number > before, "there is news")
            reply = answer.result()
            return reply if reply.jobs else ask(cursor)

    now = ask("")
    assert set(now.jobs) == {job, other}, "of a cursor of nobody all may have news"
    news = news_after(now.cursor, lambda: world.say(messages.Metric(job, 0, "loss", 1.0)))
    assert news.jobs == (job,)
    with world.daemon.client("ann") as client:
        last = news_after(news.cursor, lambda: client.cancel([other]))
    assert last.jobs == (other,)
    with world.daemon.client("ann") as client:
        assert client.do(operations.news([job, other], cursor=last.cursor)).jobs == ()
        another = client.do(operations.news([job], cursor="another start:99"))
        assert another.jobs == (job,)
        assert client.do(operations.news(["j99"], cursor=last.cursor)).jobs == ("j99",)


def test_whose_job_it_is_not_hears_nothing_of_it(world):
    with world.daemon.client("bob") as client, pytest.raises(ClientError, match="belongs to ann"):
        client.do(operations.news([world.job["ann"]]))
    with world.daemon.client() as operator:
        assert operator.do(operations.news([world.job["ann"]])).jobs == (world.job["ann"],)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"jobs": "j1"},
        {"jobs": ["x"] * 10_001},
        {"jobs": ["x" * 4_000_000]},
        {"jobs": [], "cursor": 7},
        {"jobs": [], "wait_s": "long"},
    ],
    ids=lambda x: repr(x)[:50],
)
def test_a_question_that_makes_no_sense_is_refused(world, params):
    with world.daemon.client("ann") as client, pytest.raises(ClientError) as refused:
        client.call("news", params)
    assert refused.value.code == "usage"
    assert len(str(refused.value)) < 500


def test_those_who_wait_for_members_are_woken_in_groups():
    """Between two groups the event loop reads messages."""

    async def woken() -> list[int]:
        news, back = MemberNews(), []

        async def wait(job: str) -> None:
            await news.more(job, NEVER_S)
            back.append(job)

        waiting = [asyncio.ensure_future(wait("a")) for _ in range(2 * WOKEN_AT_ONCE + 1)]
        other = asyncio.ensure_future(wait("b"))
        await asyncio.sleep(0)
        news.came("a")
        counts = [len(back)]
        while len(back) < len(waiting):
            await asyncio.sleep(0)
            counts.append(len(back))
        assert not other.done()
        other.cancel()
        return [later - earlier for earlier, later in pairwise(counts)]

    steps = asyncio.run(woken())
    assert max(steps) <= WOKEN_AT_ONCE
    assert sum(steps) == 2 * WOKEN_AT_ONCE + 1


def test_who_no_longer_waits_for_members_is_forgotten():
    async def late() -> None:
        news = MemberNews()
        await news.more("a", 0.0)
        news.came("a")  # nobody waits
        waiting = asyncio.ensure_future(news.more("a", NEVER_S))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        news.came("a")

    asyncio.run(late())
