"""The dispatcher on the real clock: answers over sockets, and what becomes of them when a replica
leaves.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine

import pytest
from aiohttp import web
from llmserve.credentials import bearer_token, is_authorized
from llmserve.generation import FinishReason, GenerationRequest
from llmserve.live_dispatcher import SILENCE_S, LiveDispatcher
from llmserve.oversize import LARGER_REPLICA_S
from llmserve.policies import Fcfs
from llmserve.policies.interface import SchedulingPolicy
from llmserve.policies.rpm import RequestsPerMinute
from llmserve.replica_status import ENGINE_ENDED, ENGINE_LOADS
from llmserve.replicas import Capacity
from llmserve.states import ReplicaState, RequestState
from llmserve.text import SimulatedTokenizer

from tests.jobscripts.llm.engines import answer as ids_of
from tests.jobscripts.llm.live import TIMES, HandClock, LocalEngine, engines, text_of, until_async


def dispatching(policy: SchedulingPolicy | None = None, **options) -> LiveDispatcher:
    return LiveDispatcher(policy or Fcfs(), SimulatedTokenizer(), "simulated", **options)


def order(name: str, tokens: int = 30, *, stream: bool = True, **more) -> GenerationRequest:
    prompt = SimulatedTokenizer().encode(f"Prompt of {name}")
    return GenerationRequest(name, "alice", prompt, tokens, stream=stream, **more)


def run(test: Callable[..., Coroutine]) -> Callable[..., None]:
    """A test in a loop of its own."""

    @functools.wraps(test)
    def wrapper(*arguments, **named):
        asyncio.run(test(*arguments, **named))

    return wrapper


async def read(stream) -> tuple[str, tuple[int, ...]]:
    """Text and ids of all parts."""
    parts = [part async for part in stream]
    return "".join(p.text for p in parts), tuple(i for p in parts for i in p.ids)


async def is_running(stream) -> None:
    """Wait until an answer has begun."""
    assert (await stream.next_part()).ids


async def generate(clock: HandClock, count: int, number: int, *made: LocalEngine) -> None:
    """Let each of ``number`` answers get that many tokens, and no more, on standing engines."""
    await until_async(lambda: sum(e.engine.running for e in made) == number, "all are running")
    clock.move(count * TIMES.step_s)


@run
async def test_a_stream_has_each_token_once_and_a_result(tmp_path):
    async with engines(tmp_path) as [engine], dispatching() as live:
        live.add_replica("n1", engine.address, engine.capacity)
        request = order("r1", 60)
        stream = live.submit(request)
        text, ids = await read(stream)
        result = await stream.result()
        assert (text, ids) == (text_of(request), ids_of(request))
        assert (result.text, result.ids) == (text, ids)
        assert (result.state, result.reason) == (RequestState.DONE, FinishReason.LENGTH)
        assert (result.prompt_tokens, result.attempts) == (len(request.prompt), 1)
        assert result.submitted_at <= result.first_token_at <= result.ended_at
        assert stream.has_ended
        assert await stream.next_part() is None


@run
async def test_an_answer_without_a_stream_has_no_parts(tmp_path):
    async with engines(tmp_path) as [engine], dispatching() as live:
        live.add_replica("n1", engine.address, engine.capacity)
        request = order("r1", stream=False)
        stream = live.submit(request)
        result = await stream.result()
        assert result.text == text_of(request)
        assert await read(stream) == ("", ())


@run
async def test_a_request_waits_for_the_first_replica(tmp_path):
    async with engines(tmp_path) as [engine], dispatching() as live:
        stream = live.submit(order("r1"))
        with pytest.raises(asyncio.TimeoutError):
            await stream.next_part(0.0)
        assert (live.counts().queued, live.state("r1")) == (1, RequestState.QUEUED)
        live.add_replica("n1", engine.address, engine.capacity)
        assert (await stream.result()).state is RequestState.DONE
        assert live.counts().queued == 0


@run
async def test_a_lost_replica_costs_no_token(tmp_path):
    clock = HandClock()
    async with engines(tmp_path, 2, slots=4, clock=clock) as made, dispatching() as live:
        for number, engine in enumerate(made):
            live.add_replica(f"n{number}", engine.address, engine.capacity)
        await until_async(lambda: all(r.slots for r in live.replicas()), "both are ready")
        requests = [order(f"r{number}", 400) for number in range(6)]
        streams = [live.submit(request) for request in requests]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        await generate(clock, 20, 6, *made)
        await until_async(lambda: all(len(live.generated(r.name)) > 5 for r in requests), "begun")
        await made[0].lose()
        clock.start()
        for request, stream, reader in zip(requests, streams, readers, strict=True):
            assert await reader == (text_of(request), ids_of(request))
            assert (await stream.result()).text == text_of(request)
        counts = live.counts()
        assert counts.losses == 3
        assert counts.attempts == 9
        assert counts.ended[RequestState.DONE] == 6
        assert counts.generated_tokens == 6 * 400 + counts.repeated_tokens
        assert live.replicas()[0].state is ReplicaState.GONE
        assert "cannot be reached" in live.replicas()[0].sentence


@run
async def test_a_replica_that_comes_back_serves_again(tmp_path):
    clock = HandClock()
    async with engines(tmp_path, clock=clock) as [engine], dispatching() as live:
        live.add_replica("n1", engine.address, engine.capacity)
        request = order("r1", 600)
        stream = live.submit(request)
        await generate(clock, 20, 1, engine)
        await is_running(stream)
        await engine.lose()
        await until_async(lambda: live.state("r1") is RequestState.QUEUED, "the loss is noticed")
        clock.start()
        await engine.start()
        assert (await stream.result()).text == text_of(request)


@run
async def test_a_notice_moves_what_would_not_end_in_time(tmp_path):
    clock = HandClock()
    async with engines(tmp_path, 2, clock=clock) as made, dispatching() as live:
        live.add_replica("n0", made[0].address, Capacity(8, 100_000, token_s=1.0))
        request = order("r1", 600)
        stream = live.submit(request)
        await generate(clock, 20, 1, made[0])
        await is_running(stream)
        live.add_replica("n1", made[1].address, made[1].capacity)
        await until_async(lambda: live.replicas()[1].slots, "the second is ready")
        live.notice("n0", 5.0)
        await until_async(lambda: live.replicas()[1].running == 1, "it has moved")
        assert live.replicas()[0].state is ReplicaState.DRAINING
        live.remove_replica("n0")
        clock.start()
        result = await stream.result()
        assert (result.text, result.attempts) == (text_of(request), 2)
        assert (live.counts().moves, live.counts().losses) == (1, 0)


@pytest.mark.parametrize("lasting", [0, 1])
@run
async def test_a_forecast_before_a_replica_is_ready_counts(tmp_path, lasting):
    capacity, clock = Capacity(8, 100_000, token_s=1.0), HandClock()
    async with engines(tmp_path, 2, clock=clock) as made, dispatching() as live:
        for index, engine in enumerate(made):
            live.add_replica(f"n{index}", engine.address, capacity)
            live.expect_end(f"n{index}", 3_000.0 if index == lasting else 300.0)
        await until_async(lambda: all(replica.slots for replica in live.replicas()), "ready")
        stream = live.submit(order("long", 600))
        await generate(clock, 20, 1, *made)
        await is_running(stream)
        assert live.replicas()[lasting].running == 1


@run
async def test_a_cancelled_request_frees_its_slot(tmp_path):
    async with engines(tmp_path, slots=1) as [engine], dispatching() as live:
        live.add_replica("n1", engine.address, engine.capacity)
        first, second = live.submit(order("r1", 50_000)), live.submit(order("r2"))
        await is_running(first)
        first.cancel()
        assert (await first.result()).state is RequestState.CANCELLED
        assert (await second.result()).state is RequestState.DONE
        await until_async(lambda: engine.engine.running == 0, "the engine has stopped it")
        first.cancel()  # no effect


@run
async def test_a_stop_string_ends_an_answer(tmp_path):
    async with engines(tmp_path) as [engine], dispatching() as live:
        live.add_replica("n1", engine.address, engine.capacity)
        request = order("r1", 50_000)
        text = text_of(order("r1", 200))
        stop = text[300:312]
        stream = live.submit(request, {"stop": stop})
        shown, _ = await read(stream)
        result = await stream.result()
        assert shown == result.text == text[: text.index(stop)]
        assert (result.state, result.reason) == (RequestState.DONE, FinishReason.STOP)
        await until_async(lambda: engine.engine.running == 0, "the engine has stopped it")


@run
async def test_an_answer_is_resumed_from_saved_ids(tmp_path):
    async with engines(tmp_path) as [engine], dispatching() as live:
        live.add_replica("n1", engine.address, engine.capacity)
        request = order("r1", 60)
        saved = ids_of(request)[:20]
        stream = live.submit(request, generated=saved)
        text, ids = await read(stream)
        result = await stream.result()
        assert ids == ids_of(request)[20:]
        assert (result.text, result.ids) == (text_of(request), ids_of(request))
        assert result.text.endswith(text)
        assert live.counts().generated_tokens == 40


@run
async def test_a_refusal_says_which_limit():
    async with dispatching(RequestsPerMinute(1)) as live:
        live.submit(order("r1"))
        result = await live.submit(order("r2")).result()
        assert result.state is RequestState.REFUSED
        assert result.refusal.retry_after_s > 0
        with pytest.raises(ValueError, match="exists already"):
            live.submit(order("r1"))


@run
async def test_a_request_that_fits_no_replica_is_refused_once_none_is_loading(tmp_path):
    now = [0.0]
    by_hand = dispatching(clock=lambda: now[0])
    async with engines(tmp_path, kv_tokens=50) as [engine], by_hand as live:
        stream, other = live.submit(order("huge", 300)), live.submit(order("r1"))
        live.add_replica("n1", engine.address, engine.capacity)
        live.add_replica("n2", f"unix:{tmp_path / 'loads'}", Capacity(8, 1_000))
        assert (await other.result()).state is RequestState.DONE
        now[0] += LARGER_REPLICA_S
        await live.submit(order("r2")).result()
        assert live.state("huge") is RequestState.QUEUED
        live.remove_replica("n2")
        result = await stream.result()
        assert (result.state, result.attempts) == (RequestState.REFUSED, 0)
        assert result.refusal.limit == "context_length_exceeded"
        assert "both together is 50" in result.sentence


@run
async def test_what_an_engine_refuses_fails_with_its_sentence(tmp_path):
    async with engines(tmp_path) as [engine], dispatching() as live:
        live.add_replica("n1", engine.address, engine.capacity)
        stream = live.submit(order("r1"), {"response_format": {"type": "json_object"}})
        result = await stream.result()
        assert (result.state, result.attempts) == (RequestState.FAILED, 1)
        assert result.engine_status == 400
        assert "has no response_format" in result.sentence


@run
async def test_a_body_goes_to_the_engine_and_back_as_it_is(tmp_path):
    async with engines(tmp_path) as [engine], dispatching() as live:
        live.add_replica("n1", engine.address, engine.capacity)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "stream": True}
        request = order("r1", 9, stream=False, continuable=False)
        result = await live.submit_body(request, "/v1/chat/completions", body).result()
        assert result.state is RequestState.DONE
        assert result.body["usage"]["completion_tokens"] == 9
        assert live.counts().generated_tokens == 9
        with pytest.raises(ValueError, match="has no stream"):
            live.submit_body(order("r2"), "/v1/chat/completions", body)


@run
async def test_a_body_starts_again_after_a_loss(tmp_path):
    clock = HandClock()
    async with engines(tmp_path, 2, clock=clock) as made, dispatching() as live:
        live.add_replica("n0", made[0].address, made[0].capacity)
        request = order("r1", 300, stream=False, continuable=False)
        stream = live.submit_body(request, "/v1/completions", {"prompt": "Hi", "max_tokens": 300})
        await until_async(lambda: made[0].engine.running, "it runs")
        live.add_replica("n1", made[1].address, made[1].capacity)
        await made[0].lose()
        clock.start()
        result = await stream.result()
        assert (result.state, result.attempts) == (RequestState.DONE, 2)
        assert result.body["usage"]["completion_tokens"] == 300


class Charged(Fcfs):
    """Counts what is charged."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def generated(self, request: GenerationRequest, count: int) -> None:
        self.tokens += count


