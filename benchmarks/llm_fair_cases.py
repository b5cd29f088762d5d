"""The cases of :mod:`benchmarks.llm_fair`: users, their requests and what is counted."""

from __future__ import annotations

import itertools
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "jobscripts" / "llm"))

from llmserve.engine_model import EngineTimes
from llmserve.generation import GenerationRequest
from llmserve.policies import (
    Application,
    FairServe,
    FairServeSettings,
    Fcfs,
    RequestsPerMinute,
    SchedulingPolicy,
    ThrottleLimits,
    VirtualTokenCounter,
)
from llmserve.policies.interface import INPUT_WEIGHT, OUTPUT_WEIGHT
from llmserve.replicas import Capacity
from llmserve.simulated_model import digest_of, generate
from llmserve.simulation import Arrival, Presence, RequestRecord, ServingResult, ServingSimulation
from llmserve.states import RequestState
from llmserve.traces import TraceRequest

TIMES = EngineTimes(step_s=0.010, prompt_token_s=6e-5, request_s=5e-5, kv_token_s=2.5e-7)
"""Approximately a model of 7 billion parameters on one A100: 14 GB of weights and 0.5 MB of KV
cache per token read at 2 TB/s, prompts at half the peak of 312 TFLOPS.
"""
CAPACITY = Capacity(slots=64, kv_tokens=65_536)
LIMIT = 60
"""Requests per minute of one user, for policies with a limit."""


