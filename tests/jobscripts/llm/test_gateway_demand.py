"""What nodes are worth to requests, how the daemon hears of it, and who is a replica."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from types import SimpleNamespace

import pytest
from llmserve.gateway.configuration import read
from llmserve.gateway.demand import RATE_WINDOW_S, Demand, DemandLimits
from llmserve.gateway.scaling import EXPIRES_INTERVALS, Scaler
from llmserve.gateway.server import open_gateway
from llmserve.service_members import ReplicaFollower, ServiceMember


async def become(condition):
    """Let other tasks run until a condition holds."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


LIMITS = DemandLimits(idle_s=600.0, node_value=100.0, requests_per_node=16.0, max_nodes=8)


@pytest.mark.parametrize(
    ("open_requests", "nodes"), [(0, 1), (1, 1), (16, 1), (17, 2), (64, 4), (10_000, 8)]
)
def test_open_requests_fill_nodes(open_requests, nodes):
    assert Demand(LIMITS, 0.0).nodes(open_requests, 1.0) == nodes


def test_values_grow_up_to_the_nodes_that_are_filled():
    demand = Demand(LIMITS, 0.0)
    assert demand.values(40, 1.0) == {1: 100.0, 3: 300.0, 8: 300.0}
    assert demand.values(1, 1.0) == {1: 100.0, 8: 100.0}
    assert demand.values(1000, 1.0) == {1: 100.0, 8: 800.0}


def test_arrivals_keep_nodes_between_requests():
    """Two requests a second, each an answer of 20 s: 40 are open at once, by Little's law."""
    demand = Demand(LIMITS, 0.0)
    now = 0.0
    for _ in range(int(20 * RATE_WINDOW_S)):
        now += 0.5
        demand.arrived(now)
        demand.answered(20.0, now)
    assert demand.rate(now) == pytest.approx(2.0, rel=0.01)
    assert demand.nodes(0, now) == 3
    assert demand.nodes(0, now + RATE_WINDOW_S) == 1  # 40/e
    assert demand.nodes(0, now + 599.0) == 1


def test_nodes_keep_their_worth_for_a_while_after_requests_have_filled_them():
    demand = Demand(dataclasses.replace(LIMITS, scale_down_s=120.0), 0.0)
    needed = [
        (0.0, 40, 3),
        (5.0, 3, 3),
        (10.0, 100, 7),  # more at once
        (60.0, 20, 7),
        (129.9, 0, 7),
        (130.1, 0, 2),  # those of 60 s
        (180.1, 0, 1),
        (800.0, 0, 0),  # idle
        (801.0, 1, 1),
    ]
    assert [demand.nodes(count, now) for now, count, _ in needed] == [n for *_, n in needed]


@pytest.mark.parametrize(
    ("nodes_at_start", "looks"),
    [
        # now, open requests → nodes
        (4, [(0.0, 0, 4), (5.0, 20, 4), (119.0, 64, 4), (121.0, 64, 4)]),  # they come back
        (4, [(0.0, 0, 4), (119.9, 20, 4), (120.1, 20, 2)]),  # fewer do
        (4, [(0.0, 0, 4), (5.0, 100, 7), (130.0, 1, 1)]),  # more do
        (4, [(0.0, 0, 4), (130.0, 0, 1), (600.0, 0, 0)]),  # none does
        (20, [(0.0, 0, 8)]),
        (0, [(0.0, 0, 1), (5.0, 20, 2), (10.0, 0, 2)]),
    ],
)
def test_nodes_that_are_there_at_the_start_of_the_gateway_count_as_filled(nodes_at_start, looks):
    demand = Demand(dataclasses.replace(LIMITS, scale_down_s=120.0), 0.0, nodes_at_start)
    assert [demand.nodes(count, now) for now, count, _ in looks] == [n for *_, n in looks]


def test_a_gateway_begins_with_the_nodes_that_stay_in_its_service(tmp_path):
    path = tmp_path / "gateway.toml"
    path.write_text(
        '[users.alice]\n[models.simulated]\njob = "serve"\ntokenizer = "simulated"\n'
        "[scaling]\nscale_down_s = 36000\n"
    )

    class Client:
        async def members(self, job):
            members = [SimpleNamespace(gone_in_s=gone_in_s) for gone_in_s in (None, 9.0, None)]
            return SimpleNamespace(key="00" * 32, members=members)

    async def story():
        async with open_gateway(read(path), tmp_path, Client()) as gateway:
            demand = gateway.admission.models["simulated"].demand
            assert demand.nodes(0, time.monotonic()) == 2, "the node that leaves does not count"

    asyncio.run(story())


def test_nothing_is_worth_anything_after_a_time_without_requests():
    demand = Demand(LIMITS, 0.0)
    assert demand.nodes(1, 100.0) == 1
    assert demand.nodes(0, 699.9) == 1
    assert demand.values(0, 700.0) == {1: 0.0, 8: 0.0}
    demand.arrived(900.0)
    assert demand.values(1, 900.0) == {1: 100.0, 8: 100.0}