@pytest.mark.parametrize(
    ("completion_tokens", "charged"),
    [(0, 0), (7, 7), (25, 25), (30, 30), (31, 30)],  # what no request can have is not charged
)
@run
async def test_the_tokens_of_all_choices_are_charged(tmp_path, completion_tokens, charged):
    async def complete(request: web.Request) -> web.Response:
        return web.json_response({"usage": {"completion_tokens": completion_tokens}})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "engine")).start()
    policy = Charged()
    async with dispatching(policy) as live:
        live.add_replica("n1", f"unix:{tmp_path}/engine", Capacity(4, 1000))
        request = order("r1", 10, stream=False, continuable=False, choices=3)
        body = {"prompt": "Hi", "max_tokens": 10, "n": 3}
        result = await live.submit_body(request, "/v1/completions", body).result()
        assert result.state is RequestState.DONE
        assert (policy.tokens, live.counts().generated_tokens) == (charged, charged)
    await runner.cleanup()


@run
async def test_leaving_cancels_what_has_not_ended():
    async with dispatching() as live:
        stream = live.submit(order("r1"))
    assert (await stream.result()).state is RequestState.CANCELLED


class Front:
    """A front of a replica that answers as it is told."""

    def __init__(self) -> None:
        self.status = {"state": "ready", "slots": 4, "kv_tokens": 1000}
        self.answer = {"error": {"message": "out of memory", "code": ENGINE_ENDED}}
        self.headers: list[str] = []
        self.posts = 0
        self.silent = asyncio.Event()
        self.release: asyncio.Event | None = None
        """Answers of how it is are as they were, and come once it is set."""

    async def start(self, path) -> str:
        app = web.Application()
        app.router.add_get("/replica", self._replica)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(path)).start()
        return f"unix:{path}"

    async def stop(self) -> None:
        self.silent.clear()
        await self._runner.cleanup()

    async def _replica(self, request: web.Request) -> web.Response:
        if self.silent.is_set():
            await asyncio.Event().wait()
        self.headers.append(request.headers.get("Authorization", ""))
        status = self.status
        if self.release is not None:
            await self.release.wait()
        return web.json_response(status)

    async def _completions(self, request: web.Request) -> web.Response:
        self.posts += 1
        if self.answer is None:
            await asyncio.Event().wait()
        return web.json_response(self.answer, status=502)


