"""Batches: what is refused, what is on disk, who dispatches, and one process that answers all."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from llmserve import batch_command, batch_leader
from llmserve.batch_command import BatchSubmission, status_lines, submit_batch
from llmserve.batch_input import BatchInput, BatchInputError
from llmserve.batch_leader import BatchLeader
from llmserve.batch_member import BatchMember, MemberOptions
from llmserve.batch_store import BatchFolder, BatchFolderError, BatchRecord, Manifest
from llmserve.election import SILENCE_S, DispatcherSilence, should_dispatch
from llmserve.engines import PROFILES
from llmserve.live_dispatcher import LiveDispatcher
from llmserve.policies import Fcfs
from llmserve.replica_process import EngineNeverLoads, ReplicaOptions
from llmserve.replicas import Capacity
from llmserve.simulated_model import complete_until, detokenize, digest_of, generate
from llmserve.text import SimulatedTokenizer
from msgspec import Raw

from malletrain.membership import Member
from tests.jobscripts.llm.live import LocalEngine, engines, until_async
from tests.waiting import PATIENCE_S

TOKENIZER = SimulatedTokenizer()


def request(number: int, **changes: object) -> dict:
    body = {"model": "simulated", "prompt": f"Prompt {number}", "max_tokens": 20 + number}
    line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return {**line, **changes}


def written(path: Path, lines: list[object]) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return path


def text_of(number: int) -> str:
    """The text of the answer to request ``number``."""
    return detokenize(generate(digest_of(TOKENIZER.encode(f"Prompt {number}")), 20 + number)[0])


def created(tmp_path: Path, lines: list[object]) -> BatchFolder:
    """The folder of a batch."""
    requests = BatchInput(written(tmp_path / "in.jsonl", lines))
    folder = BatchFolder(tmp_path / "out.jsonl")
    folder.create(
        Manifest(
            input=str(requests.path),
            digest=requests.digest,
            model="simulated",
            name="simulated",
            requests=len(requests),
            created=7,
        )
    )
    requests.close()
    return folder


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"custom_id": ', "Line 2: it is not a request: Input data was truncated"),
        ("[1]", "Line 2: it is not a request: Expected `object`"),
        (
            {"url": "/v1/completions", "body": {}},
            "Line 2: it is not a request: Object missing required field `custom_id`",
        ),
        (request(2, custom_id=""), "Line 2: custom_id is empty"),
        (request(1), "Line 2: custom_id 'c1' is also in line 1"),
        (
            request(2, url="/v1/embeddings"),
            "Line 2: it is POST /v1/embeddings, but the batch is POST /v1/c",
        ),
        (
            request(2, method="GET"),
            "Line 2: it is GET /v1/completions, but the batch is POST /v1/c",
        ),
        (request(2, body={"model": "gpt"}), "Line 2: there is no model 'gpt'; served: simulated"),
        (
            request(2, body={"model": "simulated", "prompt": "a", "stream": True}),
            "Line 2: stream is true",
        ),
        (request(2, body={"model": "simulated"}), "Line 2: The body has no prompt"),
    ],
)
def test_a_wrong_line_is_refused_before_any_node_is_asked_for(
    tmp_path, monkeypatch, line, sentence
):
    monkeypatch.setattr("llmserve.batch_command.Client", lambda: pytest.fail("a node is asked for"))
    path = written(tmp_path / "in.jsonl", [request(1), line, request(3)])
    output = tmp_path / "out.jsonl"
    options = BatchSubmission(path, output, "simulated", "simulated", "simulated", "1:2", "")
    with pytest.raises(BatchInputError) as error:
        submit_batch(options, [])
    assert [x for x in str(error.value).splitlines() if x.startswith("Line")] == [
        x for x in str(error.value).splitlines()[1:] if x.startswith(sentence)
    ]
    assert not BatchFolder(output).path.exists()


def test_requests_that_are_not_there_are_named(tmp_path):
    path = tmp_path / "none.jsonl"
    options = BatchSubmission(path, tmp_path / "out.jsonl", "m", "m", "simulated", "1:2", "")
    with pytest.raises(ValueError, match=f"There is no file {path}; name the file"):
        submit_batch(options, [])


def test_only_so_many_wrong_lines_are_named(tmp_path):
    requests = BatchInput(written(tmp_path / "in.jsonl", ["{}"] * 30))
    with pytest.raises(BatchInputError, match="further lines") as error:
        requests.check(("simulated",), TOKENIZER)
    assert str(error.value).count("Line ") == 20
    with pytest.raises(BatchInputError, match="has no requests"):
        BatchInput(written(tmp_path / "empty.jsonl", [""])).check(("simulated",), TOKENIZER)


def test_lines_are_found_again_and_empty_ones_do_not_count(tmp_path):
    requests = BatchInput(written(tmp_path / "in.jsonl", [request(1), "", request(2)]))
    requests.check(("simulated",), TOKENIZER)
    assert (len(requests), requests.numbers) == (2, [1, 3])
    assert requests.line(1).custom_id == "c2"
    assert requests.line(0).custom_id == "c1"


def test_a_folder_belongs_to_one_input_and_one_model(tmp_path):
    folder = created(tmp_path, [request(1)])
    manifest = folder.manifest()
    assert folder.create(manifest)
    for change, what in (("digest", "input"), ("name", "model")):
        other = Manifest(**{f: getattr(manifest, f) for f in manifest.__struct_fields__})
        setattr(other, change, "other")
        with pytest.raises(BatchFolderError, match=f"of another {what}"):
            folder.create(other)
    (folder.path / "manifest.json").write_text("{}")
    with pytest.raises(BatchFolderError, match="not the folder of a batch"):
        folder.manifest()


def test_an_epoch_has_one_dispatcher_and_the_one_before_writes_no_more(tmp_path):
    folder = created(tmp_path, [request(1)])
    assert folder.newest_epoch() is None
    first = folder.claim("a")
    assert folder.append(first, [BatchRecord(0, ids=[1, 2])])
    original, folder.newest_epoch = folder.newest_epoch, lambda: None
    assert folder.claim("b") is None  # it saw no epoch, and the link is taken
    folder.newest_epoch = original
    second = folder.claim("b")
    assert (first.number, second.number, folder.newest_epoch().owner) == (1, 2, "b")
    assert not folder.append(first, [BatchRecord(0, start=2, ids=[9])])
    assert folder.append(second, [BatchRecord(0, start=2, ids=[3])])
    assert folder.progress().generated == {0: [1, 2, 3]}


def test_what_is_on_disk_is_read_over_all_epochs(tmp_path):
    folder = created(tmp_path, [request(n) for n in range(4)])
    first = folder.claim("a")
    folder.append(
        first,
        [
            BatchRecord(0, answer=Raw(b'{"n": 0}')),
            BatchRecord(1, ids=[1, 2, 3]),
            BatchRecord(2, ids=[5]),
            BatchRecord(3, ids=[7]),
        ],
    )
    folder.append(first, [BatchRecord(1, start=2, ids=[8, 9])])
    segment = folder.path / "segment-000001.jsonl"
    with segment.open("a") as file:
        file.write('{"index":3,"answer":{"n"')  # a write that was cut
    second = folder.claim("b")
    folder.append(second, [BatchRecord(2, error=Raw(b'{"n": 2}'))])
    progress = folder.progress()
    assert (progress.answered, progress.failed) == ({0}, {2})
    assert progress.generated == {1: [1, 2, 8, 9], 3: [7]}
    with pytest.raises(BatchFolderError, match="2 requests of"):
        folder.merge(4)
    folder.append(
        second,
        [
            BatchRecord(3, answer=Raw(b'{"n": 3}')),
            BatchRecord(0, answer=Raw(b'{"n": "again"}')),
            BatchRecord(1, answer=Raw(b'{"n": 1}')),
        ],
    )
    assert folder.merge(4) == (3, 1)
    assert folder.output.read_text() == '{"n": 0}\n{"n": 1}\n{"n": 3}\n'
    assert folder.errors.read_text() == '{"n": 2}\n'


def member(name: str, *, leaving: bool = False) -> Member:
    return Member(name, name, f"{name}:1", leaves_at=1.0 if leaving else None)


@pytest.mark.parametrize(
    ("members", "me", "owner", "dispatches"),
    [
        ("abc", "a", "", True),
        ("abc", "b", "", False),
        ("abc", "a", "a:1", False),
        ("bc", "b", "a:1", True),
        ("bc", "c", "a:1", False),
        ("Abc", "b", "a:1", True),  # a capital leaves
        ("Abc", "a", "a:1", False),
        ("abc", "a", "b:1", False),  # the first came back; the second goes on
        ("AB", "a", "", True),  # all leave: better than nobody
        ("AB", "a", "b:1", False),
        ("", "a", "", False),
    ],
)
def test_the_first_that_stays_dispatches_when_nobody_does(members, me, owner, dispatches):
    view = [member(x.lower(), leaving=x.isupper()) for x in members]
    assert should_dispatch(view, member(me), owner) is dispatches


def test_a_dispatcher_that_stands_still_is_replaced():
    view, silence = [member(name) for name in "abc"], DispatcherSilence()
    assert silence.silent_s((1, 5.0), 100.0) == 0.0
    assert silence.silent_s((1, 5.0), 130.0) == 30.0
    assert not should_dispatch(view, member("b"), "a:1", 30.0)
    silent_s = silence.silent_s((1, 5.0), 100.0 + SILENCE_S)
    assert should_dispatch(view, member("b"), "a:1", silent_s)
    assert not should_dispatch(view, member("c"), "a:1", silent_s)
    assert not should_dispatch(view, member("a"), "a:1", silent_s)
    assert silence.silent_s((2, 5.0), 100.0 + SILENCE_S) == 0.0


def options(folder: BatchFolder, command: tuple[str, ...] = PROFILES["simulated"]) -> MemberOptions:
    replica = ReplicaOptions(command, "simulated", "simulated", 8, 2_000)
    return MemberOptions(folder.output, replica, "simulated", worth=1.0, max_nodes=2)


@pytest.fixture
def importable(monkeypatch):
    """Engines are processes that find llmserve."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def test_one_process_answers_a_batch_and_continues_what_is_saved(tmp_path, importable):
    lines = [request(n) for n in range(30)]
    lines[5]["body"] = {**lines[5]["body"], "max_tokens": 5_000}  # too long: an error of its own
    lines[6]["body"] = {**lines[6]["body"], "n": 2}  # goes whole; the engine refuses it
    lines[7] = {
        "custom_id": "chat",
        "url": "/v1/chat/completions",
        "body": {
            "model": "simulated",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 3,
        },
    }
    folder = created(tmp_path, lines)
    before = folder.claim("somebody else")
    ids = generate(digest_of(TOKENIZER.encode("Prompt 9")), 29)[0]
    ids = ids[: complete_until(ids[:12])]
    done = json.dumps({"custom_id": "c8", "response": "kept"}).encode()
    folder.append(before, [BatchRecord(9, ids=ids), BatchRecord(8, answer=Raw(done))])
    asyncio.run(BatchMember(options(folder)).run())
    assert folder.is_done
    answers = {a["custom_id"]: a for a in map(json.loads, folder.output.read_text().splitlines())}
    assert list(answers) == ["chat" if n == 7 else f"c{n}" for n in range(30) if n not in (5, 6)]
    for number in set(range(30)) - {5, 6, 7, 8}:
        body = answers[f"c{number}"]["response"]["body"]
        assert body["choices"][0]["text"] == text_of(number)
        assert body["usage"]["completion_tokens"] == 20 + number
        assert body["created"] == 7
    assert answers["c8"]["response"] == "kept"
    errors = {e["custom_id"]: e for e in map(json.loads, folder.errors.read_text().splitlines())}
    assert errors["c5"]["error"]["code"] == "context_length_exceeded"
    assert "has no n" in errors["c6"]["error"]["message"]
    status = folder.status()
    assert (status["answered"], status["failed"], status["resumed_tokens"]) == (28, 2, len(ids))
    tokens = 3 + sum(20 + n for n in range(30) if n not in (5, 6, 7, 8))
    assert status["generated_tokens"] == tokens - len(ids)
    text = "\n".join(status_lines(folder.manifest(), status, is_done=True, now=0.0))
    assert text == f"{'█' * 30} 100%  28 of 30 answered, 2 failed, complete"
    asyncio.run(BatchMember(options(folder)).run())  # nothing is left to do
    assert folder.newest_epoch().number == 2


