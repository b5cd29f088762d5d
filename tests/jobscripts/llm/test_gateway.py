"""The gateway with the stock client: answers, streams, refusals, and clients that are gone."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from types import SimpleNamespace

import httpx2
import openai
import pytest
from aiohttp import web
from llmserve.answers import AnswerPart, AnswerResult, AnswerStream
from llmserve.gateway.responses import answer_parts, whole_as_chunks
from llmserve.simulated_model import detokenize, digest_of, generate, tokenize
from llmserve.states import RequestState
from prometheus_client.parser import text_string_to_metric_families

from tests.jobscripts.llm.gateways import CONFIGURATION, SLOW, TIMES, metric, site
from tests.jobscripts.llm.live import HandClock
from tests.waiting import until

CHAT = {"model": "simulated", "messages": [{"role": "user", "content": "Hello"}]}
COMPLETION = {"model": "simulated", "prompt": "Hello"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    with site(tmp_path_factory.mktemp("gateway")) as made:
        made.wait_for_replica()
        yield made


@pytest.fixture(scope="module")
def stalled(tmp_path_factory):
    """A gateway whose engine has slots and generates nothing."""
    configuration = CONFIGURATION + "[limits]\nopen_requests = 2\n"
    with site(tmp_path_factory.mktemp("stalled"), configuration=configuration, times=SLOW) as made:
        made.wait_for_replica()
        yield made


def until_idle(stalled) -> None:
    """Wait until the next test finds no request."""
    until(lambda: stalled.running == 0, "the engine computes nothing")
    until(lambda: len(stalled.gateway.admission) == 0, "no request is open")


def answer_to(ids: list[int], count: int) -> str:
    return detokenize(generate(digest_of(ids), count)[0])


def events(text: str) -> list[dict]:
    lines = [line for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


class Samples:
    """What Prometheus reads from a gateway now."""

    def __init__(self, site) -> None:
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(site.http("operator").get("/metrics").text)
            for sample in family.samples
        }

    def of(self, name: str, **labels: str) -> float | None:
        labels = {"model": "simulated", **labels}
        return self._values.get((f"llmserve_{name}", frozenset(labels.items())))


def test_a_completion(gateway):
    answer = gateway.client().completions.create(**COMPLETION, max_tokens=20)
    assert answer.choices[0].text == answer_to(tokenize("Hello"), 20)
    assert (answer.choices[0].finish_reason, answer.model) == ("length", "simulated")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 20)


def test_a_stream_of_a_chat(gateway):
    stream = gateway.client().chat.completions.create(
        **CHAT, max_tokens=50, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer_to(tokenize("<user>Hello<assistant>"), 50)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == ["length"]
    assert chunks[-1].usage.completion_tokens == 50
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat_that_is_not_streamed_and_one_with_ids(gateway):
    answer = gateway.client().chat.completions.create(**CHAT, max_completion_tokens=7)
    assert answer.choices[0].message.content == answer_to(tokenize("<user>Hello<assistant>"), 7)
    body = {"model": "simulated", "prompt": [5, 6], "max_tokens": 9, "return_token_ids": True}
    whole = gateway.http().post("/v1/completions", json=body).json()
    ids = generate(digest_of([5, 6]), 9)[0]
    assert whole["choices"][0]["token_ids"] == ids
    stream = gateway.http().post("/v1/completions", json={**body, "stream": True}).text
    parts = [event["choices"][0] for event in events(stream)]
    assert [number for part in parts for number in part["token_ids"]] == ids


def test_what_an_engine_refuses_is_the_clients_error(gateway):
    with pytest.raises(openai.BadRequestError, match="has no response_format") as caught:
        gateway.client().chat.completions.create(**CHAT, response_format={"type": "json_object"})
    assert caught.value.code == "engine_refused"


def test_a_stop_string_ends_the_answer(gateway):
    text = answer_to(tokenize("Hello"), 20)
    stop = text[len(text) // 2 :][:4]
    for stream in (False, True):
        answer = gateway.client().completions.create(
            **COMPLETION, max_tokens=20, stop=[stop], stream=stream
        )
        choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_models(gateway):
    client = gateway.client()
    assert [model.id for model in client.models.list()] == ["simulated"]
    assert client.models.retrieve("simulated").id == "simulated"
    with pytest.raises(openai.NotFoundError, match="There is no model 'gpt'"):
        client.models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError, match="There is no model 'gpt'; served: simulated"):
        client.completions.create(model="gpt", prompt="Hello")


@pytest.mark.parametrize("key", ["", "llm-1-2", "sk-123"])
def test_a_request_without_a_valid_key_is_refused(gateway, key):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("GET", "/metrics"),
    ):
        answer = httpx2.request(method, gateway.url + path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key" if key else "missing_api_key"


def test_a_user_who_is_not_declared_any_more_is_refused(gateway):
    with pytest.raises(openai.AuthenticationError, match="This key is not valid"):
        gateway.client("mallory").models.list()


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ("{", 400, "invalid_body"),
        ('{"model": 1}', 400, "invalid_body"),
        ('{"model": "simulated"}', 400, "invalid_body"),
        ('{"model": "simulated", "prompt": ""}', 400, "empty_prompt"),
        ('{"model": "simulated", "prompt": "a", "max_tokens": 0}', 400, "invalid_max_tokens"),
        (
            '{"model": "simulated", "prompt": "a", "max_tokens": 100000}',
            400,
            "context_length_exceeded",
        ),
    ],
)
def test_a_broken_body_is_refused(gateway, body, status, code):
    answer = gateway.http().post("/v1/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.json()["error"]["message"].endswith((".", "]."))


def test_a_long_body_is_refused(gateway):
    limit = gateway.configuration.max_body_bytes

    def parts():
        for _ in range(limit // 65536 + 2):
            yield b" " * 65536

    for content in (b" " * (limit + 1), parts()):  # with a length, and without
        try:
            answer = gateway.http().post("/v1/completions", content=content)
        except httpx2.WriteError:
            continue  # refused while it was sent
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_long")


def test_an_unknown_path_is_an_error_of_the_api(gateway):
    answer = gateway.http().get("/v1/embeddings")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith("There is no GET /v1/embeddings")


def test_a_limit_is_429_with_its_name_and_when_to_return(stalled):
    client = stalled.client()
    streams = [threading.Thread(target=lambda: list(open_stream(client))) for _ in range(2)]

    def open_stream(client):
        try:
            yield from client.completions.create(**COMPLETION, stream=True)
        except openai.APIError:
            pass

    for stream in streams:
        stream.start()
    until(lambda: len(stalled.gateway.admission) == 2, "two requests are open")
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**COMPLETION)
    assert caught.value.response.headers["retry-after"] == "5"
    assert caught.value.response.headers["x-limit"] == caught.value.code == "open_requests"
    assert "The limit of 2 open requests of user alice" in caught.value.message
    alice = {"user": "alice", "application": ""}
    assert Samples(stalled).of("open_requests", state="running", **alice) == 2
    # who is revoked gets an error event in the streams that have begun
    for key in stalled.keys.list():
        if key.user == "alice":
            stalled.keys.revoke(key.id)
    for stream in streams:
        stream.join()
    until_idle(stalled)


def test_a_revoked_key_ends_a_stream_with_an_error_event(stalled):
    client = stalled.client("bob")
    caught = []

    def read():
        try:
            list(client.completions.create(**COMPLETION, stream=True))
        except openai.APIError as error:
            caught.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: stalled.running == 1, "the request runs")
    stalled.keys.revoke(client.api_key)
    thread.join()
    assert "The key of this request was revoked." in str(caught[0])
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    until_idle(stalled)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_frees_its_slot(stalled, stream):
    body = json.dumps({**COMPLETION, "stream": stream}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
        f"Authorization: Bearer {stalled.key('bob')}\r\n\r\n"
    )
    host, port = stalled.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        until(lambda: stalled.running == 1, "the request runs")
        if stream:
            connection.recv(1)  # the stream has begun, with a comment
    until_idle(stalled)


def test_comments_while_nothing_is_generated(stalled):
    body = {**COMPLETION, "stream": True}
    with stalled.http("bob").stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(4)] == [": waiting", "", ": waiting", ""]
    until_idle(stalled)


def test_a_stream_goes_on_when_its_replica_is_lost(tmp_path):
    """One engine is stopped in the middle of a stream, the other continues it."""
    clock = HandClock()
    with site(tmp_path, engines=2, clock=clock) as made:
        made.wait_for_replica()
        until(
            lambda: made.loop.call(
                lambda: made.gateway.admission.models["simulated"].dispatcher.load.slots == 16
            ),
            "both replicas are ready",
        )
        stream = made.client().completions.create(**COMPLETION, max_tokens=200, stream=True)
        until(lambda: made.running == 1, "it runs")
        clock.move(20 * TIMES.step_s)
        text = ""
        for chunk in stream:
            if not text:
                (number,) = [n for n, engine in enumerate(made.engines) if engine.running]
                made.stop(made.engine_servers[number])
                clock.start()
            text += chunk.choices[0].text
        assert text == answer_to(tokenize("Hello"), 200)
        until(lambda: len(made.gateway.admission) == 0, "the request is observed")
        alice, values = {"user": "alice", "application": ""}, Samples(made)
        assert values.of("moves_total", **alice) == 1
        assert values.of("tokens_total", kind="generated", **alice) == 200
        assert metric(made.client("operator"), "llmserve_moves_total") == 1


def test_metrics_by_user_and_application(tmp_path):
    configuration = (
        CONFIGURATION
        + """