REFUSED = (
    b'data: {"error": {"message": "Token id 9999 is out of vocabulary", "type": "BadRequestError", '
    b'"param": null, "code": 400}}\n\ndata: [DONE]\n\n'
)
"""What vLLM 0.32 answers to a stream with such an id, with status 200."""


@run
async def test_what_an_engine_refuses_within_a_stream_is_final(tmp_path):
    posts = 0

    async def refuse(request: web.Request) -> web.Response:
        nonlocal posts
        posts += 1
        return web.Response(body=REFUSED, content_type="text/event-stream")

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/v1/completions", refuse)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "engine")).start()
    async with dispatching() as live:
        live.add_replica("n1", f"unix:{tmp_path}/engine", Capacity(4, 1000))
        result = await live.submit(order("r1")).result()
        assert (result.state, result.engine_status, posts) == (RequestState.FAILED, 400, 1)
        assert "Token id 9999 is out of vocabulary" in result.sentence
    await runner.cleanup()


@run
async def test_a_front_says_how_large_its_replica_is_and_gets_the_token(tmp_path):
    front = Front()
    address = await front.start(tmp_path / "front")
    front.status = {"state": "loading"}
    async with dispatching(key=b"k" * 32) as live:
        live.add_replica("n1", address)
        await until_async(lambda: front.headers, "it is asked")
        assert live.replicas()[0].state is ReplicaState.LOADING
        front.status = {"state": "ready", "slots": 4, "kv_tokens": 1000, "load_s": 7.5}
        await until_async(lambda: live.load.slots == 4, "it is ready")
        [view] = live.replicas()
        assert (view.kv_tokens, view.load_s) == (1000, 7.5)
        assert is_authorized(front.headers[-1], bearer_token(b"k" * 32))
        assert not is_authorized(front.headers[-1], bearer_token(b"l" * 32))
        front.status = {"state": "draining", "slots": 4, "kv_tokens": 1000, "ends_in_s": 60.0}
        await until_async(lambda: live.load.slots == 0, "it drains")
        front.status = {"state": "ready", "slots": 4, "kv_tokens": 1000}
        await until_async(lambda: live.load.slots == 4, "the notice is withdrawn")
    await front.stop()


