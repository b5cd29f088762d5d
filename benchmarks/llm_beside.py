"""An LLM service and a training on one embedded cluster: what the training has of its nodes while
requests wait at the gateway.

    python -m benchmarks.llm_beside [--seconds 60] [--streams 48] [--nodes 6] [--json]

The training gains 150 samples/s from each of up to four nodes (its steps sleep); each node of the
service is worth 100. The bids of an owner who is behind the share count more, so the nodes are due
to the training's owner in the same sense.

1. The training runs without the service for ``--seconds``, and is cancelled.
2. Requests arrive, ``--streams`` at any time, until the service has all nodes.
3. The training is submitted again; seconds until it trains on its four nodes.
4. The training runs beside the service for ``--seconds``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import openai
from rich.console import Console
from rich.table import Table

from benchmarks import end_in_order
from benchmarks.train_batching import STEADY_RATE
from malletrain import Client
from tests.integration.embedded import Site, site
from tests.jobscripts.llm.gateways import running

from llmserve.gateway.keys import KeyFile  # isort: skip
from llmserve.simulated_model import detokenize, digest_of, generate  # isort: skip

ROOT = Path(__file__).resolve().parents[1]
SERVE = ROOT / "jobscripts" / "llm" / "serve.py"
TRAINING_NODES, NODE_VALUE = 4, 100.0
TOKENS = 300
"""Number of tokens of each stream: three seconds of an engine."""
PER_NODE = 8
"""Number of requests that fill a node of the service."""
RATE_TARGET = 0.95


@dataclass
class Streams:
    """Clients that keep ``number`` streams open, in a loop of their own.

    Args:
        url: URL of the API.
        key: key of a user.
        number: number of streams.
    """

    url: str
    key: str
    number: int
    answered: int = 0
    failed: int = 0
    """Number of streams that ended with an error or a wrong text."""
    _ends: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Streams:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read_all()))
        self._thread.start()
        return self

    def __exit__(self, *of_error: object) -> None:
        self._ends.set()
        self._thread.join()

    async def _read_all(self) -> None:
        async with openai.AsyncOpenAI(
            base_url=self.url, api_key=self.key, timeout=600.0, max_retries=0
        ) as client:
            await asyncio.gather(*(self._read(client, number) for number in range(self.number)))

    async def _read(self, client: openai.AsyncOpenAI, number: int) -> None:
        prompt = [number + 1, 2, 3]
        expected = detokenize(generate(digest_of(prompt), TOKENS)[0])
        while not self._ends.is_set():
            text = ""
            try:
                stream = await client.completions.create(
                    model="simulated", prompt=prompt, max_tokens=TOKENS, stream=True
                )
                async for chunk in stream:
                    text += chunk.choices[0].text
            except openai.OpenAIError as error:
                text = f"{type(error).__name__}: {error}"
            self.answered += text == expected
            self.failed += text != expected


@dataclass(frozen=True)
class Result:
    """The results of one run."""

    alone: float
    """Samples/s of the training without the service."""
    beside: float
    """The same while the service has the other nodes."""
    fewest_nodes: int
    """Samples/s of the training beside the service."""
    replicas_before: int
    """Number of replicas when the training was submitted."""
    returns_s: float
    """Seconds from the submission until the training trains on its nodes."""
    replicas: int
    """Number of replicas beside the training at the end."""
    answered: int
    failed: int
    """Number of streams."""
    load: float
    """Load average over a minute, at the end."""


def submit_training(made: Site, name: str) -> str:
    """Submit the training. Return the job's id."""
    script = made.work / "train_batching.py"
    if not script.exists():
        made.script(script.name, (ROOT / "benchmarks" / "train_batching.py").read_text())
    curve = {str(k): STEADY_RATE * k for k in range(1, TRAINING_NODES + 1)}
    nodes = (1, TRAINING_NODES)
    return made.submit(script, "steady", nodes=nodes, profile=False, curve=curve, name=name)