@dataclass(frozen=True)
class Engine:
    """The replicas of all cases."""

    times: EngineTimes = TIMES
    capacity: Capacity = CAPACITY
    replicas: int = 1

    def nodes(self) -> list[Presence]:
        """Return replicas that stay."""
        return [Presence(f"node{number}", 0.0) for number in range(self.replicas)]

    def answers_per_s(self, prompt: int, output: int) -> float:
        """Return the number of answers of one size that a full replica completes per second."""
        count = min(self.capacity.slots, self.capacity.kv_tokens // (prompt + output))
        step_s = self.times.iteration_s(0, count, int(count * (prompt + output / 2)))
        return (
            self.replicas * count / (output * step_s + count * prompt * self.times.prompt_token_s)
        )


def policies(
    applications: dict[str, Application] | None = None, limit: int | None = LIMIT
) -> dict[str, Callable[[], SchedulingPolicy]]:
    """Return name → factory of each policy.

    Args:
        applications: the applications declared for fairserve.
        limit: requests per minute and user: of rpm always, of fairserve under overload; None:
            neither is limited.
    """
    settings = FairServeSettings(applications or {}, limits=ThrottleLimits(user=limit))
    made: dict[str, Callable[[], SchedulingPolicy]] = {
        "fcfs": Fcfs,
        "vtc": VirtualTokenCounter,
        "fairserve": lambda: FairServe(settings),
    }
    if limit is not None:
        made["rpm"] = lambda: RequestsPerMinute(limit)
    return made


def merged(*streams: Iterable[Arrival]) -> list[Arrival]:
    """Return arrivals in the order of time."""
    return sorted(itertools.chain(*streams), key=lambda arrival: arrival.time)


def steady(
    user: str,
    rate: float,
    seconds: float,
    prompt: int = 256,
    output: int = 256,
    *,
    start: float = 0.0,
    application: str = "",
    interaction: str = "",
) -> Iterator[Arrival]:
    """Yield equal requests of one user at equal distances."""
    for number in range(int(rate * seconds)):
        yield Arrival(
            start + number / rate,
            GenerationRequest(
                f"{user} {start:g} {number}",
                user,
                range(number, number + prompt),
                output,
                application=application,
                interaction=interaction,
            ),
        )


@dataclass
class ServiceOverTime:
    """Records the service of users, for ratios and differences over time."""

    since: float = 0.0
    """Time before which service does not count, seconds."""

    def __post_init__(self) -> None:
        self.total: Counter[str] = Counter()
        self.extremes = [0.0, 0.0]
        """Minimum and maximum difference of service between the first two users."""
        self.users: list[str] = []

    def observe(self, time: float, user: str, service: float) -> None:
        """Count service."""
        if time < self.since:
            return
        self.total[user] += service
        if user not in self.users:
            self.users.append(user)
        first, second = (self.total[name] for name in (*self.users, "", "")[:2])
        self.extremes[0] = min(self.extremes[0], first - second)
        self.extremes[1] = max(self.extremes[1], first - second)

    @property
    def widest(self) -> float:
        """Return the largest difference of service in any interval."""
        return self.extremes[1] - self.extremes[0]


def simulate(
    engine: Engine,
    policy: SchedulingPolicy,
    arrivals: list[Arrival],
    until: float,
    since: float = 0.0,
    followers: Callable[[RequestRecord], Iterable[Arrival]] | None = None,
) -> tuple[ServingResult, ServiceOverTime]:
    """Return the result of a simulation until a time, and the service after another time."""
    service = ServiceOverTime(since)
    simulation = ServingSimulation(
        policy, engine.times, engine.capacity, followers=followers, observer=service.observe
    )
    return simulation.run(arrivals, engine.nodes(), until), service


# --- two backlogged users ---


def two_users(engine: Engine, seconds: float) -> dict[str, dict[str, float]]:
    """Simulate two users whose requests always wait; the second sends twice as many."""
    rate = 1.2 * engine.answers_per_s(256, 256)
    rows = {}
    for name, make in policies(limit=None).items():
        arrivals = merged(steady("one", rate, seconds), steady("two", 2 * rate, seconds))
        result, service = simulate(engine, make(), arrivals, seconds)
        rows[name] = {
            "ratio": service.total["two"] / service.total["one"],
            "widest": service.widest,
            "tokens_per_s": result.tokens / seconds,
        }
    return rows


def published_bound(engine: Engine, longest_prompt: int) -> float:
    """Return the bound of VTC's theorem 4.4, for the KV memory of all replicas."""
    kv_tokens = engine.replicas * engine.capacity.kv_tokens
    return 2 * max(INPUT_WEIGHT * longest_prompt, OUTPUT_WEIGHT * kv_tokens)


def two_applications(
    engine: Engine, seconds: float, *, longer: bool
) -> dict[str, dict[str, float]]:
    """Simulate two users whose requests always wait, of applications of which one has twice the
    weight.

    Args:
        engine: the replicas.
        seconds: duration.
        longer: whether requests of that application are twice as long, and weights are measured. If
            not, all are equally long, and the operator has set the weights (floor and ceiling of
            1).
    """
    declared = {
        "light": Application(256, 256, floor=1.0, ceiling=1.0),
        "heavy": Application(512, 512, floor=1.0, ceiling=1.0),
    }
    if longer:
        declared = {"light": Application(256, 256), "heavy": Application(512, 512)}
    size = 512 if longer else 256
    rate = 1.2 * engine.answers_per_s(256, 256)
    rows = {}
    for name, make in policies(declared, limit=None).items():
        arrivals = merged(
            steady("light", rate, seconds, application="light"),
            steady("heavy", rate, seconds, size, size, application="heavy"),
        )
        result, service = simulate(engine, make(), arrivals, seconds)
        rows[name] = {
            "ratio": service.total["heavy"] / service.total["light"],
            "tokens_per_s": result.tokens / seconds,
        }
    return rows


# --- interactions, and users with many requests ---


class Chats:
    """Return the clients of users with interactions of 1 to 10 calls, each sent after the previous
    answer.
    """

    def __init__(
        self, users: dict[str, float], seconds: float, seed: int, think_s: float = 1.0
    ) -> None:
        self._rng = random.Random(seed)
        self._think_s = think_s
        self._calls: dict[str, int] = {}
        """Interaction → number of its calls."""
        self._sizes: dict[str, list[tuple[int, int]]] = {}
        self.first: list[Arrival] = []
        for user, rate in users.items():
            time = self._rng.expovariate(rate)
            for number in itertools.count():
                if time > seconds:
                    break
                interaction = f"{user} {number}"
                calls = self._rng.randint(1, 10)
                self._sizes[interaction] = [self._size() for _ in range(calls)]
                self.first.append(Arrival(time, self._call(user, interaction, 0)))
                time += self._rng.expovariate(rate)
        self.first.sort(key=lambda arrival: arrival.time)

    def _size(self) -> tuple[int, int]:
        prompt = int(min(1024, self._rng.lognormvariate(5.3, 0.6))) + 1
        output = int(min(1024, self._rng.lognormvariate(5.3, 0.6))) + 1
        return prompt, output

    def _call(self, user: str, interaction: str, number: int) -> GenerationRequest:
        prompt, output = self._sizes[interaction][number]
        return GenerationRequest(
            f"{interaction} {number}",
            user,
            range(number, number + prompt),
            output,
            interaction=interaction,
            ends_interaction=number + 1 == len(self._sizes[interaction]),
        )

    def follow(self, record: RequestRecord) -> Iterator[Arrival]:
        """Yield the next call of an interaction whose last one was answered."""
        end, request = record.end, record.request
        if end is None or end.state is not RequestState.DONE or request.ends_interaction:
            return
        number = int(request.name.rpartition(" ")[2]) + 1
        assert record.ended is not None
        call = self._call(request.user, request.interaction, number)
        yield Arrival(record.ended + self._think_s, call)


def quantile(values: list[float], part: float) -> float:
    """Return a quantile; infinite without values."""
    if len(values) < 2:
        return values[0] if values else float("inf")
    return statistics.quantiles(values, n=1000, method="inclusive")[round(part * 1000) - 1]


def interactions(
    engine: Engine, seconds: float, seed: int, users: int = 20, flooding: int = 2
) -> dict[str, dict[str, float]]:
    """Return users with interactions; the first ``flooding`` of them send ten times as many."""
    calls_per_s = engine.answers_per_s(200, 200)
    rate = 0.6 * calls_per_s / 5.5 / (users - flooding)
    rates = {f"user{number}": rate * (10 if number < flooding else 1) for number in range(users)}
    abusers = {f"user{number}" for number in range(flooding)}
    rows = {}
    for name, make in policies().items():
        chats = Chats(rates, seconds, seed)
        result, _ = simulate(engine, make(), chats.first, seconds, followers=chats.follow)
        records = result.records.values()
        benign = [r for r in records if r.request.user not in abusers]
        refused = [r for r in records if r.end is not None and r.end.state is RequestState.REFUSED]
        ttft = [
            # one that still waits has waited at least that long
            seconds - r.arrived if r.ttft_s is None else r.ttft_s
            for r in benign
            if r not in refused
        ]
        rows[name] = {
            "cut": sum(not r.request.name.endswith(" 0") for r in refused),
            "refused_benign": sum(r.request.user not in abusers for r in refused),
            "refused": len(refused),
            "ttft_p50_s": quantile(ttft, 0.5),
            "ttft_p99_s": quantile(ttft, 0.99),
            "tokens_per_s": result.tokens / seconds,
        }
    return rows


# --- users who try to gain service ---

CHAT, CODE = Application(256, 256), Application(256, 256)


def adversaries(
    engine: Engine, seconds: float, users: int = 20, abusers: int = 2
) -> dict[str, dict[str, float]]:
    """Return the minimum service of a benign user, relative to an equal part of all service in the
    time in which all have waiting requests.
    """
    fair = engine.answers_per_s(256, 256) / users
    benign = [f"user{number}" for number in range(users - abusers)]
    cases: dict[str, tuple[float, list[Arrival]]] = {}
    honest = [list(steady(user, 1.5 * fair, seconds, application="code")) for user in benign]
    names = [f"abuser{number}" for number in range(abusers)]
    cases["false interactions"] = (
        0.1 * seconds,
        merged(
            *honest,
            *(
                steady(name, 10 * fair, seconds, application="code", interaction="endless")
                for name in names
            ),
        ),
    )
    cases["inflated average"] = (
        0.1 * seconds,
        merged(
            *honest,
            *(steady(name, 10 * fair, seconds, 256, 1536, application="chat") for name in names),
        ),
    )
    cases["idle then burst"] = (
        0.5 * seconds,
        merged(
            *honest,
            *(
                steady(
                    name,
                    20 * fair,
                    seconds / 2,
                    start=seconds / 2,
                    application="code",
                )
                for name in names
            ),
        ),
    )
    rows: dict[str, dict[str, float]] = {}
    for case, (since, arrivals) in cases.items():
        rows[case] = {}
        made = policies({"chat": CHAT, "code": CODE}, limit=None)
        for name, make in made.items():
            _, service = simulate(engine, make(), arrivals, seconds, since)
            due = sum(service.total.values()) / users
            rows[case][name] = min(service.total[user] for user in benign) / due
    return rows


# --- streams whose replicas are lost ---

DETECTION_S = 1.0


def losing_nodes(
    engine: Engine, seconds: float, every_s: float, load_s: float, notice_s: float | None
) -> Iterator[Presence]:
    """Yield replicas of which one ends every ``every_s`` seconds, in turn, and is replaced at
    once.
    """
    for place in range(engine.replicas):
        start, end = 0.0, every_s * (place + 1)
        for number in itertools.count():
            load = load_s if start else 0.0
            is_last = end > seconds
            name = f"place{place} node{number}"
            yield Presence(
                name, start, float("inf") if is_last else end, load, notice_s, DETECTION_S
            )
            if is_last:
                break
            start, end = end, end + every_s * engine.replicas


def losses(
    engine: Engine, streams: int = 200, opened: int = 8, every_s: float = 20.0
) -> dict[str, dict[str, float]]:
    """Simulate streams, ``count`` at a time, while a replica is lost every ``every_s`` seconds:
    without notice, and with 5 s of notice, which is less than most streams take.
    """
    requests = [
        GenerationRequest(f"stream{number}", "one", range(number, number + 256), 1024, stream=True)
        for number in range(streams)
    ]
    rows = {}
    for name, notice_s in (("no notice", None), ("notice of 5 s", 5.0)):
        waiting = iter(requests[opened:])

        def follow(
            record: RequestRecord, waiting: Iterator[GenerationRequest] = waiting
        ) -> Iterator[Arrival]:
            request = next(waiting, None)
            if request is not None and record.ended is not None:
                yield Arrival(record.ended, request)

        simulation = ServingSimulation(Fcfs(), engine.times, engine.capacity, followers=follow)
        first = [Arrival(0.0, request) for request in requests[:opened]]
        nodes = losing_nodes(engine, 3600.0, every_s, 10.0, notice_s)
        result = simulation.run(first, nodes)
        records = result.records.values()
        disturbed = [r for r in records if r.attempts > 1]
        stalls = [r.longest_stall_s for r in disturbed]
        rows[name] = {
            "failed": streams - result.count(RequestState.DONE),
            "different": sum(
                r.end is None
                or list(r.end.ids) != generate(digest_of(r.request.prompt), r.request.max_tokens)[0]
                for r in records
            ),
            "disturbed": len(disturbed),
            "stall_p50_s": quantile(stalls, 0.5),
            "stall_p99_s": quantile(stalls, 0.99),
            "repeated": result.repeated_tokens / result.tokens,
        }
    return rows


# --- traces ---


def users_of(requests: list[TraceRequest], seed: int, count: int = 27) -> list[str]:
    """Return the user of each request: that of the trace, else one drawn with Zipf's
    frequencies.
    """
    if any(request.user for request in requests):
        return [request.user for request in requests]
    rng = random.Random(seed)
    names = [f"user{number}" for number in range(count)]
    weights = [1 / (number + 1) for number in range(count)]
    return rng.choices(names, weights, k=len(requests))


def trace_arrivals(
    requests: list[TraceRequest], speed: float, seed: int, longest: int
) -> Iterator[Arrival]:
    """Yield the requests of a trace, at a higher rate. Requests that are larger than a replica are
    shortened.
    """
    for number, (request, user) in enumerate(zip(requests, users_of(requests, seed), strict=True)):
        output = min(request.output_tokens, longest // 2)
        if request.blocks:
            prompt = request.prompt(number)[: longest - output]
        else:
            count = min(request.prompt_tokens, longest - output)
            prompt = range(number * 65_537 % 2**31, number * 65_537 % 2**31 + count)
        new = GenerationRequest(f"r{number}", user, prompt, output, application=user)
        yield Arrival(request.time / speed, new)


def trace(
    engine: Engine, requests: list[TraceRequest], seed: int, overload: float = 1.5
) -> dict[str, dict[str, float]]:
    """Simulate a trace, compressed until it requests ``overload`` times the capacity of the
    replicas, with every policy without limits. For fairserve each user has an application of their
    own, declared with the average of their requests.
    """
    longest = engine.capacity.kv_tokens
    simulation = ServingSimulation(Fcfs(), engine.times, engine.capacity)
    at_once = simulation.run(trace_arrivals(requests, float("inf"), seed, longest), engine.nodes())
    span = requests[-1].time
    speed = max(1e-9, span * overload / at_once.end) if span else float("inf")
    rows = {}
    sizes: dict[str, list[TraceRequest]] = {}
    for request, user in zip(requests, users_of(requests, seed), strict=True):
        sizes.setdefault(user, []).append(request)
    applications = {
        user: Application(
            statistics.fmean(request.prompt_tokens for request in each),
            statistics.fmean(request.output_tokens for request in each),
        )
        for user, each in sizes.items()
    }
    for name, make in policies(applications, limit=None).items():
        simulation = ServingSimulation(make(), engine.times, engine.capacity)
        result = simulation.run(trace_arrivals(requests, speed, seed, longest), engine.nodes())
        assert result.count(RequestState.DONE) == len(requests)
        ttft = [r.ttft_s for r in result.records.values() if r.ttft_s is not None]
        rows[name] = {
            "tokens_per_s": result.tokens / result.end,
            "ttft_p50_s": quantile(ttft, 0.5),
            "ttft_p99_s": quantile(ttft, 0.99),
            "speed": speed,
        }
    return rows