@run
async def test_a_request_that_ends_three_engines_fails_and_others_go_on(tmp_path):
    front = Front()
    address = await front.start(tmp_path / "front")
    async with engines(tmp_path) as [engine], dispatching() as live:
        live.add_replica("n1", address)
        stream = live.submit(order("r1"))
        result = await stream.result()
        assert (result.state, front.posts) == (RequestState.FAILED, 3)
        assert result.sentence.endswith("the last: out of memory")
        assert live.counts().losses == 3
        live.remove_replica("n1")
        live.add_replica("n2", engine.address, engine.capacity)
        assert (await live.submit(order("r2")).result()).state is RequestState.DONE
    await front.stop()


@run
async def test_an_engine_that_loads_again_is_no_fault_of_a_request(tmp_path):
    front = Front()
    address = await front.start(tmp_path / "front")
    front.answer = {"error": {"message": "Try again later.", "code": ENGINE_LOADS}}
    async with engines(tmp_path) as [engine], dispatching() as live:
        live.add_replica("n1", address)
        await until_async(lambda: live.load.slots == 4, "it is ready")
        front.status = {"state": "loading"}  # it was idle, and nobody has asked it since
        request = order("r1")
        stream = live.submit(request)
        await until_async(lambda: front.posts, "it is posted")
        live.add_replica("n2", engine.address, engine.capacity)
        result = await stream.result()
        assert (result.text, result.attempts) == (text_of(request), 2)
    await front.stop()