def trains(made: Site, job: str) -> None:
    """Wait until the training has all its nodes, and has samples from them."""
    made.until(lambda: len(made.job(job).nodes) == TRAINING_NODES, "it has its nodes")
    before = made.job(job).samples
    made.until(lambda: made.job(job).samples > before, "it trains there")


def measure(made: Site, job: str, seconds: float) -> tuple[float, int]:
    """Return the samples/s of a job over a time, and its minimum number of nodes."""
    first, began, fewest = made.job(job).samples, time.monotonic(), TRAINING_NODES
    while time.monotonic() - began < seconds:
        time.sleep(0.5)
        fewest = min(fewest, len(made.job(job).nodes))
    return (made.job(job).samples - first) / (time.monotonic() - began), fewest


def run(nodes: int, streams: int, seconds: float) -> Result:
    """Run everything on an embedded cluster of ``nodes`` nodes."""
    with tempfile.TemporaryDirectory() as root, site(Path(root), nodes=nodes) as made:
        job = submit_training(made, "alone")
        trains(made, job)
        alone, _ = measure(made, job, seconds)
        with made.client() as connection:
            connection.cancel([job])
        made.until_state(job, "cancelled")
        with Client(made.state) as client:
            service = client.submit(
                SERVE,
                ["--model", "simulated", "--slots", str(PER_NODE), "--engine", "simulated"],
                service=True,
                value="0",
                nodes=f"1:{nodes}",
                start_cost="auto",
                workdir=made.work,
                env={"PYTHONPATH": os.pathsep.join(sys.path)},
            ).id

            def replicas() -> int:
                return sum(not member.loading for member in client.members(service).members)

            configuration = made.work / "gateway.toml"
            configuration.write_text(
                f'listen = "127.0.0.1:0"\n[users.alice]\n[models.simulated]\njob = "{service}"\n'
                f'tokenizer = "simulated"\n[scaling]\nidle_s = 3600\nmax_nodes = {nodes}\n'
                f"requests_per_node = {PER_NODE}\nnode_value = {NODE_VALUE}\ninterval_s = 1\n"
            )
            _, key = KeyFile(made.work / "keys.json").add("alice")
            with (
                running(configuration, key, "--state-dir", str(made.state)) as (_, api),
                Streams(str(api.base_url), key, streams) as clients,
            ):
                made.until(lambda: replicas() == nodes, "the service has all nodes")
                before = replicas()
                began = time.monotonic()
                job = submit_training(made, "beside")
                trains(made, job)
                returns_s = time.monotonic() - began
                beside, fewest = measure(made, job, seconds)
                after = replicas()
    load = os.getloadavg()[0]
    return Result(
        alone, beside, fewest, before, returns_s, after, clients.answered, clients.failed, load
    )


def main() -> int:
    """Print the result. Return exit code 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--streams", type=int, default=48, help="open at any time")
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.nodes <= TRAINING_NODES:
        parser.error(f"--nodes must be more than the {TRAINING_NODES} of the training.")
    end_in_order()
    result = run(options.nodes, options.streams, options.seconds)
    is_met = result.beside >= RATE_TARGET * result.alone and not result.failed
    if options.json:
        print(json.dumps(asdict(result), indent=1))
    else:
        table = Table("measure", "value", "target")
        table.add_row("training alone, samples/s", f"{result.alone:.0f}", "")
        ratio = result.beside / result.alone
        table.add_row("beside the service, relative", f"{ratio:.3f}", f">= {RATE_TARGET}")
        table.add_row("fewest nodes of the training", str(result.fewest_nodes), str(TRAINING_NODES))
        table.add_row("replicas before it", str(result.replicas_before), "")
        table.add_row("training on its nodes after, s", f"{result.returns_s:.1f}", "")
        table.add_row("replicas beside it", str(result.replicas), "")
        table.add_row("streams answered, failed", f"{result.answered}, {result.failed}", "-, 0")
        Console().print(table)
        print(f"load {result.load:.1f} on {os.cpu_count()} processors")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
