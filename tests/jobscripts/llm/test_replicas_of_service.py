"""Replicas as processes of a service: their states, their engine, their front."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import stat
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest
from llmserve import replica_process
from llmserve.credentials import bearer_token
from llmserve.engine_process import LAST_LINES, EngineProcess
from llmserve.engines import PROFILES, engine_command
from llmserve.front import Front, listen
from llmserve.measuring import batch_sizes
from llmserve.replica_client import ReplicaClient
from llmserve.replica_life import LIFE_TRANSITIONS, LifeEvent, may_load
from llmserve.replica_process import EngineNeverLoads, ReplicaOptions, ReplicaProcess
from llmserve.replica_status import ENGINE_ENDED, ReplicaStatus
from llmserve.states import ReplicaState

from malletrain.membership import Member
from tests.integration.embedded import gone
from tests.jobscripts.llm.live import engines, text_of, until_async
from tests.jobscripts.llm.test_live_dispatcher import dispatching, is_running, order, run
from tests.waiting import PATIENCE_S


def test_every_state_but_the_last_knows_what_follows_each_end():
    for state in set(ReplicaState) - {ReplicaState.GONE}:
        assert LIFE_TRANSITIONS[state, LifeEvent.END] is ReplicaState.GONE
        assert (state, LifeEvent.NOTICE) in LIFE_TRANSITIONS
    assert not [row for row in LIFE_TRANSITIONS if row[0] is ReplicaState.GONE]


@pytest.mark.parametrize(
    ("loading", "leaving", "me", "may"),
    [
        ("", "", 0, True),
        ("012", "", 1, True),
        ("012", "", 2, False),
        ("1234", "", 4, False),
        ("1234", "", 1, True),
        ("0123", "0", 2, True),  # one that leaves does not count
    ],
)
def test_loads_are_staggered_in_the_order_of_the_members(loading, leaving, me, may):
    members = [
        Member(
            f"n{number}",
            "",
            "",
            leaves_at=9.0 if str(number) in leaving else None,
            loading=str(number) in loading,
        )
        for number in range(5)
    ]
    assert may_load(members, members[me], 2) is may


def test_the_command_of_an_engine_has_its_fields_filled_in():
    fields = {"socket": "/s", "model": "m", "name": "n", "slots": "4", "kv_tokens": "9"}
    words = engine_command(["run", "--uds={socket}", "{model}", '{"a": {}}'], fields)
    assert words == ["run", "--uds=/s", "m", '{"a": {}}']
    vllm = engine_command(PROFILES["vllm"], {**fields, "python": "python3"})
    assert vllm[:3] == ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    assert {"--uds", "/s", "--served-model-name", "n"} <= set(vllm)
    with pytest.raises(ValueError, match="of an engine needs"):
        engine_command(["run", "{model}"], fields)


def test_throughput_is_measured_at_one_request_and_at_all_slots():
    assert batch_sizes(1) == [1]
    assert batch_sizes(64) == [1, 8, 64]
    assert batch_sizes(100) == [1, 8, 64, 100]


@run
async def test_a_front_asks_for_the_token_and_hands_on(tmp_path):
    token, status = bearer_token(b"k"), ReplicaStatus(state="ready", slots=8)

    async def never() -> str:
        return ""

    async with engines(tmp_path) as [engine]:
        front = Front(token, engine.path, lambda: status, never, lambda: "")
        listener = listen("127.0.0.1", 0)
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await front.start(listener)
        body = {"model": "simulated", "prompt": [1, 2], "max_tokens": 5}
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
            async with session.get(f"{base}/v1/models") as answer:
                assert (await answer.json())["data"][0]["id"] == "simulated"
            async with session.get(f"{base}/replica") as answer:
                assert (await answer.json())["slots"] == 8
            async with session.post(f"{base}/v1/completions", json=body) as answer:
                assert (await answer.json())["usage"]["completion_tokens"] == 5
            async with session.post(f"{base}/v1/completions", json={**body, "n": 2}) as answer:
                assert answer.status == 400
            status.state = "loading"
            async with session.post(f"{base}/v1/completions", json=body) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (503, "loading")
            status.state, status.sentence = "failed", "no memory"
            async with session.post(f"{base}/v1/completions", json=body) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["code"]) == (502, ENGINE_ENDED)
                assert error["message"] == "no memory"
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            async with aiohttp.ClientSession(headers=headers) as session:
                for path in ("/replica", "/health", "/v1/models"):
                    async with session.get(base + path) as answer:
                        assert answer.status == 401
        assert front.running == 0
        await front.close()


@run
async def test_a_replica_loads_serves_and_outlives_its_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    script = str(Path(__file__).with_name("engine_that_stands.py"))
    words = (sys.executable, script, str(tmp_path / "ran"), *PROFILES["simulated"][3:])
    options = ReplicaOptions(words, "simulated", "simulated", 8, 100_000)
    async with ReplicaProcess(options) as replica, dispatching() as live:
        task = asyncio.create_task(replica.run())
        live.add_replica("n1", replica.address)
        request = order("r1", 200)
        stream = live.submit(request)
        await is_running(stream)
        status = replica.status()
        assert status.load_s > 0
        assert sorted(status.tokens_per_s) == [1, 8]
        assert status.token_s == pytest.approx(8 / status.tokens_per_s[8])
        [engine] = [
            process for process in psutil.Process().children() if script in process.cmdline()
        ]
        path = Path(engine.cmdline()[engine.cmdline().index("--socket") + 1])
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        engine.kill()
        result = await stream.result()
        assert (result.text, result.attempts) == (text_of(request), 2)
        assert live.counts().losses == 1
        assert "signal SIGKILL" in replica.sentence
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not path.parent.exists()
    assert replica.state is ReplicaState.GONE


@run
async def test_an_engine_that_answers_but_is_not_well_is_started_again(tmp_path, monkeypatch):
    """The request is not posted to it again and again until it has used its three attempts."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    script = str(Path(__file__).with_name("engine_that_is_not_well.py"))
    words = (sys.executable, script, str(tmp_path / "ran"), *PROFILES["simulated"][3:])
    options = ReplicaOptions(words, "simulated", "simulated", 8, 100_000)
    async with ReplicaProcess(options) as replica, dispatching() as live:
        task = asyncio.create_task(replica.run())
        live.add_replica("n1", replica.address)
        request = order("r1", 900)
        result = await live.submit(request).result()
        assert (result.text, result.attempts) == (text_of(request), 2)
        assert live.counts().losses == 1
        assert replica.sentence.startswith("The engine ended (signal SIGKILL).")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@run
