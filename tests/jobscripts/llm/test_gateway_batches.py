"""Files and batches of the gateway with the stock client: answers, refused lines, restarts."""

from __future__ import annotations

import contextlib
import io
import json
import math
import stat
from collections import Counter
from types import SimpleNamespace

import openai
import pytest
from llmserve.batch_lines import BatchLine, read_lines
from llmserve.engine_model import EngineTimes
from llmserve.gateway.batch_runner import WINDOW
from llmserve.gateway.database import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    DatabaseError,
    GatewayDatabase,
    LineAnswer,
)
from llmserve.gateway.models import ServedModel, read_order
from llmserve.openai_messages import ApiRefusal
from llmserve.policies.interface import Load
from llmserve.simulated_model import detokenize, digest_of, generate, tokenize
from llmserve.text import SimulatedTokenizer

from tests.jobscripts.llm.gateways import CONFIGURATION, SLOW, site
from tests.jobscripts.llm.live import HandClock
from tests.waiting import until

COMPLETIONS = "/v1/completions"


def line(number: int, **body: object) -> dict:
    return {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": COMPLETIONS,
        "body": {"model": "simulated", "prompt": f"Hello {number}", "max_tokens": 8, **body},
    }


def jsonl(*lines: object) -> bytes:
    return b"".join(
        (text if isinstance(text, bytes) else json.dumps(text).encode()) + b"\n" for text in lines
    )


def upload(client: openai.OpenAI, content: bytes):
    return client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")


def begin(client: openai.OpenAI, content: bytes, **more: object):
    return client.batches.create(
        input_file_id=upload(client, content).id,
        endpoint=COMPLETIONS,
        completion_window="24h",
        **more,
    )


def ended(client: openai.OpenAI, name: str):
    def look():
        batch = client.batches.retrieve(name)
        return batch if batch.status in ("completed", "cancelled") else None

    return until(look, "the batch ends")


def answers(client: openai.OpenAI, file_id: str | None) -> dict[str, dict]:
    if file_id is None:
        return {}
    rows = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    assert max(Counter(row["custom_id"] for row in rows).values()) == 1
    return {row["custom_id"]: row for row in rows}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    limited = CONFIGURATION.replace("tokenizer", "max_request_tokens = 100000\ntokenizer")
    with site(tmp_path_factory.mktemp("gateway"), configuration=limited) as made:
        made.wait_for_replica()
        yield made


@pytest.mark.parametrize(
    ("is_loading", "limit", "may_wait", "is_refused"),
    [
        (False, None, False, True),
        (True, None, False, False),  # the one that loads may be larger
        (False, None, True, False),
        (False, 40, True, True),
        (True, 40, False, True),
    ],
)
def test_a_line_of_a_batch_may_wait_for_a_larger_replica(is_loading, limit, may_wait, is_refused):
    dispatcher = SimpleNamespace(
        tokenizer=SimulatedTokenizer(),
        load=Load(0, 8),
        largest_tokens=50,
        may_hold_more=is_loading,
    )
    models = {"simulated": ServedModel("simulated", dispatcher, None, limit)}
    body = line(0, max_tokens=60)["body"]
    refused = pytest.raises(ApiRefusal, match=r"both together is (40|50)")
    with refused if is_refused else contextlib.nullcontext():
        read_order(json.dumps(body).encode(), COMPLETIONS, models, may_wait=may_wait)


def test_a_batch(gateway):
    client = gateway.client()
    too_long = line(100, max_tokens=1_000_000)
    content = jsonl(*(line(number) for number in range(100)), too_long)
    batch = ended(client, begin(client, content, metadata={"name": "mine"}).id)
    assert batch.status == "completed"
    assert batch.metadata == {"name": "mine"}
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (101, 100, 1)
    rows = answers(client, batch.output_file_id)
    assert list(rows) == [f"line-{number}" for number in range(100)]
    for number in (0, 99):
        response = rows[f"line-{number}"]["response"]
        text = detokenize(generate(digest_of(tokenize(f"Hello {number}")), 8)[0])
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["text"] == text
    errors = answers(client, batch.error_file_id)
    assert errors["line-100"]["response"]["status_code"] == 400
    error = errors["line-100"]["response"]["body"]["error"]
    assert error["code"] == "context_length_exceeded"