@run
async def test_what_a_replica_said_before_its_engine_ended_counts_no_more(tmp_path):
    front = Front()
    address = await front.start(tmp_path / "front")
    async with engines(tmp_path) as [engine], dispatching() as live:
        live.add_replica("n1", address)
        await until_async(lambda: live.load.slots == 4, "it is ready")
        front.release, count = asyncio.Event(), len(front.headers)
        await until_async(lambda: len(front.headers) > count, "it is asked")
        request = order("r1")
        stream = live.submit(request)
        await until_async(lambda: live.counts().losses == 1, "its engine ends")
        front.status = {"state": "loading"}
        front.release.set()  # it was ready when it was asked
        await until_async(lambda: len(front.headers) > count + 1, "it is asked again")
        live.add_replica("n2", engine.address, engine.capacity)
        result = await stream.result()
        assert (result.text, result.attempts, front.posts) == (text_of(request), 2, 1)
    await front.stop()


@run
async def test_a_silent_replica_is_gone(tmp_path):
    front, hours = Front(), [0.0]
    address = await front.start(tmp_path / "front")
    front.answer = None
    loop = asyncio.get_running_loop()
    async with (
        engines(tmp_path) as [engine],
        dispatching(clock=lambda: loop.time() + hours[0]) as live,
    ):
        live.add_replica("n1", address)
        request = order("r1")
        stream = live.submit(request)
        await until_async(lambda: front.posts, "it is posted")
        front.silent.set()
        hours[0] = SILENCE_S
        live.add_replica("n2", engine.address, engine.capacity)
        assert (await stream.result()).text == text_of(request)
        assert live.counts().losses == 1
    await front.stop()
