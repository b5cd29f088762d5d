"""LLM inference on nodes that leave, with real processes: streams over replicas that are killed,
and a batch on an embedded cluster.

    python -m benchmarks.llm [--items losses,notice,batch] [--streams 200] [--tokens 1024]
    [--period 20] [--requests 2000] [--nodes 4] [--json]

The engines are simulated ones on the real clock (10 ms an iteration); all else is the product.

* ``losses``: streams, eight at a time, on four replicas; every ``--period`` one is killed by -9 and
  started again. The dispatcher finds out by itself. A stall is the longest wait between two parts
  of a stream that was disturbed.
* ``notice``: the same with a notice of five seconds before each kill.
* ``batch``: a batch of ``--requests`` on ``--nodes`` nodes, of which an agent, the daemon and the
  process that dispatches are killed by -9, one after another, every ``--period``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import end_in_order
from tests.integration.embedded import LIMITS, Site

from llmserve.batch_store import BatchFolder  # isort: skip
from llmserve.engines import PROFILES  # isort: skip
from llmserve.generation import GenerationRequest  # isort: skip
from llmserve.live_dispatcher import LiveDispatcher  # isort: skip
from llmserve.policies import Fcfs  # isort: skip
from llmserve.simulated_model import detokenize, digest_of, generate, tokenize  # isort: skip
from llmserve.states import RequestState  # isort: skip
from llmserve.text import SimulatedTokenizer  # isort: skip

HOME = Path(__file__).resolve().parents[1] / "jobscripts" / "llm"
REPLICAS, OPEN, SLOTS = 4, 8, 8
NOTICE_S = 5.0
STEP_S, LOAD_S = 0.01, 5.0
ENGINE = (*PROFILES["simulated"], "--step-s", str(STEP_S))
ITEMS = ("losses", "notice", "batch")


@dataclass(frozen=True)
class Measure:
    """One measured number, and its target."""

    item: str
    measure: str
    value: float
    target: str = ""
    """Target; empty: the number is shown for comparison."""
    is_met: bool | None = None


# --- streams over replicas that are killed ---


class ReplicaProcesses:
    """Starts replicas as ``llmserve serve`` does, without a daemon.

    Args:
        live: the dispatcher that gets them.
    """

    def __init__(self, live: LiveDispatcher) -> None:
        self._live = live
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str, load_s: float = 0.0) -> None:
        """Start a replica, and add it to the dispatcher when it has loaded."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "llmserve.cli", "serve", "--model", "simulated"),
            *("--slots", str(SLOTS), "--", *ENGINE, "--load-s", str(load_s)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HOME), *sys.path])},
        )
        self._processes[name] = process
        assert process.stdout is not None
        line = await process.stdout.readline()
        if line and process is self._processes.get(name):
            self._live.remove_replica(name)
            self._live.add_replica(name, line.decode().split()[-1])

    async def kill(self, name: str) -> None:
        """Kill a replica: its front and its engine end at once. The dispatcher is not notified."""
        process = self._processes.pop(name)
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        await process.wait()

    async def close(self) -> None:
        """Kill all replicas."""
        for name in list(self._processes):
            await self.kill(name)


@dataclass
class StreamRecords:
    """The observations of the clients of all streams."""

    failed: int = 0
    different: int = 0
    """Number of streams whose text differs from the undisturbed answer."""
    stalls_s: list[float] = field(default_factory=list)
    """Longest waits of streams that were disturbed."""


async def read_streams(live: LiveDispatcher, streams: int, tokens: int) -> StreamRecords:
    """Run ``count`` streams, :data:`OPEN` at a time."""
    records, numbers = StreamRecords(), iter(range(streams))

    async def one_after_another() -> None:
        for number in numbers:
            prompt = tokenize(f"Prompt {number}")
            request = GenerationRequest(f"r{number}", "user", prompt, tokens, stream=True)
            stream, text, stall, last = live.submit(request), [], 0.0, None
            async for part in stream:
                now = time.monotonic()
                stall, last = max(stall, now - last if last is not None else 0.0), now
                text.append(part.text)
            result = await stream.result()
            records.failed += result.state is not RequestState.DONE
            whole = detokenize(generate(digest_of(prompt), tokens)[0])
            records.different += "".join(text) != whole
            if result.attempts > 1:
                records.stalls_s.append(stall)

    await asyncio.gather(*(one_after_another() for _ in range(OPEN)))
    return records