def test_lines_that_are_too_long_wait_behind_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr("llmserve.oversize.LARGER_REPLICA_S", math.inf)
    with site(tmp_path) as made:
        made.wait_for_replica()
        client = made.client()
        long = [line(number, max_tokens=1_000_000) for number in range(WINDOW + 1)]
        batch = begin(client, jsonl(*long, line(WINDOW + 1), line(WINDOW + 2)))
        until(
            lambda: client.batches.retrieve(batch.id).request_counts.completed == 2,
            "the short lines are answered",
        )
        client.batches.cancel(batch.id)
        assert ended(client, batch.id).status == "cancelled"


def test_files(gateway):
    client = gateway.client()
    file = upload(client, b"{}\n")
    assert (file.bytes, file.filename, file.purpose) == (3, "in.jsonl", "batch")
    assert client.files.retrieve(file.id) == file
    assert file.id in [each.id for each in client.files.list()]
    assert client.files.content(file.id).content == b"{}\n"
    stranger = gateway.client("bob")
    for call in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
        with pytest.raises(openai.NotFoundError, match=f"You have no file {file.id}"):
            call(file.id)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_batches_are_listed_in_pages_and_are_the_users_own(gateway):
    client = gateway.client()
    names = [ended(client, begin(client, jsonl(line(0))).id).id for _ in range(3)]
    page = client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == names[:0:-1]
    assert page.has_more
    listed = [batch.id for batch in client.batches.list(limit=2)]
    assert [name for name in listed if name in names] == names[::-1]
    with pytest.raises(openai.NotFoundError, match="You have no batch"):
        gateway.client("bob").batches.retrieve(names[0])


def test_a_form_without_a_file_and_a_file_that_is_too_long_are_refused(tmp_path):
    with site(tmp_path, configuration="max_file_bytes = 1024\n" + CONFIGURATION) as made:
        client = made.client()
        with pytest.raises(openai.BadRequestError, match="The form needs a `file` and `purpose`"):
            client.files.create(file=("a", b"{}"), purpose="fine-tune")
        for size in (1025, 200_000):
            with pytest.raises(openai.APIStatusError, match="longer than 1024 bytes") as caught:
                upload(client, b"a" * size)
            assert caught.value.status_code == 413
        answer = made.http().post("/v1/files", content=b"no form")
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "The file has no lines"),
        (jsonl(line(0), b"{"), "Line 2: it is not a request: "),
        (jsonl(b"[]"), "Line 1: it is not a request: "),
        (jsonl(line(0), b"", line(1), line(0)), "Line 4: custom_id 'line-0' is also in line 1"),
        (jsonl({**line(0), "custom_id": ""}), "Line 1: custom_id is empty"),
        (
            jsonl({key: value for key, value in line(0).items() if key != "custom_id"}),
            "Line 1: it is not a request: Object missing required field `custom_id`",
        ),
        (jsonl(line(0, model="gpt")), "Line 1: there is no model 'gpt'; served: simulated"),
        (jsonl(line(0, stream=True)), "Line 1: stream is true"),
        (
            jsonl({**line(0), "url": "/v1/embeddings"}),
            "Line 1: it is POST /v1/embeddings, but the batch is POST /v1/completions",
        ),
    ],
)
def test_a_broken_file_is_refused_with_the_line(content, sentence):
    with pytest.raises(ApiRefusal) as caught:
        read_lines(content, COMPLETIONS, {"simulated"})
    assert caught.value.status == 400
    assert sentence in str(caught.value)


