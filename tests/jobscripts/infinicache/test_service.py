"""What the cache says of its worth, and when it says it anew."""

import asyncio
import socket

import pytest
from infinicache import AsyncCache, CacheNode
from infinicache.service import MIN_VALUE, at, has_changed, listen_address, main, report_values

from tests.jobscripts.infinicache.pool import KEY, MIB, until
from tests.jobscripts.infinicache.test_cache import data, run


class Group:
    """A membership that records the calls of ``worth``."""

    def __init__(self):
        self.calls = []

    def set_values(self, nodes):
        self.calls.append(nodes)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("[::1]", "::1"), ("fd00::2", "fd00::2")],
)
def test_a_node_listens_at_its_address_of_either_version(host, expected):
    assert listen_address(host) == expected


@pytest.mark.parametrize("host", ["nowhere.invalid", "a..b"])
def test_a_host_without_an_address_is_refused_in_a_sentence(host, monkeypatch, capsys):
    monkeypatch.setenv("MALLETRAIN_HOST", host)
    assert main(["--memory", "1M"]) == 1
    assert f'infinicache-node: "{host}", the name of this node' in capsys.readouterr().err


def test_a_cache_on_nodes_with_ipv6_only():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("This machine has no IPv6.")

    async def work(make):
        node = CacheNode(MIB, KEY, host="::1")
        assert node.address.startswith("[::1]:")
        node.view([node.address])
        for address in (node.address, node.address.replace("[", "").replace("]", "")):
            async with AsyncCache([address], KEY) as cache:
                await cache.put("k", b"x")
                assert await cache.get("k") == b"x"
        await node.close()

    run(work)


def test_between_sizes_it_is_read_off_as_a_plan_does():
    values = {2: 10.0, 4: 30.0}
    assert [at(values, k) for k in (1, 2, 3, 4, 9)] == [5.0, 10.0, 20.0, 30.0, 30.0]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({}, {1: MIN_VALUE}, True),
        ({1: 10.0}, {1: 10.5}, False),
        ({1: 10.0}, {1: 12.0}, True),
        ({4: 40.0}, {2: 20.0, 4: 40.0}, False),
        ({4: 40.0}, {2: 40.0}, True),
        ({1: MIN_VALUE}, {1: MIN_VALUE}, False),
    ],
)
def test_only_a_change_that_matters_is_said_anew(old, new, expected):
    assert has_changed(old, new) is expected


def test_one_process_speaks_for_all_of_what_clients_read_again():
    async def work(make):
        pool = make(4)
        groups = [Group() for _ in pool.nodes]
        async with pool.cache(code=(1, 1)) as cache:
            for i in range(5):
                await cache.put(f"k{i}", data(10_000, i))
            tasks = [
                asyncio.create_task(report_values(n, g, 1e9, every_s=0.01, observed_s=0.0))
                for n, g in zip(pool.nodes, groups, strict=True)
            ]

            async def something():
                return groups[0].calls

            first = await until(something, "it says what there is")
            assert first[0] == {1: MIN_VALUE}, "nobody has read anything again"

            async def more():
                for i in range(5):
                    await cache.get(f"k{i}")
                return groups[0].calls[-1][1] > 1000.0

            await until(more, "what is read again is worth something")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert not any(g.calls for g in groups[1:])

    run(work)
