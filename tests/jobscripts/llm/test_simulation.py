"""Simulated days of a dispatcher: answers are those of undisturbed engines whatever nodes do."""

from __future__ import annotations

import random

import pytest
from llmserve.engine_model import EngineTimes
from llmserve.generation import GenerationRequest
from llmserve.policies import FairServe, Fcfs, RequestsPerMinute, VirtualTokenCounter
from llmserve.replicas import Capacity
from llmserve.simulation import Arrival, Presence, ServingSimulation
from llmserve.states import RequestState

from tests.jobscripts.llm.engines import answer

TIMES = EngineTimes(0.02, 5e-5, 1e-4, 1e-7)
CAPACITY = Capacity(8, 8_000)


def arrivals(count: int, seed: int = 1) -> list[Arrival]:
    rng = random.Random(seed)
    return [
        Arrival(
            i * 0.2,
            GenerationRequest(
                f"r{i}",
                f"u{rng.randrange(4)}",
                tuple(rng.randrange(1000) for _ in range(rng.randint(1, 200))),
                rng.randint(1, 200),
                stream=True,
            ),
        )
        for i in range(count)
    ]


def nodes(seed: int, notice_s: float | None) -> list[Presence]:
    """Two nodes at a time, each of them for ten seconds, and one for good at the end."""
    rng = random.Random(seed)
    present = [Presence("last", 100.0, load_s=2.0)]
    for number in range(20):
        start = number * 5.0 + rng.random()
        present.append(
            Presence(
                f"n{number}", start, start + 10.0, rng.random(), notice_s, detection_s=rng.random()
            )
        )
    return present


POLICIES = {
    "fcfs": Fcfs,
    "rpm": lambda: RequestsPerMinute(1_000),
    "vtc": VirtualTokenCounter,
    "fairserve": FairServe,
}


@pytest.mark.parametrize("notice_s", [None, 3.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_answer_depends_on_losses(policy, notice_s):
    simulation = ServingSimulation(POLICIES[policy](), TIMES, CAPACITY)
    result = simulation.run(arrivals(200), nodes(3, notice_s))
    assert result.count(RequestState.DONE) == len(result.records) == 200
    for record in result.records.values():
        assert record.end.ids == answer(record.request)
        assert 0 < record.ttft_s <= record.ended - record.arrived
    if notice_s is None:
        assert (result.moves, result.losses > 10) == (0, True)
    else:
        assert (result.moves > 10, result.losses, result.repeated_tokens) == (True, 0, 0)
    tokens = sum(len(r.request.prompt) + len(r.end.ids) for r in result.records.values())
    assert result.tokens == tokens
    assert result.repeated_tokens < tokens / 50


def test_a_simulation_is_reproducible():
    results = [
        ServingSimulation(VirtualTokenCounter(), TIMES, CAPACITY).run(arrivals(50), nodes(3, None))
        for _ in range(2)
    ]
    assert results[0].records == results[1].records
    assert results[0].end == results[1].end


def test_clients_follow_up():
    def follow(record):
        number = int(record.request.name)
        if number < 3:
            next_one = GenerationRequest(str(number + 1), "u", (1,), 5)
            yield Arrival(record.ended + 1.0, next_one)

    simulation = ServingSimulation(Fcfs(), EngineTimes(1.0, 0, 0, 0), CAPACITY, followers=follow)
    first = Arrival(0.0, GenerationRequest("0", "u", (1,), 5))
    result = simulation.run([first], [Presence("n", 0.0)])
    assert [r.arrived for r in result.records.values()] == [0.0, 6.0, 12.0, 18.0]
    assert result.end == 23.0
    assert result.service == {"u": 4 * (1 + 2 * 5)}


def test_a_node_that_ends_before_its_model_is_loaded_serves_nothing():
    simulation = ServingSimulation(Fcfs(), TIMES, CAPACITY)
    result = simulation.run(
        arrivals(3), [Presence("short", 0.0, 5.0, load_s=60.0, notice_s=2.0)], 100.0
    )
    assert result.tokens == 0
    assert result.count(RequestState.DONE) == 0
    assert result.end == 100.0
