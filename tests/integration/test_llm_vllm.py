"""Real vLLM on the processor, as users have it: a gateway in front of a service on a whole site,
whose engines are killed in the middle of streams, and a batch that loses nodes and its dispatcher.

The model is a random one (``tests/jobscripts/llm/random_llama.py``) in float32; all answers are
greedy, so each must be that of an undisturbed engine. ``make vllm`` makes the environment.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from llmserve.batch_store import BatchFolder
from llmserve.cli import main
from llmserve.engine_cache import cache_tokens
from llmserve.gateway.keys import KeyFile
from llmserve.model_tokenizer import INCOMPLETE, ModelTokenizer

from malletrain import Client
from tests.integration.embedded import Site, site
from tests.integration.test_llm_batch import dispatcher
from tests.jobscripts.llm.gateways import metric, running
from tests.jobscripts.llm.random_llama import write_model
from tests.jobscripts.llm.vllm_environment import ENVIRONMENT, OPTIONS, vllm
from tests.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

SERVE = Path(__file__).parents[2] / "jobscripts" / "llm" / "serve.py"
SLOTS = 8
FIELDS: dict[str, Any] = {"model": "llama", "temperature": 0}
PROMPT = "The scheduler starts a job on"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The folder of the model."""
    vllm()
    folder = tmp_path_factory.mktemp("model") / "llama"
    write_model(folder)
    return folder


class UnixConnection(http.client.HTTPConnection):
    """HTTP to a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


@dataclass
class Engine:
    """One vLLM on this machine, without llmserve in between."""

    server: psutil.Process
    """The process that llmserve started."""

    @property
    def core(self) -> psutil.Process:
        """The process that computes, or distributes what is computed."""
        [core] = [p for p in self.server.children() if "EngineCore" in p.name() + p.cmdline()[0]]
        return core

    def ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        """The text of an answer."""
        words = self.server.cmdline()
        connection = UnixConnection(Path(words[words.index("--uds") + 1]))
        with contextlib.closing(connection):
            text = None if body is None else json.dumps(body)
            method = "GET" if body is None else "POST"
            connection.request(method, path, text, {"Content-Type": "application/json"})
            return connection.getresponse().read().decode()

    def metric(self, name: str) -> float:
        """The sum of the values of a metric."""
        values = re.findall(rf"^{name}\{{.*\}} (\S+)$", self.ask("/metrics"), re.MULTILINE)
        return sum(map(float, values))


def engines_below(process: psutil.Process) -> list[Engine]:
    """All vLLMs among the descendants of a process."""
    engines = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "vllm.entrypoints.openai.api_server" in child.cmdline():
                engines.append(Engine(child))
    return engines


def engines_that_answer(made: Site) -> list[Engine]:
    """The vLLMs of a site that do not load any more."""
    engines = []
    for engine in engines_below(psutil.Process(made.cluster.pid)):
        with contextlib.suppress(OSError, psutil.Error):
            engine.ask("/health")
            engines.append(engine)
    return engines


# --- a batch ---

LINES, TOKENS = 30, 300


def body_of(number: int) -> dict[str, Any]:
    """The body of a request of the batch."""
    return {**FIELDS, "prompt": f"{PROMPT} {number}", "max_tokens": TOKENS, "ignore_eos": True}


def write_requests(path: Path) -> None:
    with path.open("w") as file:
        for number in range(LINES):
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps({**line, "body": body_of(number)}) + "\n")


def batch_words(model: Path, source: Path, output: Path) -> list[str]:
    environment = [f"--env={name}={value}" for name, value in ENVIRONMENT.items()]
    words = ["batch", "--model", str(model), "--served-name", "llama", "--engine", "vllm"]
    words += ["--nodes", "1:2", "--slots", "4", "--venv", str(vllm()), *environment]
    return [*words, str(source), str(output), "--", *OPTIONS]


def test_a_batch_outlives_a_node_and_its_dispatcher(tmp_path, monkeypatch, capsys, model):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(source)
    folder = BatchFolder(output)
    with site(tmp_path / "site", nodes=2) as s:
        monkeypatch.setenv("MALLETRAIN_STATE_DIR", str(s.state))
        assert main(batch_words(model, source, output)) == 0
        job = folder.manifest().job

        def ready() -> set[str]:
            replicas = folder.status().get("replicas", ())
            return {r["name"] for r in replicas if r["state"] == "ready"}

        s.until(lambda: len(ready()) == 2 or folder.is_done, "two nodes answer")
        assert not folder.is_done, "the batch is too short for this machine"
        first = folder.status()["dispatcher"]
        other = next(name for name in ready() if name != first)
        s.agents()[other].kill()
        dispatcher(s, folder, job).kill()
        s.until(lambda: folder.newest_epoch().number >= 2, "a process dispatches again")
        s.until(lambda: ready() or folder.is_done, "a node answers again")
        # With the batch beside it: no answer depends on what else the engine computes.
        s.until(lambda: engines_that_answer(s), "an engine answers")
        engine = engines_that_answer(s)[0]
        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(engine.ask, "/v1/completions", body_of(n)) for n in range(4)]
            undisturbed = [json.loads(each.result())["choices"][0]["text"] for each in futures]
        s.until_state(job, "completed")
        assert main(["status", str(output)]) == 0
        assert f"{LINES} of {LINES} answered, complete" in capsys.readouterr().out
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"c{n}" for n in range(LINES)]
    texts = [line["response"]["body"]["choices"][0]["text"] for line in lines]
    assert texts[: len(undisturbed)] == undisturbed
    assert not folder.errors.exists()


def test_the_error_of_an_engine_that_does_not_start_is_in_the_status(
    tmp_path, monkeypatch, capsys, model
):
    """vLLM names it in an inner process, and prints a hundred lines of tracebacks afterwards."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        content = file.read_bytes()
        half = len(content) // 2
        (broken / file.name).write_bytes(content[:half] if "safetensors" in file.name else content)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(source)
    folder = BatchFolder(output)
    with site(tmp_path / "site", nodes=1) as s:
        monkeypatch.setenv("MALLETRAIN_STATE_DIR", str(s.state))
        assert main(batch_words(broken, source, output)) == 0

        def sentences() -> str:
            return "".join(r["sentence"] for r in folder.status().get("replicas", ()))

        s.until(lambda: "The engine ended" in sentences(), "the engine has ended")
        assert main(["status", str(output)]) == 0
        shown = capsys.readouterr().out
        assert "SafetensorError: Error while deserializing header" in shown
        with Client(s.state) as client:
            client.cancel(folder.manifest().job)
        s.until_state(folder.manifest().job, "cancelled")


# --- a gateway ---


@dataclass
class Served:
    """A service with vLLM and a gateway."""

    site: Site
    job: str
    client: openai.OpenAI

    def engines(self) -> list[Engine]:
        """Its engines."""
        return engines_below(psutil.Process(self.site.cluster.pid))

    def ready(self) -> int:
        """Number of replicas that have loaded."""
        with Client(self.site.state) as client:
            return sum(not member.loading for member in client.members(self.job).members)

    def direct(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """An answer of an engine itself."""
        for engine in self.engines():
            with contextlib.suppress(OSError):
                answer: dict[str, Any] = json.loads(engine.ask(path, {**FIELDS, **body}))
                return answer
        raise AssertionError("no engine answers")

    def answering(self) -> Engine:
        """The engine that has a request now."""
        engines: list[Engine] = []

        def look() -> bool:
            for engine in self.engines():
                with contextlib.suppress(OSError):
                    if engine.metric("vllm:num_requests_running"):
                        engines.append(engine)
            return bool(engines)

        until(look, "an engine has the request", 0.1)
        return engines[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory, model) -> Iterator[Served]:
    """Two nodes with vLLM behind a gateway."""
    environment = vllm()
    with site(tmp_path_factory.mktemp("site"), nodes=2) as s, Client(s.state) as client:
        worth = s.script("value.csv", "nodes,value\n1,1\n2,2\n")
        job = client.submit(
            SERVE,
            [
                *("--model", str(model), "--served-name", "llama", "--engine", "vllm"),
                *("--slots", str(SLOTS), "--", *OPTIONS),
                *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            ],
            service=True,
            value=str(worth),
            nodes="2:2",
            start_cost="auto",
            workdir=s.work,
            venv=str(environment),
            env=ENVIRONMENT,
        ).id
        configuration = s.work / "gateway.toml"
        configuration.write_text(
            'listen = "127.0.0.1:0"\nmetrics_for = ["alice"]\n[users.alice]\n'
            f'[models.llama]\njob = "{job}"\ntokenizer = "{model}"\n'
            "[scaling]\nidle_s = 36000\nmax_nodes = 2\n"
        )
        _, key = KeyFile(s.work / "keys.json").add("alice")
        with running(configuration, key, "--state-dir", str(s.state)) as (_, user):
            made = Served(s, job, user)
            s.until(lambda: made.ready() == 2, "both replicas have loaded")
            yield made
        client.cancel(job)
        s.until_state(job, "cancelled")
        s.until(lambda: not made.engines(), "no engine is left")


def test_an_answer_is_that_of_vllm_itself(served):
    fields = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}
    own = served.direct("/v1/completions", fields)["choices"][0]
    answer = served.client.completions.create(
        **FIELDS, prompt=PROMPT, max_tokens=60, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text.rstrip(INCOMPLETE) == own["text"].rstrip(INCOMPLETE)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 60
    parts = served.client.completions.create(
        **FIELDS, prompt=PROMPT, max_tokens=60, extra_body={"ignore_eos": True}, stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == answer.choices[0].text


def test_a_chat_is_that_of_vllm_itself(served):
    messages = [{"role": "user", "content": "Which nodes are idle?"}]
    own = served.direct("/v1/chat/completions", {"messages": messages, "max_tokens": 40})
    fields = {**FIELDS, "messages": messages, "max_tokens": 40}
    answer = served.client.chat.completions.create(**fields)
    # At the end vLLM drops bytes that are no whole character.
    whole = answer.choices[0].message.content.rstrip(INCOMPLETE)
    assert whole == own["choices"][0]["message"]["content"]
    assert answer.choices[0].finish_reason == own["choices"][0]["finish_reason"]
    assert answer.usage.prompt_tokens == own["usage"]["prompt_tokens"]
    parts = list(served.client.chat.completions.create(**fields, stream=True))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == answer.choices[0].message.content


def test_ids_of_tokens_are_those_of_vllm_itself(served, model):
    fields = {"prompt": PROMPT, "max_tokens": 30, "return_token_ids": True, "ignore_eos": True}
    own = served.direct("/v1/completions", fields)["choices"][0]
    extra = {"return_token_ids": True, "ignore_eos": True}
    answer = served.client.completions.create(
        **FIELDS, prompt=PROMPT, max_tokens=30, extra_body=extra
    )
    assert answer.choices[0].token_ids == own["token_ids"]
    assert own["prompt_token_ids"] == ModelTokenizer(model).encode(PROMPT)


def test_several_choices_with_their_logprobs(served):
    fields = {**FIELDS, "prompt": PROMPT, "max_tokens": 5, "n": 2, "logprobs": 2}
    fields["temperature"] = 1.0
    answer = served.client.completions.create(**fields, seed=7)
    assert [len(choice.logprobs.tokens) for choice in answer.choices] == [5, 5]
    assert answer.usage.completion_tokens == 10
    options = {"include_usage": True}
    *parts, last = served.client.completions.create(
        **fields, seed=7, stream=True, stream_options=options
    )
    assert [part.choices[0].text for part in parts] == [c.text for c in answer.choices]
    assert last.usage.completion_tokens == 10


def test_a_chat_without_max_tokens_ends_at_the_default_whatever_it_asks_for(served):
    answer = served.client.chat.completions.create(
        **FIELDS,
        messages=[{"role": "user", "content": "Hello"}],
        logprobs=True,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.completion_tokens == 256


def test_a_tool_is_called(served):
    """With what arguments a random model calls it is its own affair."""
    fields = {**FIELDS, "messages": [{"role": "user", "content": "Add"}], "max_tokens": 400}
    fields |= {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}
    answer = served.client.chat.completions.create(**fields)
    [call] = answer.choices[0].message.tool_calls
    own = served.direct("/v1/chat/completions", fields)["choices"][0]["message"]["tool_calls"][0]
    assert (call.function.name, call.function.arguments) == ("add", own["function"]["arguments"])
    *parts, last = served.client.chat.completions.create(**fields, stream=True)
    [streamed] = [part.choices[0].delta.tool_calls for part in [*parts, last]]
    assert streamed[0].function.arguments == call.function.arguments


def test_a_stop_string_ends_an_answer_and_is_no_part_of_it(served):
    fields = {**FIELDS, "prompt": PROMPT, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    text = served.client.completions.create(**fields).choices[0].text
    stop = text[40:46]
    answer = served.client.completions.create(**fields, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_what_vllm_refuses_is_the_client_s_error(served):
    long = {**FIELDS, "prompt": "word " * 3000, "max_tokens": 10}
    with pytest.raises(openai.BadRequestError, match="2048"):
        served.client.completions.create(**long)
    with pytest.raises(openai.BadRequestError, match="out of vocabulary"):
        served.client.completions.create(**{**long, "prompt": [1, 9999]})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        served.client.completions.create(**{**long, "prompt": PROMPT, "temperature": -1})


def test_a_replica_says_what_the_cache_of_vllm_holds(served):
    [tokens, *more] = [cache_tokens(engine.ask("/metrics"), SLOTS) for engine in served.engines()]
    assert more == [tokens]
    log = main_output(["logs", served.job, "--service"], served.site)
    assert set(re.findall(r"maximum tokens of concurrent requests: (\d+)", log)) == {str(tokens)}


def main_output(words: list[str], s: Site) -> str:
    """What ``malletrain`` prints."""
    command = [sys.executable, "-m", "malletrain", *words]
    environment = {**os.environ, "MALLETRAIN_STATE_DIR": str(s.state)}
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_a_client_that_is_gone_frees_the_engine(served):
    stream = served.client.completions.create(
        **FIELDS, prompt=PROMPT, max_tokens=1900, extra_body={"ignore_eos": True}, stream=True
    )
    next(iter(stream))
    engine = served.answering()
    before = engine.metric("vllm:generation_tokens_total")
    stream.close()
    until(lambda: not engine.metric("vllm:num_requests_running"), "it computes no more", 0.1)
    assert engine.metric("vllm:generation_tokens_total") < before + 1800


@pytest.mark.parametrize("process", ["core", "server"])
def test_streams_outlive_an_engine_that_is_killed(served, process):
    """The third engine process, vLLM's worker, ends with the core."""
    served.site.until(lambda: served.ready() == 2, "both replicas have loaded")
    prompts = [f"{PROMPT} node {number}" for number in range(4)]
    fields = {**FIELDS, "max_tokens": 1000, "extra_body": {"ignore_eos": True}}  # seconds

    def text_of(prompt: str) -> str:
        return served.client.completions.create(**fields, prompt=prompt).choices[0].text

    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = list(pool.map(text_of, prompts))
    moves = metric(served.client, "llmserve_moves_total")
    streams = [
        iter(served.client.completions.create(**fields, prompt=prompt, stream=True))
        for prompt in prompts
    ]
    begun = [next(stream).choices[0].text for stream in streams]
    engine = served.answering()
    victim = engine.core if process == "core" else engine.server
    processes = [engine.server, *engine.server.children(recursive=True)]
    victim.kill()
    seen = [""] * len(streams)

    def read(number: int) -> None:
        seen[number] = begun[number] + "".join(p.choices[0].text for p in streams[number])

    readers = [threading.Thread(target=read, args=(n,)) for n in range(len(streams))]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert seen == texts
    assert metric(served.client, "llmserve_moves_total") > moves, "no stream was cut"
    psutil.wait_procs(processes, timeout=60)
    assert not [each for each in processes if each.is_running() and each.status() != "zombie"]