async def test_an_engine_without_requests_is_asked_whether_it_is_well(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(replica_process, "HEALTH_WATCH_S", 0.05)
    script = str(Path(__file__).with_name("engine_that_is_not_well.py"))
    words = (sys.executable, script, str(tmp_path / "ran"), *PROFILES["simulated"][3:])
    options = ReplicaOptions(words, "simulated", "simulated", 8, 100_000)
    async with ReplicaProcess(options) as replica:
        task = asyncio.create_task(replica.run())
        await until_async(lambda: replica.state is ReplicaState.READY, "it has loaded")
        body = {"model": "simulated", "prompt": [1], "max_tokens": 900}
        async with aiohttp.ClientSession() as session:
            url = f"http://{replica.address}/v1/completions"
            async with session.post(url, json=body) as answer:
                assert "EngineCore encountered" in await answer.text()
        await until_async(lambda: "SIGKILL" in replica.sentence, "it is ended")
        await until_async(lambda: replica.state is ReplicaState.READY, "it has loaded again")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@run
async def test_one_answer_that_an_engine_is_not_well_ends_nothing_and_two_in_a_row_end_it(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(replica_process, "HEALTH_WATCH_S", 0.02)
    patient = functools.partialmethod(ReplicaClient.is_healthy, timeout_s=PATIENCE_S)
    monkeypatch.setattr(ReplicaClient, "is_healthy", patient)
    script, log = str(Path(__file__).with_name("engine_with_health.py")), tmp_path / "health"
    statuses = "200,503,200,503,200,503,503"  # the first: it has loaded
    words = (sys.executable, script, str(log), statuses, *PROFILES["simulated"][3:])
    options = ReplicaOptions(words, "simulated", "simulated", 8, 100_000)
    async with ReplicaProcess(options) as replica:
        task = asyncio.create_task(replica.run())
        await until_async(lambda: "SIGKILL" in replica.sentence, "it is ended")
        assert log.read_text().split() == statuses.split(",")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@run
async def test_an_engine_that_is_not_well_while_its_replica_stops_is_no_failure(monkeypatch):
    monkeypatch.setattr("llmserve.engine_process.STOP_S", PATIENCE_S)
    script = str(Path(__file__).with_name("engine_that_ends_slowly.py"))
    options = ReplicaOptions((sys.executable, script, "{socket}"), "m", "m", 1, 10)
    replica = await ReplicaProcess(options).__aenter__()
    task = asyncio.create_task(replica.run())
    await until_async(lambda: replica.state is ReplicaState.READY, "it has loaded")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    closing = asyncio.create_task(replica.__aexit__(None, None, None))
    await until_async(lambda: replica.state is ReplicaState.GONE, "it stops")
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{replica.address}/health") as answer,
    ):
        assert (answer.status, await answer.text()) == (503, "stopping")
    await closing
    assert (replica.state, replica.sentence) == (ReplicaState.GONE, "")


def has_ended(pid: int) -> bool:
    try:
        return gone(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


@run
async def test_the_children_of_an_engine_that_ended_end_too(tmp_path):
    """They hold the memory that its next run needs, and the pipe of its output."""
    child = "import time; time.sleep(3600)"
    script = (
        "import subprocess, sys; "
        f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True); sys.exit(1)"
    )
    engine = EngineProcess([sys.executable, "-c", script], tmp_path / "socket")
    await engine.start()
    sentence = await asyncio.wait_for(engine.wait(), PATIENCE_S)
    pid = int(sentence.splitlines()[-1])
    await until_async(lambda: has_ended(pid), "its child has ended")


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"OMP_NUM_THREADS": "64", "MALLETRAIN_THREADS": "64"}, None),
        ({"OMP_NUM_THREADS": "2"}, "2"),
        ({"OMP_NUM_THREADS": "2", "MALLETRAIN_THREADS": "64"}, "2"),
        ({}, None),
    ],
)
@run
async def test_an_engine_has_only_a_number_of_threads_that_its_user_chose(
    tmp_path, monkeypatch, variables, threads
):
    for name in ("OMP_NUM_THREADS", "MALLETRAIN_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    script = "import os; print(os.environ.get('OMP_NUM_THREADS'))"
    engine = EngineProcess([sys.executable, "-c", script], tmp_path / "socket")
    await engine.start()
    assert (await engine.wait()).splitlines()[-1] == str(threads)


@run
async def test_the_error_of_an_engine_is_named_whatever_it_prints_afterwards(tmp_path):
    """As vLLM prints a hundred lines of tracebacks after the error of an inner process."""
    errors = ["(Worker pid=7) ERROR safetensors.SafetensorError: incomplete metadata"]
    noise = [f"  File {number}" for number in range(LAST_LINES)]
    printed = ["start", "WARNING limits can cause OSError: [Errno 24]", *errors, *noise]
    script = f"import sys; print(*{printed!r}, sep='\\n'); sys.exit(1)"
    engine = EngineProcess([sys.executable, "-c", script], tmp_path / "socket")
    await engine.start()
    assert (await engine.wait()).splitlines() == [
        "The engine ended (exit status 1). Its last errors:",
        *errors,
        "Its last lines:",
        *noise,
    ]


@run
async def test_an_engine_that_never_comes_up_says_its_last_lines(monkeypatch):
    monkeypatch.setattr(replica_process, "RESTART_PAUSE_S", 0.0)
    script = "import sys; print('no memory for', sys.argv[1]); sys.exit(3)"
    command = (sys.executable, "-c", script, "{model}", "{socket}")
    async with ReplicaProcess(ReplicaOptions(command, "m", "m", 1, 10)) as replica:
        with pytest.raises(EngineNeverLoads) as error:
            await replica.run()
        assert str(error.value).splitlines() == [
            "The engine ended (exit status 3). Its last lines:",
            "no memory for m",
        ]
        assert replica.status().sentence == str(error.value)


@run
async def test_a_command_that_cannot_be_run_is_named(monkeypatch):
    monkeypatch.setattr(replica_process, "RESTART_PAUSE_S", 0.0)
    options = ReplicaOptions(("/no/such/engine", "{socket}"), "m", "m", 1, 10)
    async with ReplicaProcess(options) as replica:
        with pytest.raises(EngineNeverLoads, match="/no/such/engine: No such file"):
            await replica.run()


@pytest.mark.slow
@run
async def test_sigterm_ends_a_replica_and_its_engine():
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "llmserve.cli",
        "serve",
        "--model",
        "simulated",
        "--",
        *PROFILES["simulated"],
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    line = await process.stdout.readline()
    assert line.startswith(b"loaded simulated in ")
    [engine] = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
    await until_async(lambda: not engine.is_running(), "the engine has ended")