@dataclass
class Group:
    """A service whose members are not those of a daemon."""

    me: Member
    members: tuple[Member, ...] = ()


def test_a_line_that_is_too_long_waits_for_a_larger_replica_behind_all_others(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("llmserve.oversize.LARGER_REPLICA_S", math.inf)
    long = {"model": "simulated", "prompt": "Prompt", "max_tokens": 300}
    lines = [request(n, body=long) if n < 3 else request(n) for n in range(30)]
    folder = created(tmp_path, lines)
    requests = BatchInput(tmp_path / "in.jsonl")

    async def answer_all() -> None:
        async with (
            engines(tmp_path, kv_tokens=100) as [small],
            LiveDispatcher(Fcfs(), TOKENIZER, "simulated") as live,
        ):
            epoch, group = folder.claim("n1:1"), Group(member("n1"))
            leader = BatchLeader(folder, epoch, folder.manifest(), requests, live, group)
            task = asyncio.create_task(leader.run(lambda: False))
            live.add_replica("n1", small.address, small.capacity)
            await until_async(lambda: folder.status().get("answered") == 27, "short lines")
            assert folder.status()["failed"] == 0
            large = LocalEngine(tmp_path / "large", Capacity(8, 1_000))
            await large.start()
            live.add_replica("n2", large.address, large.capacity)
            assert await task
            await large.lose()

    asyncio.run(answer_all())
    assert (folder.status()["answered"], folder.status()["failed"]) == (30, 0)
    assert [json.loads(x)["custom_id"] for x in folder.output.read_text().splitlines()] == [
        f"c{n}" for n in range(30)
    ]


def test_a_process_that_is_ended_saves_what_it_has(tmp_path, importable):
    folder = created(tmp_path, [request(1, body={**request(1)["body"], "max_tokens": 1_000})])

    async def cut() -> None:
        slow = (*PROFILES["simulated"], "--step-s", "0.05")
        task = asyncio.create_task(BatchMember(options(folder, slow)).run())
        await until_async(lambda: folder.status().get("generated_tokens", 0) > 5, "it runs")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cut())
    [ids] = folder.progress().generated.values()
    assert 0 < len(ids) < 1_000
    asyncio.run(BatchMember(options(folder)).run())
    [answer] = map(json.loads, folder.output.read_text().splitlines())
    prompt = TOKENIZER.encode("Prompt 1")
    text = detokenize(generate(digest_of(prompt), 1_000)[0])
    assert answer["response"]["body"]["choices"][0]["text"] == text
    assert folder.status()["generated_tokens"] == 1_000 - len(ids)
    assert folder.newest_epoch().number == 2


