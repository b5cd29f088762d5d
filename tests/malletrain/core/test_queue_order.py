"""In which order waiting jobs begin: streams of jobs through the real controller on a few nodes.

Two promises are checked. Of jobs that are alike none begins before one that was submitted earlier.
A job of any kind begins within a turn of every job that was there before it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from allocator import RescaleCost, ScalingCurve
from malletrain.core.commands import Rescale, Start, Suspend
from malletrain.core.controller import Controller, ControllerSettings
from malletrain.core.events import (
    Event,
    JobCompleted,
    JobSubmitted,
    NodeJoined,
    RescaleFinished,
    Tick,
)
from malletrain.core.planning import PlanningSettings
from tests.draws import cases

STARVATION_S = 100.0
DEBOUNCE_S = 1.0
RESCALE_S = 0.5
COST = RescaleCost(up_s=10.0, down_s=8.0, start_s=10.0)


@dataclass(frozen=True)
class Kind:
    """What makes jobs alike: limits, weight and curve."""

    min_nodes: int = 1
    max_nodes: int = 1
    weight: float = 1.0
    exponent: float | None = None
    """Throughput goes with nodes**exponent; None: nobody knows."""

    def event(self, job: str) -> JobSubmitted:
        """The submission of a job of this kind."""
        curve = None
        if self.exponent is not None:
            curve = ScalingCurve.of(
                (k, 100.0 * k**self.exponent) for k in range(1, self.max_nodes + 1)
            )
        return JobSubmitted(job, self.min_nodes, self.max_nodes, weight=self.weight, curve=curve)


@dataclass(frozen=True)
class Arrival:
    """One job of a stream."""

    at: float
    """When it is submitted, seconds."""
    kind: Kind
    work: float
    """Node-seconds of work; what it has done is kept when it is suspended."""


class Machine:
    """A few nodes that are never preempted, and jobs that do their work on what they get."""

    def __init__(
        self, nodes: int, stream: Sequence[Arrival], cost: RescaleCost, starvation_s: float
    ) -> None:
        planning = PlanningSettings(cost=cost, max_running=100)
        self.controller = Controller(
            ControllerSettings(
                planning,
                debounce_s=DEBOUNCE_S,
                min_interval_s=0.0,
                starvation_s=starvation_s,
                release_after_s=math.inf,
            )
        )
        self.work = {f"j{i}": arrival.work for i, arrival in enumerate(stream)}
        self.kind = {f"j{i}": arrival.kind for i, arrival in enumerate(stream)}
        self.at = {f"j{i}": arrival.at for i, arrival in enumerate(stream)}
        self.nodes_of: dict[str, tuple[str, ...]] = {}
        self.since: dict[str, float] = {}
        self.begun: dict[str, float] = {}
        """When each job first had nodes, seconds, in the order in which they began."""
        self.rescales: Counter[str] = Counter()
        self._coming: list[tuple[float, int, Event]] = []
        self._number = count()
        for i in range(nodes):
            self._later(0.0, NodeJoined(f"n{i}"))
        for job, arrival in zip(self.work, stream, strict=True):
            self._later(arrival.at, arrival.kind.event(job))

    def _later(self, at: float, event: Event) -> None:
        heapq.heappush(self._coming, (at, next(self._number), event))

    def _ends(self) -> tuple[float, str] | None:
        return min(
            (
                (self.since[job] + self.work[job] / len(nodes), job)
                for job, nodes in self.nodes_of.items()
            ),
            default=None,
        )

    def run(self, until: float) -> None:
        """Let everything happen until nothing is left, or it is ``until``."""
        now = 0.0
        while now < until:
            wake = self.controller.next_wakeup()
            event: Event = Tick()
            times = [wake] if wake is not None else []
            if (end := self._ends()) is not None:
                times.append(end[0])
            if self._coming:
                times.append(self._coming[0][0])
            if not times:
                return
            now = max(now, min(times))
            if self._coming and self._coming[0][0] <= now:
                event = heapq.heappop(self._coming)[2]
            elif end is not None and end[0] <= now:
                event = JobCompleted(end[1])
                self._holds(end[1], (), now)
            for command in self.controller.handle(event, now):
                if isinstance(command, (Start, Rescale)):
                    self.rescales[command.job] += 1
                    self._holds(command.job, command.nodes, now)
                    self._later(now + RESCALE_S, RescaleFinished(command.job))
                elif isinstance(command, Suspend):
                    self._holds(command.job, (), now)

    def _holds(self, job: str, nodes: tuple[str, ...], now: float) -> None:
        if before := self.nodes_of.pop(job, ()):
            self.work[job] -= (now - self.since[job]) * len(before)
        if nodes:
            self.nodes_of[job], self.since[job] = nodes, now
            self.begun.setdefault(job, now)


def run(
    nodes: int,
    stream: Sequence[Arrival],
    cost: RescaleCost = COST,
    starvation_s: float = STARVATION_S,
) -> Machine:
    """The machine after the stream has run through it."""
    machine = Machine(nodes, stream, cost, starvation_s)
    machine.run(1e5)
    return machine


@pytest.mark.parametrize("apart", [0.0, 0.3, 5.0], ids=lambda s: f"{s:g} s apart")
@pytest.mark.parametrize(
    "cost", [COST, RescaleCost(0.0, 0.0, 0.0)], ids=["rescales cost", "rescales are free"]
)
def test_alike_jobs_begin_in_order_of_submission(apart: float, cost: RescaleCost) -> None:
    stream = [Arrival(apart * i, Kind(), 20.0 + 0.1 * i) for i in range(24)]
    machine = run(4, stream, cost, starvation_s=1e4)
    assert list(machine.begun) == [f"j{i}" for i in range(24)]
    assert set(machine.rescales.values()) == {1}, "nobody gives way to an equal"


@pytest.mark.parametrize("first", [0, 1])
def test_equal_bids_of_unlike_jobs_go_to_who_was_first(first: int) -> None:
    # Both kinds are worth the same on one node, and there is never more than one for each.
    kinds = (Kind(1, 1), Kind(1, 3))
    stream = [Arrival(0.0, kinds[(i + first) % 2], 20.0 + 0.1 * i) for i in range(16)]
    machine = run(4, stream, starvation_s=1e4)
    assert list(machine.begun) == [f"j{i}" for i in range(16)]


KINDS = st.builds(
    lambda low, more, weight, exponent: Kind(low, low + more, weight, exponent),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from([1.0, 1.0, 5.0]),
    st.sampled_from([None, None, 0.5, 0.9, 1.0]),
)
STREAMS = st.lists(KINDS, min_size=1, max_size=3).flatmap(
    lambda kinds: st.lists(
        st.builds(
            Arrival,
            st.integers(0, 200).map(float),
            st.sampled_from(kinds),
            st.integers(1, 400).map(float),
        ),
        min_size=1,
        max_size=14,
    )
)


@given(st.integers(3, 6), STREAMS)
@example(4, [Arrival(0.0, Kind(), 20.0 + i) for i in range(12)])
@example(4, [Arrival(0.0, Kind(4, 4), 50.0), *(Arrival(0.0, Kind(), 400.0) for _ in range(8))])
@settings(max_examples=cases(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_nobody_is_overtaken_by_an_equal_nor_for_ever(nodes: int, stream: list[Arrival]) -> None:
    stream = sorted(stream, key=lambda arrival: arrival.at)
    # The same value at no two times: what is submitted at one instant is one event after another.
    stream = [replace(arrival, at=arrival.at + 1e-3 * i) for i, arrival in enumerate(stream)]
    machine = run(nodes, stream)
    order = {job: place for place, job in enumerate(machine.begun)}
    assert set(order) == set(machine.kind), "everybody begins"
    for i, job in enumerate(machine.kind):
        for later in list(machine.kind)[i + 1 :]:
            if machine.kind[later] == machine.kind[job]:
                assert order[job] < order[later], f"{later} overtook {job}, which is alike"
        # Once it has waited for STARVATION_S, every job that was there before has at most a turn.
        patience = STARVATION_S * (1 + i) + (1 + i) * 2 * DEBOUNCE_S
        assert machine.begun[job] - machine.at[job] <= patience