def test_a_refused_batch_is_no_batch(gateway):
    client = gateway.client("operator")
    with pytest.raises(openai.BadRequestError, match="Line 2: it is not a request"):
        begin(client, jsonl(line(0), b"{"))
    with pytest.raises(openai.BadRequestError, match="A batch has no requests to '/v1/embeddings'"):
        client.batches.create(
            input_file_id=upload(client, jsonl(line(0))).id,
            endpoint="/v1/embeddings",
            completion_window="24h",
        )
    with pytest.raises(openai.NotFoundError, match="You have no file file-0"):
        client.batches.create(input_file_id="file-0", endpoint=COMPLETIONS, completion_window="24h")
    assert client.batches.list().data == []


def test_a_cancelled_batch_keeps_its_answers(tmp_path):
    """One line of the first 64 ends, the others are as long as an engine can."""
    long = {"prompt": [1], "max_tokens": 9_000}
    content = jsonl(line(0), *(line(number, **long) for number in range(1, 100)))
    with site(tmp_path, times=EngineTimes(0.01, 0.0, 0.0, 0.0)) as made:
        made.wait_for_replica()
        client = made.client()
        batch = begin(client, content)
        until(
            lambda: client.batches.retrieve(batch.id).request_counts.completed == 1, "one line ends"
        )
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch = ended(client, batch.id)
        assert batch.status == "cancelled"
        assert batch.error_file_id is None
        assert list(answers(client, batch.output_file_id)) == ["line-0"]
        until(lambda: made.running == 0, "the engine computes nothing")
        assert client.batches.cancel(batch.id).status == "cancelled"


def test_batches_of_a_user_without_a_valid_key_are_cancelled(tmp_path):
    """A user with another valid key, and other users, keep theirs; answers stay."""
    long = {"prompt": [1], "max_tokens": 9_000}
    content = jsonl(line(0), *(line(number, **long) for number in range(1, 10)))
    with site(tmp_path, times=EngineTimes(0.01, 0.0, 0.0, 0.0)) as made:
        made.wait_for_replica()
        client = made.client()
        batch = begin(client, content)
        other = begin(made.client("bob"), content)
        until(
            lambda: client.batches.retrieve(batch.id).request_counts.completed == 1, "one line ends"
        )
        made.keys.revoke(made.key().split("-")[1])  # alice has a second one, which is revoked
        assert not made.gateway.access.is_shut_out("alice")
        assert client.batches.retrieve(batch.id).status == "in_progress"
        made.keys.revoke("alice")
        stored = GatewayDatabase(made.configuration.database)
        until(lambda: stored.batch("alice", batch.id).status == CANCELLED, "the batch is cancelled")
        stored.close()
        batch = made.client().batches.retrieve(batch.id)  # with a new key
        assert list(answers(made.client(), batch.output_file_id)) == ["line-0"]
        assert made.client("bob").batches.retrieve(other.id).status == "in_progress"


def test_a_user_who_is_removed_has_no_batches_after_a_restart(tmp_path):
    content = jsonl(*(line(number) for number in range(3)))
    with site(tmp_path, times=SLOW) as made:
        made.wait_for_replica()
        batch = begin(made.client(), content)
        made.stop_gateway()
        users = {name: each for name, each in made.configuration.users.items() if name != "alice"}
        made.configuration = made.configuration.model_copy(update={"users": users})
        made.start_gateway()
        stored = GatewayDatabase(made.configuration.database)
        until(lambda: stored.batch("alice", batch.id).status == CANCELLED, "the batch is cancelled")
        stored.close()


