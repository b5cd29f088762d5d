"""How long a request waits at the gateway when its service has no nodes.

    python -m benchmarks.llm_from_zero [--repeats 5] [--load-s 30] [--json]

An embedded cluster of two nodes, a service whose simulated engine loads for ``--load-s`` seconds,
and a stock client with its default settings. In each repeat the service has no nodes, one request
is sent, and the time to its complete answer of 16 tokens is measured; then the gateway releases all
nodes again. A first request does not count. ``beyond the load``: that time less ``--load-s``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import openai
from rich.console import Console
from rich.table import Table

from benchmarks import end_in_order
from malletrain import Client
from tests.integration.embedded import Site, site
from tests.jobscripts.llm.gateways import running

from llmserve.gateway.keys import KeyFile  # isort: skip
from llmserve.simulated_model import detokenize, digest_of, generate  # isort: skip

SERVE = Path(__file__).resolve().parents[1] / "jobscripts" / "llm" / "serve.py"
PROMPT, TOKENS = [11, 12, 13], 16
IDLE_S = 1.0
"""Seconds without requests after which the gateway releases all nodes."""
TARGET_S = 5.0
"""Maximum of a median beyond the load, seconds."""


def waits_s(made: Site, load_s: float, repeats: int) -> list[float]:
    """Return how long each request waited for its answer.

    Args:
        made: the site.
        load_s: time for which the engine loads, seconds.
        repeats: number of requests.

    Raises:
        RuntimeError: an answer is wrong.
    """
    with Client(made.state) as client:
        service = client.submit(
            SERVE,
            ["--model", "simulated", "--engine", "simulated", "--", "--load-s", str(load_s)],
            service=True,
            value="0",
            nodes="1:2",
            start_cost="auto",
            workdir=made.work,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
        ).id
        configuration = made.work / "gateway.toml"
        configuration.write_text(
            f'listen = "127.0.0.1:0"\n[users.alice]\n[models.simulated]\njob = "{service}"\n'
            f'tokenizer = "simulated"\n[scaling]\nidle_s = {IDLE_S}\n'
        )
        _, key = KeyFile(made.work / "keys.json").add("alice")
        expected = detokenize(generate(digest_of(PROMPT), TOKENS)[0])
        waits = []
        with running(configuration, key, "--state-dir", str(made.state)) as (_, patient_api):
            api = openai.OpenAI(base_url=patient_api.base_url, api_key=key)
            for number in range(repeats + 1):
                made.until(lambda: not client.members(service).members, "it has no nodes")
                made.until_state(service, "suspended")
                began = time.monotonic()
                answer = api.completions.create(model="simulated", prompt=PROMPT, max_tokens=TOKENS)
                if number:  # at its start the gateway requests a node before there is a request
                    waits.append(time.monotonic() - began)
                if answer.choices[0].text != expected:
                    raise RuntimeError(f"The answer is {answer.choices[0].text!r}.")
    return waits


def main() -> int:
    """Print the waits. Return exit code 1 if their median misses the target."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--load-s", type=float, default=30.0, help="of the engine, seconds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    end_in_order()
    with tempfile.TemporaryDirectory() as root, site(Path(root), nodes=2) as made:
        waits = waits_s(made, options.load_s, options.repeats)
    beyond = [wait - options.load_s for wait in waits]
    median, load = statistics.median(beyond), os.getloadavg()[1]
    if options.json:
        print(json.dumps({"waits_s": waits, "beyond_load_s": beyond, "load": load}, indent=1))
    else:
        table = Table("", "median", "least", "largest", "target")
        for name, values, target in (
            ("to the answer, s", waits, ""),
            ("beyond the load, s", beyond, f"<= {TARGET_S:g}"),
        ):
            cells = (statistics.median(values), min(values), max(values))
            table.add_row(name, *(f"{cell:.1f}" for cell in cells), target)
        Console().print(table)
        print(f"load {load:.1f} on {os.cpu_count()} processors")
    return 0 if median <= TARGET_S else 1


if __name__ == "__main__":
    sys.exit(main())