class Daemon:
    """Takes values, or refuses them."""

    def __init__(self):
        self.calls, self.error = [], None

    async def worth(self, job, values=None, *, expires_s=None):
        if self.error is not None:
            raise self.error
        self.calls.append((job, values, expires_s))
        return ""


def test_values_are_set_when_they_change_and_before_they_lapse():
    async def story():
        now, open_requests = [0.0], [0]
        daemon = Daemon()
        scaler = Scaler(
            daemon, "serve", Demand(LIMITS, 0.0), lambda: open_requests[0], 5.0, lambda: now[0]
        )
        await scaler.update()
        await scaler.update()
        assert daemon.calls == [("serve", {1: 100.0, 8: 100.0}, EXPIRES_INTERVALS * 5.0)]
        open_requests[0] = 20
        await scaler.update()
        assert daemon.calls[1][1] == {1: 100.0, 2: 200.0, 8: 200.0}
        now[0] = EXPIRES_INTERVALS * 5.0 / 2
        await scaler.update()
        assert daemon.calls[2] == daemon.calls[1]
        daemon.error = RuntimeError("There is no service serve.")
        open_requests[0] = 0
        await scaler.update()
        assert scaler.error == "There is no service serve."
        assert len(daemon.calls) == 3
        daemon.error = None
        await scaler.update()
        assert scaler.error == ""
        assert daemon.calls[3][1] == {1: 100.0, 8: 100.0}

    asyncio.run(story())


def test_a_waiting_request_does_not_wait_for_the_next_look():
    async def story():
        open_requests, daemon = [0], Daemon()
        limits = DemandLimits(1e-9, 100.0, 16.0, 8)
        scaler = Scaler(
            daemon, "serve", Demand(limits, -1.0), lambda: open_requests[0], 3600.0, lambda: 0.0
        )
        task = asyncio.create_task(scaler.run())
        await become(lambda: daemon.calls)
        assert daemon.calls[0][1] == {1: 0.0, 8: 0.0}
        open_requests[0] = 1
        scaler.wake()
        await become(lambda: len(daemon.calls) == 2)
        assert daemon.calls[1][1] == {1: 100.0, 8: 100.0}
        task.cancel()

    asyncio.run(story())


class Replicas:
    """Notes what is called."""

    def __init__(self):
        self.calls = []

    def add_replica(self, name, address):
        self.calls.append(("add", name, address))

    def expect_end(self, name, seconds):
        self.calls.append(("expect", name, seconds))

    def remove_replica(self, name):
        self.calls.append(("remove", name))

    def take(self):
        calls, self.calls = self.calls, []
        return calls


def test_replicas_are_the_members_of_the_service():
    replicas = Replicas()
    follower = ReplicaFollower(replicas)
    a, b = ServiceMember("a", "a:1"), ServiceMember("b", "b:1")
    follower.apply([a, b, ServiceMember("c", "")])
    assert replicas.take() == [("add", "a", "a:1"), ("add", "b", "b:1")]
    follower.apply([a, b])
    assert replicas.take() == []
    follower.apply([ServiceMember("b", "b:2")])  # another process on the same node
    assert replicas.take() == [("remove", "a"), ("remove", "b"), ("add", "b", "b:2")]
    follower.apply([a, ServiceMember("b", "b:2")])
    assert replicas.take() == [("add", "a", "a:1")]


def test_a_forecast_counts_from_the_view_that_it_came_with():
    replicas = Replicas()
    follower = ReplicaFollower(replicas)
    for expected_s in (None, 600.0, 600.0, 480.0):
        follower.apply([ServiceMember("a", "a:1", expected_s)])
    assert replicas.take() == [("add", "a", "a:1"), ("expect", "a", 600.0), ("expect", "a", 480.0)]
    follower.apply([ServiceMember("a", "a:2", 480.0)])
    assert replicas.take() == [("remove", "a"), ("add", "a", "a:2"), ("expect", "a", 480.0)]


def test_members_are_followed_through_errors():
    async def story():
        replicas, questions = Replicas(), []
        views = [
            SimpleNamespace(version="1", members=[ServiceMember("a", "a:1")]),
            SimpleNamespace(version="2", members=[]),
        ]

        class Client:
            async def members(self, job, *, since="", wait_s=0.0):
                questions.append((job, since, wait_s > 0))
                if not views:
                    await asyncio.Event().wait()
                return views.pop(0)

        task = asyncio.create_task(ReplicaFollower(replicas).run(Client(), "serve"))
        await become(lambda: len(questions) == 3)
        assert questions == [("serve", "", False), ("serve", "1", True), ("serve", "2", True)]
        assert replicas.calls == [("add", "a", "a:1"), ("remove", "a")]
        task.cancel()

    asyncio.run(story())
