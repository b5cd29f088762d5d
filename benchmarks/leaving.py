"""Measures how long a main job waits for nodes whose leases must end while nobody moves the job:
without a daemon, and while the job is starting.

    python -m benchmarks.leaving [--nodes 4] [--json]

Runs on the embedded cluster. Seconds from SIGTERM to the end of the last agent.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import time
from pathlib import Path

import psutil

from tests.integration.embedded import Site, site

TRAINING_SCRIPT = """
import torch, malletrain, time, os
model = torch.nn.Linear(8, 8)
sampler = malletrain.ElasticSampler(10**6, batch_size=1)
snapshot = malletrain.Snapshot("run.snap", model=model, sampler=sampler, every_s=3600)
snapshot.restore()
for epoch in sampler.epochs(1):
    for batch in sampler:
        time.sleep(0.05)
        sampler.advance()
        malletrain.report(len(batch))
        snapshot.step()
"""
SITUATIONS = {
    "all nodes, no daemon": (True, True),
    "one node, no daemon": (False, True),
    "all nodes, daemon": (True, False),
    "one node, daemon": (False, False),
}


def terminate(running: Site, nodes: list[str]) -> float:
    """Return the seconds from SIGTERM until the agents on these nodes have ended."""
    agents = [running.agents()[node] for node in nodes]
    began = time.monotonic()
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    psutil.wait_procs(agents)
    return time.monotonic() - began


def training(everywhere: bool, without_daemon: bool, count: int) -> float:
    """Measure while the job trains."""
    with tempfile.TemporaryDirectory() as root, site(Path(root), nodes=count) as running:
        job = running.submit(running.script("train.py", TRAINING_SCRIPT), nodes=(1, count))
        running.until(lambda: len(running.job(job).nodes) == count, "the job has all nodes")
        running.until_samples(job, running.job(job).samples + 50)
        nodes = list(running.job(job).nodes)
        if without_daemon:
            running.kill_daemon()
        return terminate(running, nodes if everywhere else nodes[-1:])


def starting(everywhere: bool, without_daemon: bool, count: int) -> float:
    """Measure while its workers import torch."""
    with tempfile.TemporaryDirectory() as root, site(Path(root), nodes=count) as running:
        job = running.submit(running.script("train.py", TRAINING_SCRIPT), nodes=(count, count))
        running.until(lambda: len(running.job(job).nodes) == count, "the job has all nodes")
        nodes = list(running.job(job).nodes)
        if without_daemon:
            running.kill_daemon()
        return terminate(running, nodes if everywhere else nodes[-1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for what in (training, starting):
        for name, how in SITUATIONS.items():
            took = what(*how, options.nodes)
            if options.json:
                print(
                    json.dumps({"while": what.__name__, "situation": name, "s": took}), flush=True
                )
            else:
                print(f"{what.__name__:<10} {name:<22} {took:6.2f} s", flush=True)


if __name__ == "__main__":
    main()