def test_a_restart_of_the_gateway_loses_no_line(tmp_path):
    """The gateway stops in the middle of a batch; the next one answers the rest."""
    content = jsonl(*(line(number, max_tokens=50) for number in range(40)))
    clock = HandClock()
    with site(tmp_path, times=EngineTimes(0.004, 0.0, 0.0, 0.0), clock=clock) as made:
        made.wait_for_replica()
        client = made.client()
        batch = begin(client, content)
        until(lambda: made.running == 8, "as many lines as there are slots run")
        clock.move(0.5)  # they end, and those that follow wait for the clock
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed, "some lines end")
        made.stop_gateway()
        stored = GatewayDatabase(made.configuration.database)
        (before,) = stored.open_batches()
        assert 0 < before.completed < 40
        assert before.failed == 0
        stored.close()
        clock.start()
        made.start_gateway()
        client = made.client()
        after = ended(client, batch.id)
        assert (after.status, after.request_counts.completed) == ("completed", 40)
        assert len(answers(client, after.output_file_id)) == 40


def test_a_batch_waits_for_limits_and_all_its_lines_are_a_backlog(tmp_path):
    configuration = CONFIGURATION + "[limits]\nopen_requests = 1\n"
    with site(tmp_path, configuration=configuration, times=SLOW) as made:
        made.wait_for_replica()
        client, runner = made.client(), made.gateway.runner
        batch = begin(client, jsonl(*(line(number) for number in range(300))))
        until(lambda: made.running == 1, "one line runs")
        assert runner.backlog("simulated") == 300 - 256
        counts = client.batches.retrieve(batch.id).request_counts
        assert (counts.completed, counts.failed) == (0, 0)
        client.batches.cancel(batch.id)
        assert ended(client, batch.id).status == "cancelled"
        assert runner.backlog("simulated") == 0


LINES = [BatchLine(f"line-{number}", COMPLETIONS, "simulated", b"{}") for number in range(3)]


@pytest.fixture
def database(tmp_path):
    made = GatewayDatabase(f"sqlite:///{tmp_path}/gateway.db")
    yield made
    made.close()


def test_the_database_is_private(database, tmp_path):
    assert stat.S_IMODE((tmp_path / "gateway.db").stat().st_mode) == 0o600


def test_a_line_keeps_its_first_answer_and_files_are_in_order(database):
    batch = database.add_batch("alice", "chat", COMPLETIONS, "file-1", "24h", LINES, {})
    database.add_answers(
        [LineAnswer(batch.id, 2, b"c", False), LineAnswer(batch.id, 0, b"a", False)]
    )
    database.add_answers([LineAnswer(batch.id, 0, b"other", True)])
    assert [open_line.custom_id for open_line in database.open_lines(batch.id)] == ["line-1"]
    database.add_answers([LineAnswer(batch.id, 1, b"b", True)])
    database.end_batch(batch.id)
    database.end_batch(batch.id)
    batch = database.batch("alice", batch.id)
    assert (batch.status, batch.completed, batch.failed) == (COMPLETED, 2, 1)
    assert batch.application == "chat"
    assert database.content("alice", batch.output_file) == b"a\nc\n"
    assert database.content("alice", batch.error_file) == b"b\n"
    assert database.content("bob", batch.output_file) is None
    assert len(database.files("alice")) == 2


def test_a_batch_is_cancelled_once(database):
    batch = database.add_batch("alice", "", COMPLETIONS, "file-1", "24h", LINES, {})
    assert database.begin_cancel("bob", batch.id) is None
    assert database.begin_cancel("alice", batch.id).status == CANCELLING
    assert [each.id for each in database.open_batches()] == [batch.id]
    database.end_batch(batch.id)
    assert database.begin_cancel("alice", batch.id).status == CANCELLED
    assert database.batch("alice", batch.id).output_file is None
    assert database.open_batches() == []


def test_a_database_that_cannot_be_used_is_a_sentence(tmp_path):
    for url in (f"sqlite:///{tmp_path}/no/gateway.db", "nosuch://", "nonsense"):
        with pytest.raises(DatabaseError, match="The database of the gateway cannot be used: "):
            GatewayDatabase(url)
