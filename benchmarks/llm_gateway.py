"""Measures the cost of the gateway: the same requests to a simulated engine directly and through
the gateway.

    python -m benchmarks.llm_gateway [--repeats 5] [--streams 16,64] [--tokens 256]
        [--step-s 0.02] [--json]

Engine, gateway and client are separate processes on this machine. The engine computes an iteration
every ``--step-s`` seconds in both cases, so that the difference is the gateway's. Each repeat
measures both, in alternating order:

* ``ttft``: one request at a time, 16 tokens each: the time to the first token.
* ``streams N``: N streams at once of ``--tokens`` tokens each: tokens per second of all, and the
  time between tokens. The processor time of the gateway is shown too: it depends less on other
  load.

The ratio of a repeat compares two successive measurements. The table has the median of the repeats,
the minimum and the maximum.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import end_in_order

from llmserve.gateway.keys import KeyFile  # isort: skip
from llmserve.replay import Endpoint, replay, summarize  # isort: skip
from llmserve.traces import TraceRequest  # isort: skip

START_S = 60.0
"""Maximum time for the answer of a process, seconds."""
TTFT_TARGET_MS, RATE_TARGET = 10.0, 0.97
MODULE = (sys.executable, "-m")
PROBES = 30
"""Number of requests of ``ttft``."""
CONFIGURATION = """
listen = "127.0.0.1:{port}"
[models.simulated]
engines = ["{engine}"]
engine_slots = {slots}
engine_kv_tokens = 1000000
tokenizer = "simulated"
[users.benchmark]
"""


@dataclass(frozen=True)
class Row:
    """One measure, of all repeats."""

    measure: str
    direct: float
    """Median of the repeats."""
    gateway: float
    compared: float
    """Median of the comparisons within each repeat."""
    least: float
    largest: float
    target: str = ""
    met: bool | None = None


def environment() -> dict[str, str]:
    """Return the environment of processes that import what this one imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@contextmanager