def test_what_is_on_its_way_to_the_disk_is_saved_when_the_process_ends(tmp_path, importable):
    folder = created(tmp_path, [request(1, body={**request(1)["body"], "max_tokens": 1_000})])
    ended, write = threading.Event(), BatchFolder.write_status

    async def cut() -> None:
        slow = (*PROFILES["simulated"], "--step-s", "0.05")
        task = asyncio.create_task(BatchMember(options(folder, slow)).run())
        loop = asyncio.get_running_loop()

        def write_and_end(of: BatchFolder, status: dict) -> None:
            write(of, status)
            if status["generated_tokens"] > 5 and not ended.is_set():
                loop.call_soon_threadsafe(task.cancel)
                assert ended.wait(PATIENCE_S)  # cancelled while it waits for this

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BatchFolder, "write_status", write_and_end)
            patch.setattr(batch_leader, "SAVE_S", 0.0)  # ids are saved whenever the status is
            patch.setattr(batch_leader, "STATUS_S", 0.0)
            await asyncio.gather(task, return_exceptions=True)
            ended.set()

    asyncio.run(cut())
    [ids] = folder.progress().generated.values()
    assert len(ids) >= folder.status()["generated_tokens"] > 5


def test_a_changed_input_stops_a_batch(tmp_path, importable):
    folder = created(tmp_path, [request(1)])
    written(tmp_path / "in.jsonl", [request(2)])
    with pytest.raises(BatchFolderError, match="has changed since"):
        asyncio.run(BatchMember(options(folder)).run())
    with pytest.raises(BatchFolderError, match="submit it first"):
        BatchMember(options(BatchFolder(tmp_path / "other.jsonl")))