async def streams_case(item: str, streams: int, tokens: int, period_s: float) -> list[Measure]:
    """Run streams while replicas are killed one after another."""
    async with LiveDispatcher(Fcfs(), SimulatedTokenizer(), "simulated") as live:
        replicas = ReplicaProcesses(live)
        names = [f"n{number}" for number in range(REPLICAS)]
        await asyncio.gather(*(replicas.start(name) for name in names))
        kills = 0

        async def kill_in_turn() -> None:
            nonlocal kills
            while True:
                for name in names:
                    await asyncio.sleep(period_s - (NOTICE_S if item == "notice" else 0.0))
                    if item == "notice":
                        live.notice(name, NOTICE_S)
                        await asyncio.sleep(NOTICE_S)
                    await replicas.kill(name)
                    kills += 1
                    starts.append(asyncio.create_task(replicas.start(name, LOAD_S)))

        starts: list[asyncio.Task[None]] = []
        killer = asyncio.create_task(kill_in_turn())
        try:
            records = await read_streams(live, streams, tokens)
        finally:
            killer.cancel()
            await asyncio.gather(killer, return_exceptions=True)
            await replicas.close()
            await asyncio.gather(*starts, return_exceptions=True)
        counts = live.counts()
    stalls = sorted(records.stalls_s) or [0.0]
    p50, p99 = statistics.median(stalls), stalls[math.ceil(0.99 * len(stalls)) - 1]
    again = counts.repeated_tokens / max(1, counts.generated_tokens)
    rows = [
        Measure(item, "replicas killed", kills),
        Measure(item, "streams", streams),
        Measure(item, "streams failed", records.failed, "0", records.failed == 0),
        Measure(item, "streams of other text", records.different, "0", records.different == 0),
        Measure(item, "streams disturbed", len(records.stalls_s)),
    ]
    if item == "losses":
        rows.append(Measure(item, "stall p50, s (detection included)", p50, "<= 1", p50 <= 1.0))
        rows.append(Measure(item, "stall p99, s", p99))
    else:
        rows.append(Measure(item, "stall p99, s", p99, "<= 1", p99 <= 1.0))
        rows.append(Measure(item, "tokens generated again", again, "<= 0.02", again <= 0.02))
    return rows


# --- a batch on an embedded cluster ---


def batch_lines(requests: int) -> Iterator[tuple[str, int]]:
    """Return (prompt, tokens) of each request: 50 to 450 tokens."""
    for number in range(requests):
        yield f"Prompt {number}", 50 + 100 * (number % 5)