[applications.chat]
input_tokens = 10
output_tokens = 10
users = ["alice"]
"""
    )
    with site(tmp_path, configuration=configuration) as made:
        made.wait_for_replica()
        for user in ("alice", "bob"):
            headers = {"X-Application": "chat", "X-Interaction-Id": "1"}
            client = made.client(user, default_headers=headers)  # closes what it opened at its end
            stream = client.completions.create(**COMPLETION, max_tokens=10, stream=True)
            stream.response.read()
        until(lambda: len(made.gateway.admission) == 0, "the requests are observed")
        values = Samples(made)
        for user, application in (("alice", "chat"), ("bob", "")):
            party = {"user": user, "application": application}
            assert values.of("requests_total", outcome="done", **party) == 1
            assert values.of("tokens_total", kind="prompt", **party) == 5
            assert values.of("tokens_total", kind="generated", **party) == 10
            assert values.of("time_to_first_token_seconds_count", **party) == 1
            assert values.of("time_between_tokens_seconds_count", **party) >= 0
            assert values.of("moves_total", **party) == 0
        assert values.of("queue_length") == 0
        assert values.of("replicas", state="ready") == 1
        assert made.http("bob").get("/metrics").status_code == 403


def test_requests_wait_for_the_first_replica_and_end_with_the_gateway(tmp_path):
    with site(tmp_path, engines=0, configuration=waiting_for(tmp_path)) as made:
        woken = []
        made.loop.call(
            lambda: made.gateway.admission.on_wait(lambda model: woken.append(model.name))
        )
        texts, errors = [], []

        def ask(client):
            try:
                stream = client.completions.create(**COMPLETION, max_tokens=5, stream=True)
                texts.append("".join(chunk.choices[0].text for chunk in stream))
            except openai.APIError as error:
                errors.append(error)

        first = threading.Thread(target=ask, args=(made.client(),))
        first.start()
        until(lambda: woken == ["simulated"], "the request asks for a node")
        server = made.start_engine(f"unix:{tmp_path}/later")
        first.join()
        assert texts == [answer_to(tokenize("Hello"), 5)]
        made.stop(server)
        second = threading.Thread(target=ask, args=(made.client(),))
        second.start()
        until(lambda: len(made.gateway.admission) == 1, "the request is open")
        made.stop_gateway()
        second.join()
        assert "The gateway is stopping" in str(errors[0])


def waiting_for(tmp_path) -> str:
    return CONFIGURATION.replace("{engines}", f'["unix:{tmp_path}/later"]')


def test_a_whole_answer_as_a_stream():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    body = {"id": "a", "object": "chat.completion", "choices": [choice], "usage": {}}
    delta = {"role": "assistant", "tool_calls": [{"index": 0, **call}]}
    assert whole_as_chunks(body) == [
        {
            "id": "a",
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "finish_reason": "tool_calls", "delta": delta}],
        }
    ]


def test_a_stream_of_several_choices_has_the_usage_that_the_engine_counted(tmp_path):
    texts = ("one two three", "four five six")
    answer = {
        "id": "cmpl-1",
        "object": "text_completion",
        "choices": [
            {"index": n, "text": t, "finish_reason": "length"} for n, t in enumerate(texts)
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11},
    }

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def complete(request: web.Request) -> web.Response:
        return web.json_response(answer)

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/health", health)
        app.router.add_post("/v1/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "later")).start()
        return runner

    with site(tmp_path, configuration=waiting_for(tmp_path), engines=0) as made:
        engine = made.loop.run(start())
        made.wait_for_replica()
        fields = {**COMPLETION, "max_tokens": 3, "n": 2}
        options = {"include_usage": True}
        chunks = list(
            made.client().completions.create(**fields, stream=True, stream_options=options)
        )
        assert [chunk.choices[0].text for chunk in chunks[:-1]] == list(texts)
        assert chunks[-1].usage.completion_tokens == 6
        assert Samples(made).of("tokens_total", user="alice", application="", kind="generated") == 6
        made.loop.run(engine.cleanup())


def test_the_time_between_tokens_is_that_of_parts_and_silence_is_a_comment():
    async def story():
        gaps = []
        stream = AnswerStream("r", lambda: None)
        opened = SimpleNamespace(stream=stream, observe_tbt=gaps.append)
        parts = answer_parts(opened, 1e-6)
        assert await anext(parts) == AnswerPart("", ())  # nothing came for an interval
        for ids in ((1,), (2, 3), (4,)):
            stream.add(AnswerPart("a", ids))
        stream.end(AnswerResult(RequestState.DONE))
        seen = [part.ids async for part in parts if part.ids]
        assert seen == [(1,), (2, 3), (4,)]
        assert len(gaps) == 2
        assert all(gap >= 0 for gap in gaps)

    asyncio.run(story())