def test_status_shows_why_the_engine_did_not_start(tmp_path, importable):
    folder = created(tmp_path, [request(1)])
    engine = ("sh", "-c", "echo No module named uvicorn; exit 3 # {socket}")
    with pytest.raises(EngineNeverLoads):
        asyncio.run(BatchMember(options(folder, engine)).run())
    text = "\n".join(status_lines(folder.manifest(), folder.status(), is_done=False, now=0.0))
    assert "The engine ended (exit status 3). Its last lines:" in text
    assert "    No module named uvicorn" in text


@pytest.mark.parametrize("follow", [False, True])
def test_status_fails_if_the_job_has_ended_before_the_batch(tmp_path, monkeypatch, capsys, follow):
    folder = created(tmp_path, [request(n) for n in range(4)])
    folder.set_job("j3")
    monkeypatch.setattr(batch_command, "_end_of", lambda job: "failed")
    assert batch_command.show_status(folder.output, follow=follow) == 1
    printed = capsys.readouterr()
    assert "Job j3 has ended (failed)" in (printed.err if follow else printed.out)


def test_status_says_what_is_wrong(tmp_path):
    manifest = created(tmp_path, [request(n) for n in range(4)]).manifest()
    assert status_lines(manifest, {}, is_done=False, now=0.0, ended=batch_command.NOT_SUBMITTED)[
        1:
    ] == ["It has no job. If it is not being submitted now, give the same command again."]
    manifest.job = "j3"
    [bar, sentence] = status_lines(manifest, {}, is_done=False, now=0.0)
    assert bar.startswith("░" * 30 + "   0%  0 of 4 answered, 0 running")
    assert sentence == "Job j3 has no node yet."
    replica = {"name": "n1", "state": "failed", "running": 0, "slots": 8, "load_s": None}
    status = {
        "answered": 1,
        "failed": 1,
        "running": 2,
        "at": 90.0,
        "seconds": 2.0,
        "generated_tokens": 5000,
        "dispatcher": "n1",
        "epoch": 3,
        "replicas": [{**replica, "sentence": "The engine ended.\nno memory"}],
    }
    assert status_lines(manifest, status, is_done=False, now=100.0) == [
        "█" * 15 + "░" * 15 + "  50%  1 of 4 answered, 1 failed, 2 running",
        "job j3, dispatcher n1, epoch 3, 2,500 tokens/s",
        "  n1: failed, 0 of 8 slots",
        "    The engine ended.",
        "    no memory",
    ]
    status["replicas"].append({**replica, "name": "n2", "state": "ready"})
    assert status_lines(manifest, status, is_done=False, now=190.0)[2:] == [
        "No node has dispatched for 100 s. To see whether the job has nodes run: "
        "malletrain show j3",
        "  n1: failed, 0 of 8 slots",
        "    The engine ended.",
        "    no memory",
    ]
    lines = status_lines(manifest, status, is_done=False, now=91.0, ended="failed")
    assert lines[1] == (
        "Job j3 has ended (failed) before the batch was complete. For the reason run: malletrain "
        "show j3. Answers are kept: to continue, run the same command again."
    )
    assert lines[3:] == ["  n1: failed, 0 of 8 slots", "    The engine ended.", "    no memory"]
    assert status_lines(manifest, {}, is_done=False, now=0.0, ended="cancelled")[1:] == [
        "Job j3 has ended (cancelled) before the batch was complete. For the reason run: "
        "malletrain show j3. Answers are kept: to continue, run the same command again."
    ]