def write_batch(path: Path, requests: int) -> None:
    """Write the input."""
    with path.open("w") as file:
        for number, (prompt, tokens) in enumerate(batch_lines(requests)):
            body = {"model": "simulated", "prompt": prompt, "max_tokens": tokens}
            line = {"custom_id": f"c{number}", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


class BatchSite(Site):
    """Return a site whose jobs are not given up because many of their processes are killed."""

    limits = LIMITS.replace("max_tries = 2", "max_tries = 1000")


class BatchFaults:
    """Kills one process after another until the batch is complete.

    Args:
        running: the site.
        folder: folder of the batch.
        job: id of its job.
    """

    def __init__(self, running: Site, folder: BatchFolder, job: str) -> None:
        self._site, self._folder, self._job = running, folder, job
        self.kills = dict.fromkeys(("node", "daemon", "dispatcher"), 0)
        self.generated: dict[int, int] = {}
        """Epoch → number of tokens generated in it, from its last status."""

    def run(self, period_s: float, limit_s: float) -> float:
        """Return the seconds until the batch was complete."""
        began = time.monotonic()
        kinds = iter(())
        next_at = began + period_s
        while not self._folder.is_done:
            now = time.monotonic()
            if now - began > limit_s:
                raise TimeoutError(f"the batch is not complete after {limit_s:g} s")
            status = self._folder.status()
            if "epoch" in status:
                self.generated[status["epoch"]] = status["generated_tokens"]
            if now >= next_at and status.get("answered", 0):
                kind = next(kinds, "")
                if not kind:
                    kinds = iter(self.kills)
                    kind = next(kinds)
                self._kill(kind, status)
                next_at = now + period_s
            time.sleep(0.1)
        return time.monotonic() - began

    def _kill(self, kind: str, status: dict) -> None:
        dispatcher = status["dispatcher"]
        if kind == "daemon":
            self._site.kill_daemon()
            self._site.start_daemon()
        elif kind == "node":
            others = [name for name in self._site.agents() if name != dispatcher]
            if not others:
                return
            self._site.agents()[others[0]].kill()
        else:
            with self._site.client() as client:
                at = {m.node: m.address for m in client.members(self._job).members}
            port = int(at.get(dispatcher, ":0").rpartition(":")[2])
            for process in self._site.workers(self._folder.path / "member.py"):
                if any(c.laddr.port == port for c in process.net_connections()):
                    process.kill()
                    break
            else:
                return
        self.kills[kind] += 1


def batch_case(requests: int, nodes: int, period_s: float) -> list[Measure]:
    """Run a batch whose nodes, daemon and dispatcher are killed."""
    with tempfile.TemporaryDirectory() as root:
        source, output = Path(root) / "in.jsonl", Path(root) / "out.jsonl"
        write_batch(source, requests)
        folder = BatchFolder(output)
        running = BatchSite(Path(root) / "site", nodes=nodes)
        with contextlib.ExitStack() as stack:
            stack.callback(running.stop)
            running.start_daemon()
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(HOME), *sys.path]),
                "MALLETRAIN_STATE_DIR": str(running.state),
            }
            command = [sys.executable, "-m", "llmserve.cli", "batch", "--model", "simulated"]
            command += ["--nodes", f"1:{nodes}", "--slots", "16", str(source), str(output)]
            command += ["--", *ENGINE]
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            manifest = folder.manifest()
            assert manifest is not None
            faults = BatchFaults(running, folder, manifest.job)
            seconds = faults.run(period_s, limit_s=900.0)
            faults.generated[folder.status()["epoch"]] = folder.status()["generated_tokens"]
        lines = [json.loads(line) for line in output.read_text().splitlines()]
    texts = [line["response"]["body"]["choices"][0]["text"] for line in lines]
    same = sum(
        text == detokenize(generate(digest_of(tokenize(prompt)), tokens)[0])
        for text, (prompt, tokens) in zip(texts, batch_lines(requests), strict=False)
    )
    needed = sum(tokens for _, tokens in batch_lines(requests))
    twice = sum(faults.generated.values()) / needed - 1.0
    is_exact = len(lines) == same == requests
    return [
        *(Measure("batch", f"{kind} killed", count) for kind, count in faults.kills.items()),
        Measure("batch", "seconds", seconds),
        Measure("batch", "lines", len(lines), str(requests), len(lines) == requests),
        Measure("batch", "lines as undisturbed", same, str(requests), is_exact),
        Measure("batch", "tokens twice", twice, "<= 0.05", twice <= 0.05),
    ]


def main() -> int:
    """Print the table. Return exit code 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", default=",".join(ITEMS))
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1024, help="of each stream")
    parser.add_argument("--period", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--requests", type=int, default=2000, help="of the batch")
    parser.add_argument("--nodes", type=int, default=4, help="of the batch")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    end_in_order()
    measures: list[Measure] = []
    for item in options.items.split(","):
        if item == "batch":
            measures += batch_case(options.requests, options.nodes, options.period)
        elif item in ITEMS:
            case = streams_case(item, options.streams, options.tokens, options.period)
            measures += asyncio.run(case)
        else:
            parser.error(f"{item} is no item; possible: {', '.join(ITEMS)}.")
    if options.json:
        print(json.dumps([asdict(measure) for measure in measures], indent=1))
    else:
        table = Table("item", "measure", "value", "target", "met")
        for m in measures:
            met = "" if m.is_met is None else "yes" if m.is_met else "no"
            table.add_row(m.item, m.measure, f"{m.value:.4g}", m.target, met)
        Console().print(table)
        load = os.getloadavg()[1]
        print(f"load {load:.1f} on {os.cpu_count()} processors")
    return int(any(measure.is_met is False for measure in measures))


if __name__ == "__main__":
    sys.exit(main())