def process(command: list[str], url: str, variables: dict[str, str] | None = None) -> Iterator[int]:
    """Run a process that answers at a URL; yield its id.

    Args:
        command: its words.
        url: answers with status 200 when the process is ready.
        variables: its environment; by default :func:`environment`.
    """
    with subprocess.Popen(command, env=variables or environment()) as running:
        try:
            deadline = time.monotonic() + START_S
            while not answers(url):
                if running.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"{command[0]} does not answer at {url}; its output is above.")
                time.sleep(0.1)
            yield running.pid
        finally:
            running.terminate()
            running.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    """Return unused ports of the loopback."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(_listener()) for _ in range(count)]
        return [int(listener.getsockname()[1]) for listener in listeners]


def _listener() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener


def ttft_ms(endpoint: Endpoint) -> float:
    """Return the median of the time to the first token, requests one after another."""
    times = []
    for number in range(PROBES):
        request = TraceRequest(0.0, 64 + number, 16)
        (outcome,) = asyncio.run(replay([request], endpoint))
        if outcome.first_at is None:
            sys.exit(f"A request failed: {outcome.error}")
        times.append((outcome.first_at - outcome.sent_at) * 1000)
    return statistics.median(times)


def streams(endpoint: Endpoint, count: int, tokens: int) -> tuple[float, float]:
    """Return (tokens/s, median time between tokens in ms) of ``count`` simultaneous streams."""
    requests = [TraceRequest(0.0, 64, tokens) for _ in range(count)]
    summary = summarize(asyncio.run(replay(requests, endpoint, math.inf)))
    if summary.answered != count:
        sys.exit(f"Requests failed: {summary.errors}")
    return summary.tokens_per_s, summary.tbt["p50"] * 1000


def rows_of(
    name: str, pairs: list[tuple[float, float]], compare: Callable[[float, float], float], **more
) -> Row:
    """Return the row of a measure.

    Args:
        name: name of the measure.
        pairs: (direct, gateway) of each repeat.
        compare: (direct, gateway) → the compared value.
        more: target, and whether it is met.
    """
    compared = [compare(*pair) for pair in pairs]
    middle = statistics.median(compared)
    meets = more.get("meets")
    return Row(
        name,
        statistics.median(direct for direct, _ in pairs),
        statistics.median(gateway for _, gateway in pairs),
        middle,
        min(compared),
        max(compared),
        more.get("target", ""),
        None if meets is None else meets(middle),
    )


def processor_s(pid: int) -> float:
    """Return the processor time of a process, seconds."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def measure(
    direct: Endpoint, gateway: Endpoint, pid: int, repeats: int, counts: list[int], tokens: int
) -> list[Row]:
    """Measure both, in alternating order. ``pid``: process id of the gateway."""
    request_ms: list[tuple[float, float]] = []
    token_us: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    ttfts: list[tuple[float, float]] = []
    rates: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    tbts: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}

    def both(work, repeat):
        ends = (direct, gateway) if repeat % 2 else (gateway, direct)
        values = {end.url: work(end) for end in ends}
        return values[direct.url], values[gateway.url]

    both(lambda end: streams(end, 4, 16), 0)  # connections, caches and imports
    for repeat in range(repeats):
        began_s = processor_s(pid)
        ttfts.append(both(ttft_ms, repeat))
        request_ms.append((0.0, (processor_s(pid) - began_s) / PROBES * 1000))
        for count in counts:
            began_s = processor_s(pid)
            a, b = both(lambda end, count=count: streams(end, count, tokens), repeat)
            token_us[count].append((0.0, (processor_s(pid) - began_s) / count / tokens * 1e6))
            rates[count].append((a[0], b[0]))
            tbts[count].append((a[1], b[1]))
    rows = [
        rows_of(
            "ttft p50, ms",
            ttfts,
            lambda a, b: b - a,
            target=f"≤ +{TTFT_TARGET_MS:g}",
            meets=lambda value: value <= TTFT_TARGET_MS,
        )
    ]
    rows.append(rows_of("processor time of a request, ms", request_ms, lambda a, b: b))
    for count in counts:
        name = f"{count} streams, processor time of a token, µs"
        rows.append(rows_of(name, token_us[count], lambda a, b: b))
        rows.append(
            rows_of(
                f"{count} streams, tokens/s",
                rates[count],
                lambda a, b: b / a,
                target=f"≥ {RATE_TARGET:g}",
                meets=lambda value: value >= RATE_TARGET,
            )
        )
        rows.append(
            rows_of(f"{count} streams, time between tokens, ms", tbts[count], lambda a, b: b / a)
        )
    return rows


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--streams", default="16,64", help="numbers of streams at once")
    options.add_argument("--tokens", type=int, default=256, help="of each stream")
    options.add_argument("--step-s", type=float, default=0.02, help="of an engine's iteration")
    options.add_argument("--json", action="store_true")
    return options


def main() -> None:
    """Start engine and gateway, measure, print."""
    end_in_order()
    options = parser().parse_args()
    counts = [int(text) for text in options.streams.split(",")]
    load = os.getloadavg()[0]
    engine_port, gateway_port = free_ports(2)
    slots = max(*counts, 4)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = f"127.0.0.1:{engine_port}"
        configuration = folder / "gateway.toml"
        configuration.write_text(
            CONFIGURATION.format(port=gateway_port, engine=engine, slots=slots)
        )
        _, key = KeyFile(folder / "keys.json").add("benchmark")
        words = [*MODULE, "llmserve.simulated_server", "--port", str(engine_port)]
        words += ["--step-s", str(options.step_s), "--slots", str(slots), "--kv-tokens", "1000000"]
        stack.enter_context(process(words, f"http://{engine}/health"))
        words = [*MODULE, "llmserve.cli", "gateway", "--config", str(configuration)]
        url = f"http://127.0.0.1:{gateway_port}"
        pid = stack.enter_context(process(words, f"{url}/health"))
        direct, gateway = (
            Endpoint(f"http://{engine}", "simulated"),
            Endpoint(url, "simulated", (key,)),
        )
        rows = measure(direct, gateway, pid, options.repeats, counts, options.tokens)
    if options.json:
        about = {"options": vars(options), "load": round(load, 1), "cores": os.cpu_count()}
        print(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))
        return
    table = Table(
        title=f"{options.repeats} repeats, load {load:.1f} before, {os.cpu_count()} cores"
    )
    for column in ("measure", "direct", "gateway", "compared", "least", "largest", "target", "met"):
        table.add_column(column)
    for row in rows:
        met = "" if row.met is None else "met" if row.met else "MISSED"
        values = (row.direct, row.gateway, row.compared, row.least, row.largest)
        table.add_row(row.measure, *(f"{value:.3f}" for value in values), row.target, met)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
