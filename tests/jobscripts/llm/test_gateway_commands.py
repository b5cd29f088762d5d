"""The commands of the gateway: keys, traces that are written and replayed, and what errors say."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from llmserve.answers import AnswerResult
from llmserve.cli import main
from llmserve.gateway.keys import KeyFile
from llmserve.gateway.request_log import DAY_S, RequestLog
from llmserve.replay import Endpoint, ReplayOutcome, body_of, percentiles, summarize
from llmserve.states import RequestState
from llmserve.traces import TraceRequest, read

from tests.jobscripts.llm.gateways import running, site
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[3]
MODEL = '[models.simulated]\nengines = ["unix:engine"]\ntokenizer = "simulated"\n'


@pytest.fixture
def configuration(tmp_path):
    path = tmp_path / "gateway.toml"
    text = "[users.alice]\n[applications.chat]\ninput_tokens = 1\noutput_tokens = 1\n"
    path.write_text(MODEL + text)
    return path


def test_a_key_is_made_listed_and_revoked(configuration, tmp_path, capsys):
    config = ["--config", str(configuration)]
    assert main(["key", "add", "alice", "--application", "chat", *config]) == 0
    text = capsys.readouterr().out.strip()
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.check(text)
    assert (key.user, key.application) == ("alice", "chat")
    assert main(["key", "list", *config]) == 0
    shown = capsys.readouterr().out
    assert key.id in shown
    assert key.hash not in shown
    assert main(["key", "revoke", key.id, *config]) == 0
    assert capsys.readouterr().out == f"Key {key.id} of user alice is revoked.\n"
    assert keys.check(text) is None
    assert main(["key", "list", "--json", *config]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["revoked"] is not None
    assert "hash" not in row


def test_a_user_is_revoked(configuration, capsys):
    config = ["--config", str(configuration)]
    for _ in range(2):
        assert main(["key", "add", "alice", *config]) == 0
    capsys.readouterr()
    assert main(["key", "revoke", "alice", *config]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.endswith(" of user alice is revoked.") for line in lines)
    assert main(["key", "revoke", "alice", *config]) == 0
    assert capsys.readouterr().out == "User alice has no valid key.\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["key", "add", "eve"], "declares no user eve; add [users.eve] first."),
        (
            ["key", "add", "alice", "--application", "x"],
            "declares no application x; add [applications.x] first.",
        ),
        (["key", "revoke", "1234"], "There is no key 1234 in "),
        (["gateway", "--idle", "0"], "--idle is 0; it must be above 0."),
    ],
)
def test_errors_are_sentences(configuration, capsys, arguments, sentence):
    assert main([*arguments, "--config", str(configuration)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"llmserve {arguments[0]}: ")
    assert sentence in error


def test_a_configuration_that_is_not_there(tmp_path, capsys):
    assert main(["gateway", "--check", "--config", str(tmp_path / "none")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"llmserve gateway: There is no file {tmp_path}/none; name the gateway")


def test_requests_are_written_as_traces_and_replayed(tmp_path, capsys):
    with site(tmp_path) as made:
        made.wait_for_replica()
        for user, prompt in (("alice", "a" * 600), ("bob", "b"), ("alice", "a" * 600)):
            made.client(user).completions.create(model="simulated", prompt=prompt, max_tokens=30)
        config = ["--config", str(tmp_path / "gateway.toml")]
        log = RequestLog(made.configuration.database, math.inf)
        until(lambda: len(list(log.read())) == 3, "the requests are stored")
        log.close()
        files = {}
        for form in ("azure", "mooncake", "vtc-arena"):
            path = tmp_path / f"{form}.trace"
            assert main(["trace", str(path), "--form", form, "--anonymous", *config]) == 0
            files[form] = read(path)
            assert capsys.readouterr().out == f"3 requests are in {path}.\n"
        lengths = [(600, 30), (1, 30), (600, 30)]
        for requests in files.values():
            assert [(r.prompt_tokens, r.output_tokens) for r in requests] == lengths
        assert [r.user for r in files["vtc-arena"]] == ["user0", "user1", "user0"]
        assert [r.blocks for r in files["mooncake"]] == [(0, 1), (2,), (0, 1)]
        keys = tmp_path / "keys.txt"
        keys.write_text(f"{made.key('alice')}\n{made.key('bob')}\n")
        arguments = ["--url", made.url, "--model", "simulated", "--keys", str(keys), "--json"]
        assert main(["replay", str(tmp_path / "vtc-arena.trace"), *arguments]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert (figures["requests"], figures["answered"], figures["failed"]) == (3, 3, 0)
        assert set(figures["ttft"]) == {"p50", "p90", "p99"}
        keys.write_text("llm-1-2\n")
        assert main(["replay", str(tmp_path / "azure.trace"), *arguments[:-1]]) == 0
        assert "3 × 401 invalid_api_key" in capsys.readouterr().out


def test_old_requests_are_deleted(tmp_path):
    now = [10 * DAY_S]
    log = RequestLog(f"sqlite:///{tmp_path}/gateway.db", 2.0, lambda: now[0])
    order = SimpleNamespace(prompt=[1, 2, 3])
    opened = SimpleNamespace(
        gateway_order=SimpleNamespace(order=order),
        model=SimpleNamespace(name="m"),
        caller=SimpleNamespace(user="alice", application=""),
    )
    result = AnswerResult(RequestState.DONE, ids=(1, 2), submitted_at=5.0, ended_at=7.0)
    log.observe(opened, result)
    log.observe(opened, AnswerResult(RequestState.FAILED))
    log.save()
    ((arrived, request),) = log.read()
    assert arrived == 10 * DAY_S - 2.0
    assert (request.prompt_tokens, request.output_tokens, request.user) == (3, 2, "alice")
    assert list(log.read(since=11 * DAY_S)) == []
    assert list(log.read(model="other")) == []
    now[0] += 2 * DAY_S
    log.save()
    assert list(log.read()) == []
    log.close()


def test_bodies_have_the_lengths_and_prefixes_of_the_trace():
    endpoint = Endpoint("http://localhost", "m", vocabulary=100)
    first = body_of(TraceRequest(0.0, 1000, 7, "", (3, 4), 512), 0, endpoint)
    second = body_of(TraceRequest(0.0, 1000, 7, "", (3, 5), 512), 1, endpoint)
    assert (len(first["prompt"]), first["max_tokens"], first["ignore_eos"]) == (1000, 7, True)
    assert first["prompt"][:512] == second["prompt"][:512]
    assert first["prompt"][512:] != second["prompt"][512:]
    assert set(first["prompt"]) <= set(range(100))


def test_figures_of_a_replay():
    outcomes = [
        ReplayOutcome("a", 0.0, 2.0, 1.0, 11),
        ReplayOutcome("a", 1.0, 4.0, 3.0, 21),
        ReplayOutcome("b", 0.0, 0.5, None, 0, "429 open_requests"),
        ReplayOutcome("b", 0.0, 0.5, None, 0, "gone"),
    ]
    summary = summarize(outcomes)
    assert (summary.requests, summary.answered, summary.refused, summary.failed) == (4, 2, 1, 1)
    assert summary.tokens_per_s == 8.0
    assert summary.ttft == {"p50": 1.0, "p90": 2.0, "p99": 2.0}
    assert summary.tbt == pytest.approx({"p50": 0.05, "p90": 0.1, "p99": 0.1})
    assert percentiles([]) == {}


@pytest.mark.slow
def test_a_gateway_that_is_killed_goes_on_with_its_batches(tmp_path):
    folder = tmp_path / "engines"
    folder.mkdir()
    configuration = tmp_path / "gateway.toml"
    lines = [
        {
            "custom_id": f"{number}",
            "url": "/v1/completions",
            "body": {"model": "simulated", "prompt": [number + 1], "max_tokens": 300},
        }
        for number in range(40)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    with site(folder) as made:
        configuration.write_text(
            'listen = "127.0.0.1:0"\n[users.alice]\n'
            f"[models.simulated]\nengines = {made.sockets}\nengine_slots = 8\n"
            'tokenizer = "simulated"\n'
        )
        _, key = KeyFile(tmp_path / "keys.json").add("alice")
        with running(configuration, key) as (process, client):
            file = client.files.create(file=("in.jsonl", content), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            until(
                lambda: client.batches.retrieve(batch.id).request_counts.completed, "some lines end"
            )
            process.kill()
            process.wait(PATIENCE_S)
        until(lambda: made.running == 0, "the engine notices that its client is gone")
        with running(configuration, key) as (process, client):
            until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch ends")
            batch = client.batches.retrieve(batch.id)
            assert batch.request_counts.completed == 40
            answers = client.files.content(batch.output_file_id).text.splitlines()
            assert [json.loads(answer)["custom_id"] for answer in answers] == [
                f"{number}" for number in range(40)
            ]
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == -signal.SIGTERM  # as uvicorn ends
