"""The simulated engine as a server: what the OpenAI API answers, and what is refused."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from llmserve.engine_model import EngineTimes
from llmserve.live_engine import LiveEngine
from llmserve.openai_messages import ApiRefusal, ChatMessage, chat_text, read_order
from llmserve.replicas import Capacity
from llmserve.simulated_model import (
    HALF_CHARACTER,
    VOCABULARY,
    complete_until,
    detokenize,
    digest_of,
    generate,
    tokenize,
)
from llmserve.simulated_server import AnswerText, listen, make_app

from tests.waiting import NEVER_S, PATIENCE_S, until

ROOT = Path(__file__).parents[3]
TIMES = EngineTimes(0.0005, 0.0, 0.0, 0.0)


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(str(self.path))


def call(path: Path, url: str, body: object = None, method: str = "POST"):
    """(status, answer) of a request."""
    connection = UnixConnection(path)
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("GET" if body is None else method, url, None if body is None else sent)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, text


def completion(path: Path, **body):
    status, text = call(path, "/v1/completions", {"model": "simulated", **body})
    return status, json.loads(text)


def events(text: bytes) -> list[dict]:
    lines = [line for line in text.decode().split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def serving(tmp_path, slots: int = 8, load_s: float = 0.0, clock=time.monotonic):
    """A server in a thread: (path of its socket, what stops it, its engine)."""
    path = tmp_path / "engine"
    engine = LiveEngine(TIMES, Capacity(slots, 100_000), clock)
    app = make_app(engine, "simulated", load_s)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listen(path)]})
    thread.start()
    until(lambda: server.started, "the server listens")

    def stop() -> None:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()

    return path, stop, engine


@pytest.fixture
def server(tmp_path):
    path, stop, _ = serving(tmp_path)
    until(lambda: call(path, "/health")[0] == 200, "the model is loaded")
    yield path
    stop()


def test_only_its_user_may_connect(server):
    assert stat.S_IMODE(server.stat().st_mode) == 0o600


def test_it_names_its_model(server):
    status, text = call(server, "/v1/models")
    assert (status, [m["id"] for m in json.loads(text)["data"]]) == (200, ["simulated"])


def test_an_answer_is_that_of_the_model_and_can_be_continued(server):
    prompt = [1, 2, 3]
    ids, _ = generate(digest_of(prompt), 40)
    body = {"prompt": prompt, "max_tokens": 40, "return_token_ids": True}
    status, whole = completion(server, **body)
    assert status == 200
    [choice] = whole["choices"]
    assert choice["token_ids"] == ids
    assert choice["text"] == detokenize(ids)
    assert choice["finish_reason"] == "length"
    usage = {"prompt_tokens": 3, "completion_tokens": 40, "total_tokens": 43}
    assert whole["usage"] == usage
    complete = complete_until(ids[:25])
    body |= {"prompt": prompt + ids[:complete], "max_tokens": 40 - complete}
    _, rest = completion(server, **body)
    assert choice["text"] == detokenize(ids[:complete]) + rest["choices"][0]["text"]


@pytest.fixture
def steady_server(tmp_path):
    """It computes one token after the other, even if it stands still in between: its time passes
    only where it looks at its clock.
    """
    looks = itertools.count()
    path, stop, _ = serving(tmp_path, clock=lambda: next(looks) * TIMES.step_s / 4)
    until(lambda: call(path, "/health")[0] == 200, "the model is loaded")
    yield path
    stop()


def test_a_stream_has_the_same_text(steady_server):
    server, body = steady_server, {"prompt": "Hello", "max_tokens": 60}
    _, whole = completion(server, **body)
    body |= {"model": "simulated", "stream": True, "stream_options": {"include_usage": True}}
    status, text = call(server, "/v1/completions", body)
    assert status == 200
    *parts, usage = events(text)
    shown = "".join(part["choices"][0]["text"] for part in parts)
    assert shown == whole["choices"][0]["text"]
    assert [p["choices"][0]["finish_reason"] for p in parts[-2:]] == [None, "length"]
    assert usage["usage"]["completion_tokens"] == 60
    assert usage["choices"] == []


def test_a_chat_that_goes_on_begins_with_its_prompt(server):
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "simulated", "messages": messages, "max_tokens": 20}
    status, text = call(server, "/v1/chat/completions", body)
    assert status == 200
    message = json.loads(text)["choices"][0]["message"]
    assert message["role"] == "assistant"
    parts = [{"type": "text", "text": "Go on"}]
    longer = [*messages, message, {"role": "user", "content": parts}]
    first, second = (
        tokenize(chat_text([ChatMessage(**m) for m in each])) for each in (messages, longer)
    )
    ids, _ = generate(digest_of(first), 20)
    assert second[: len(first) + 20] == first + ids
    status, text = call(
        server, "/v1/chat/completions", {**body, "messages": longer, "stream": True}
    )
    deltas = [event["choices"][0]["delta"] for event in events(text)]
    assert deltas[0]["role"] == "assistant"
    ids, _ = generate(digest_of(second), 20)
    assert "".join(delta["content"] for delta in deltas) == detokenize(ids)


def test_a_client_that_is_gone_frees_its_slot(tmp_path):
    path, stop, engine = serving(tmp_path, slots=1)
    try:
        for stream in (True, False):
            body = {"model": "simulated", "prompt": "x", "max_tokens": 90_000, "stream": stream}
            connection = UnixConnection(path)
            connection.request("POST", "/v1/completions", json.dumps(body))
            until(lambda: engine.running == 1, "the answer is being generated")
            connection.sock.close()
            connection.close()
            assert completion(path, prompt="y", max_tokens=5)[0] == 200
            assert (engine.running, engine.waiting) == (0, 0)
    finally:
        stop()


def test_a_model_that_is_being_loaded_answers_503(tmp_path):
    path, stop, _ = serving(tmp_path, load_s=NEVER_S)
    try:
        assert call(path, "/health")[0] == 503
        status, answer = completion(path, prompt="x")
        assert (status, answer["error"]["code"]) == (503, "loading")
    finally:
        stop()


def test_a_refusal_is_an_error_of_the_api(server):
    status, answer = completion(server, prompt="x", max_tokens=0)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert "at least 1" in answer["error"]["message"]
    status, text = call(server, "/v1/completions", b" " * ((16 << 20) + 1))
    assert (status, json.loads(text)["error"]["code"]) == (413, "body_too_long")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_body"),
        (b"\xff", 400, "invalid_body"),
        ({"prompt": "x"}, 400, "invalid_body"),
        ({"model": "simulated", "prompt": ["a", "b"]}, 400, "invalid_body"),
        ({"model": "other", "prompt": "x"}, 404, "model_not_found"),
        ({"model": "simulated", "prompt": ""}, 400, "empty_prompt"),
        ({"model": "simulated", "prompt": [-1]}, 400, "invalid_prompt"),
        ({"model": "simulated", "prompt": [1 << 32]}, 400, "invalid_prompt"),
        ({"model": "simulated", "prompt": "x", "n": 2}, 400, "unsupported"),
        ({"model": "simulated", "prompt": "x", "stop": "y"}, 400, "unsupported"),
        ({"model": "simulated", "prompt": "x", "logprobs": 3}, 400, "unsupported"),
        ({"model": "simulated", "prompt": "x", "max_tokens": 99}, 400, "context_length_exceeded"),
    ],
)
def test_what_is_refused(body, status, code):
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiRefusal) as refusal:
        read_order(encoded, is_chat=False, model="simulated", kv_tokens=99)
    assert (refusal.value.status, refusal.value.code) == (status, code)
    assert refusal.value.sentence.endswith(".")


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=30))
def test_the_ids_of_generated_text_are_found_again(ids):
    assert tokenize(detokenize(ids)) == ids


@given(st.text(max_size=20))
def test_any_text_has_ids(text):
    assert all(0 <= token < VOCABULARY + 256 for token in tokenize(text))
    assert bool(tokenize(text)) == bool(text)


@given(st.lists(st.integers(0, 3 * HALF_CHARACTER), min_size=1, max_size=30), st.data())
def test_the_parts_of_a_text_are_the_text(ids, data):
    text, parts, whole = AnswerText(), [], True
    rest = ids
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        chunk, rest = rest[:count], rest[count:]
        complete = complete_until(chunk, whole=whole)
        whole = complete == count
        parts.append(text.add(chunk, complete, is_last=not rest))
    assert "".join(parts) == detokenize(ids)
    assert text.count == len(ids)


@pytest.mark.slow
def test_the_command_serves_until_it_is_ended(tmp_path):
    path = tmp_path / "engine"
    listen(path).close()  # left behind by another process
    command = [sys.executable, "-m", "llmserve.simulated_server", "--socket", str(path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "jobscripts" / "llm")}
    process = subprocess.Popen([*command, "--model", "m"], env=env)
    try:

        def is_ready() -> bool:
            assert process.poll() is None
            try:
                return call(path, "/health")[0] == 200
            except (ConnectionError, FileNotFoundError):
                return False

        until(is_ready, "the server answers")
        status, text = call(path, "/v1/completions", {"model": "m", "prompt": "x"})
        assert (status, json.loads(text)["usage"]["completion_tokens"]) == (200, 16)
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (0, -signal.SIGTERM)


@pytest.mark.slow
def test_the_command_says_what_is_wrong(tmp_path):
    (tmp_path / "file").touch()
    env = {**os.environ, "PYTHONPATH": str(ROOT / "jobscripts" / "llm")}
    for arguments, sentence in (
        (["--socket", str(tmp_path / "file")], "is not a socket; name another path."),
        (["--socket", str(tmp_path / "new"), "--slots", "0"], "needs a slot and KV memory"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "llmserve.simulated_server", *arguments],
            env=env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr
