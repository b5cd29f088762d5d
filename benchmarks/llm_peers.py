"""Failures that clients see when engines die, through the gateway and through other proxies with
one address.

    python -m benchmarks.llm_peers [--streams 200] [--tokens 1024] [--period 20]
        [--contenders gateway nginx litellm vllm-router] [--litellm PROGRAM]
        [--vllm-router PROGRAM] [--json]

Four simulated engines (10 ms per iteration) at fixed addresses; eight streams are open at a time.
Every ``--period`` seconds one engine is killed (SIGKILL) and started again at the same address; it
answers after five seconds. Contenders, one after another, in front of the same engines:

* **gateway**: ``llmserve gateway``;
* **nginx**: least_conn; another engine is tried as long as no byte of the answer has been sent;
* **litellm**: the proxy of LiteLLM with three retries;
* **vllm-router**: the router of the vLLM project.

``failed``: streams that ended with an error or before their end. ``other text``: streams that ended
with a wrong text. Clients do not retry. ``TTFT`` and ``stall``, the longest wait between two parts,
are of the streams that did not fail. A program that is not installed is skipped, with a message.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks import end_in_order
from benchmarks.llm_gateway import MODULE, answers, environment, free_ports, process

from llmserve.gateway.keys import KeyFile  # isort: skip
from llmserve.replay import percentiles  # isort: skip
from llmserve.simulated_model import detokenize, digest_of, generate, tokenize  # isort: skip

ENGINES, OPEN, SLOTS = 4, 8, 8
STEP_S, LOAD_S = 0.01, 5.0
SILENCE_S = 60.0
"""Time without a part after which a client gives up, seconds."""
GATEWAY = """
listen = "127.0.0.1:{port}"
[models.simulated]
engines = [{engines}]
engine_slots = {slots}
engine_kv_tokens = 1000000
tokenizer = "simulated"
[users.benchmark]
"""
NGINX = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream engines {{
    least_conn;
{engines}
  }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engines;
      proxy_http_version 1.1;
      proxy_buffering off;
      proxy_next_upstream error timeout http_502 http_503 http_504 non_idempotent;
      proxy_read_timeout 300s;
    }}
  }}
}}
"""
LITELLM = """
model_list:
{engines}
router_settings:
  routing_strategy: least-busy
  num_retries: 3
general_settings:
  master_key: {key}
"""
LITELLM_ENGINE = """\
  - model_name: simulated
    litellm_params:
      model: text-completion-openai/simulated
      api_base: http://127.0.0.1:{port}/v1
      api_key: none
"""


# --- engines that are killed ---


class Engines:
    """Simulated engines at fixed ports.

    Args:
        ports: ports of 127.0.0.1.
    """

    def __init__(self, ports: Sequence[int]) -> None:
        self.ports = ports
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.kills = 0

    def start(self, port: int, load_s: float = 0.0) -> None:
        """Start an engine."""
        words = ["llmserve.simulated_server", "--port", str(port), "--load-s", str(load_s)]
        words += ["--step-s", str(STEP_S), "--slots", str(SLOTS), "--kv-tokens", "1000000"]
        self._processes[port] = subprocess.Popen(
            [*MODULE, *words], env=environment(), stderr=subprocess.DEVNULL
        )

    def kill(self, port: int) -> None:
        """Kill an engine (SIGKILL)."""
        process = self._processes.pop(port)
        process.kill()
        process.wait()

    def kill_all(self) -> None:
        """End all engines."""
        for port in list(self._processes):
            self.kill(port)

    async def kill_in_turn(self, period_s: float) -> None:
        """Kill one engine after another, and start it again."""
        while True:
            for port in self.ports:
                await asyncio.sleep(period_s)
                self.kill(port)
                self.kills += 1
                self.start(port, LOAD_S)


# --- contenders ---


@dataclass(frozen=True)
class Contender:
    """A program in front of the engines."""

    command: list[str]
    url: str
    """Its URL without a path."""
    key: str = "none"
    """Bearer token of requests."""
    ready: str = "/v1/models"
    """Path that returns 200 once the program is ready."""


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def gateway(folder: Path, port: int, engines: Sequence[int], program: str) -> Contender:
    """The gateway of this project."""
    addresses = ", ".join(f'"127.0.0.1:{engine}"' for engine in engines)
    configuration = folder / "gateway.toml"
    configuration.write_text(GATEWAY.format(port=port, engines=addresses, slots=SLOTS))
    _, key = KeyFile(folder / "keys.json").add("benchmark")
    words = [program, "-m", "llmserve.cli", "gateway", "--config", str(configuration)]
    return Contender(words, _url(port), key, "/health")


def nginx(folder: Path, port: int, engines: Sequence[int], program: str) -> Contender:
    """nginx as a proxy."""
    lines = "\n".join(
        f"    server 127.0.0.1:{engine} max_fails=1 fail_timeout=2s;" for engine in engines
    )
    configuration = folder / "nginx.conf"
    configuration.write_text(NGINX.format(folder=folder, port=port, engines=lines))
    return Contender([program, "-p", str(folder), "-c", str(configuration)], _url(port))


def litellm(folder: Path, port: int, engines: Sequence[int], program: str) -> Contender:
    """The proxy of LiteLLM."""
    entries = "".join(LITELLM_ENGINE.format(port=engine) for engine in engines)
    key = f"sk-{secrets.token_hex(16)}"
    configuration = folder / "litellm.yaml"
    configuration.write_text(LITELLM.format(engines=entries, key=key))
    words = [program, "--config", str(configuration), "--host", "127.0.0.1", "--port", str(port)]
    return Contender(words, _url(port), key, "/health/liveliness")


def vllm_router(folder: Path, port: int, engines: Sequence[int], program: str) -> Contender:
    """The router of the vLLM project."""
    addresses = [f"http://127.0.0.1:{engine}" for engine in engines]
    words = [program, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *addresses]
    return Contender([*words, "--policy", "round_robin"], _url(port), ready="/health")


CONTENDERS: dict[str, Callable[[Path, int, Sequence[int], str], Contender]] = {
    "gateway": gateway,
    "nginx": nginx,
    "litellm": litellm,
    "vllm-router": vllm_router,
}


def foreign_environment() -> dict[str, str]:
    """Return the environment of programs with packages of their own."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


# --- clients ---


@dataclass
class Seen:
    """The observations of the clients of one contender."""

    failed: int = 0
    other_text: int = 0
    ttft_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    """Kind of error → number of streams."""
    seconds: float = 0.0
    """Time from the first request to the last answer, seconds."""


async def read_stream(
    session: aiohttp.ClientSession, contender: Contender, number: int, tokens: int, seen: Seen
) -> None:
    """Send one request and read its answer."""
    prompt = f"Prompt {number}"
    body = {
        "model": "simulated",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }
    began = last = time.monotonic()
    text, first, stall = "", None, 0.0
    try:
        async with session.post(
            f"{contender.url}/v1/completions",
            json=body,
            headers={"Authorization": f"Bearer {contender.key}"},
        ) as answer:
            answer.raise_for_status()
            async for part in parts(answer):
                now = time.monotonic()
                if first is None:
                    first = now - began
                else:
                    stall = max(stall, now - last)
                last = now
                text += part
    except (aiohttp.ClientError, ConnectionError, TimeoutError, EOFError, ValueError) as error:
        seen.failed += 1
        name = type(error).__name__
        seen.errors[name] = seen.errors.get(name, 0) + 1
        return
    seen.other_text += text != detokenize(generate(digest_of(tokenize(prompt)), tokens)[0])
    seen.ttft_s.append(first or 0.0)
    seen.stall_s.append(stall)


async def parts(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yield the parts of a streamed answer.

    Raises:
        ValueError: an error came instead of a part.
        EOFError: the answer stopped before its end.
    """
    async for line in answer.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ValueError(str(event["error"]))
        yield event["choices"][0].get("text") or "" if event.get("choices") else ""
    raise EOFError("the stream has no end")


@dataclass(frozen=True)
class Row:
    """Return the figures of one contender."""

    contender: str
    streams: int
    kills: int
    failed: int
    other_text: int
    ttft_p50_s: float
    stall_p50_s: float
    stall_p99_s: float
    seconds: float
    errors: dict[str, int]


async def read_all(
    contender: Contender, engines: Engines, streams: int, tokens: int, period_s: float
) -> Seen:
    """Run streams through one contender while engines are killed."""
    seen, numbers = Seen(), iter(range(streams))
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        killer = asyncio.create_task(engines.kill_in_turn(period_s))

        async def one_after_another() -> None:
            for number in numbers:
                await read_stream(session, contender, number, tokens, seen)

        began = time.monotonic()
        await asyncio.gather(*(one_after_another() for _ in range(OPEN)))
        seen.seconds = time.monotonic() - began
        killer.cancel()
        await asyncio.wait([killer])
    return seen


def measure(name: str, program: str, streams: int, tokens: int, period_s: float) -> Row:
    """Return the figures of one contender."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port, *ports = free_ports(1 + ENGINES)
        engines = Engines(ports)
        stack.callback(engines.kill_all)
        for engine in ports:
            engines.start(engine)
        while not all(answers(f"http://127.0.0.1:{engine}/health") for engine in ports):
            time.sleep(0.1)
        contender = CONTENDERS[name](folder, port, ports, program)
        variables = None if name == "gateway" else foreign_environment()
        ready = contender.url + contender.ready
        stack.enter_context(process(contender.command, ready, variables))
        seen = asyncio.run(read_all(contender, engines, streams, tokens, period_s))
    ttft, stall = percentiles(seen.ttft_s), percentiles(seen.stall_s)
    return Row(
        name,
        streams,
        engines.kills,
        seen.failed,
        seen.other_text,
        ttft.get("p50", 0.0),
        stall.get("p50", 0.0),
        stall.get("p99", 0.0),
        seen.seconds,
        seen.errors,
    )


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--streams", type=int, default=200)
    options.add_argument("--tokens", type=int, default=1024, help="of each stream")
    options.add_argument("--period", type=float, default=20.0, help="seconds between two kills")
    options.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    options.add_argument("--litellm", default="litellm", metavar="PROGRAM")
    options.add_argument("--vllm-router", default="vllm-router", metavar="PROGRAM")
    options.add_argument("--json", action="store_true")
    return options


def main() -> None:
    """Measure and print."""
    end_in_order()
    options = parser().parse_args()
    programs = {
        "gateway": sys.executable,
        "nginx": "nginx",
        "litellm": options.litellm,
        "vllm-router": options.vllm_router,
    }
    rows = []
    load = os.getloadavg()[0]
    for name in options.contenders:
        program = shutil.which(programs[name])
        if program is None:
            print(f"{name} is left out: {programs[name]} is not installed.", file=sys.stderr)
            continue
        rows.append(measure(name, program, options.streams, options.tokens, options.period))
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    table = Table(title=f"load {load:.1f} before, {os.cpu_count()} cores")
    for column in (
        *("contender", "streams", "kills", "failed", "other text"),
        *("TTFT p50, s", "stall p50, s", "stall p99, s", "seconds", "errors"),
    ):
        table.add_column(column)
    for row in rows:
        times = (row.ttft_p50_s, row.stall_p50_s, row.stall_p99_s)
        table.add_row(
            row.contender,
            *(str(count) for count in (row.streams, row.kills, row.failed, row.other_text)),
            *(f"{value:.3f}" for value in times),
            f"{row.seconds:.0f}",
            ", ".join(f"{count} {name}" for name, count in row.errors.items()),
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
