"""The pictures of the page in the browser (docs/web.md): a site with content, photographed.

``python -m benchmarks.web_pictures --minutes 60`` plays a trace of a busy machine on an embedded
cluster of twelve virtual nodes, submits jobs of several sizes and a sweep to a real daemon, waits,
and writes ``web-machine.png``, ``web-jobs.png``, ``web-job.png`` and ``web-sweep.png``. Needs
Chromium and its driver. The jobs sleep instead of training, so that one laptop is enough. The
pictures show the paths of the scripts: ``--work /scratch/wind`` gives the jobs that working
directory, which must not exist.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from scavenger.trace import files
from scavenger.trace.trace import Trace
from tests.integration.browser import Browser, browser
from tests.integration.embedded import Site, site
from tests.integration.web_page import page

NODES = 12
SCRIPT = """\
import argparse, json, math, os, pathlib, random, time
import malletrain

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--serial", type=float, default=0.02)
parser.add_argument("--work", type=float, default=0.4)
parser.add_argument("--lr", type=float, default=0.1)
arguments = parser.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
state = pathlib.Path(f"state-{os.environ['MALLETRAIN_JOB']}.json")
step = json.loads(state.read_text()) if state.exists() else 0
noise = random.Random(step)
while step < arguments.steps:
    time.sleep(arguments.serial + arguments.work / world)
    malletrain.report(64 / world)
    step += 1
    if rank == 0 and step % 10 == 0:
        floor = 0.2 + abs(math.log10(arguments.lr) + 1) / 4
        loss = floor + 2.2 * math.exp(-step / 250) + noise.gauss(0, 0.02)
        malletrain.metric("loss", loss, step=step)
        malletrain.metric("accuracy", max(0.0, 1 - loss / 2.5), step=step)
        print(f"step {step}: loss {loss:.3f} on {world} nodes", flush=True)
        part = state.with_suffix(".part")
        part.write_text(str(step))
        part.rename(state)
"""
JOBS = (  # name, steps, seconds of work that are divided, (min, max) nodes
    ("resnet50-imagenet", 100_000, 1.6, (2, 8)),
    ("wind-downscaling", 100_000, 1.2, (1, 6)),
    ("protein-embed", 100_000, 0.8, (1, 4)),
    ("tiny-llm-warmup", 900, 0.8, (1, 3)),
    ("unet-segmentation", 100_000, 2.4, (4, 8)),
)
SWEEP = """\
[sweep]
name = "learning-rate"
metric = "accuracy"
direction = "maximize"
trials = {trials}
at_once = 3

[job]
script = "{script}"
args = ["--steps", "400", "--work", "0.3"]
nodes = "1:2"
workdir = "{work}"
profile = "off"

[space]
lr = {{ low = 1e-3, high = 1.0, log = true }}

[pruner]
kind = "asha"
"""


def busy_machine(duration_s: float, seed: int = 1) -> Trace:
    """Write a trace of twelve nodes that are idle for 3 to 15 min at a time and in use for 1 to 6
    min.
    """
    draw = np.random.default_rng(seed)
    gaps: list[tuple[int, float, float]] = []
    for node in range(NODES):
        at = 0.0 if draw.random() < 0.7 else float(draw.uniform(60, 360))
        while at < duration_s:
            end = at + float(draw.uniform(180, 900))
            gaps.append((node, at, min(end, duration_s)))
            at = end + float(draw.uniform(60, 360))
    nodes, starts, ends = zip(*gaps, strict=True)
    names = [f"n{number}" for number in range(1, NODES + 1)]
    return Trace.from_gaps(nodes, starts, ends, names, duration_s)


def submit(made: Site) -> None:
    """Submit the jobs and the sweep."""
    script = made.script("train.py", SCRIPT)
    for name, steps, work_s, nodes in JOBS:
        made.submit(script, "--steps", str(steps), "--work", str(work_s), name=name, nodes=nodes)
    sweep = made.work / "learning-rate.toml"
    sweep.write_text(SWEEP.format(script=script, work=made.work, trials=14))
    command = [sys.executable, "-m", "malletrain", "sweep", "run", "--detach", str(sweep)]
    subprocess.run([*command, "--state-dir", str(made.state)], check=True, cwd=made.work)


def photograph(tab: Browser, url: str, folder: Path) -> None:
    """Take the four pictures."""

    def picture(name: str, height: int) -> None:
        tab.width(1200, height)
        time.sleep(2)  # the page redraws at its new size
        tab.driver.save_screenshot(str(folder / f"{name}.png"))

    tab.until_text("h1", "Machine")
    picture("web-machine", 1000)
    tab.open(f"{url}#/jobs")
    tab.until_text("#jobs", JOBS[0][0])
    picture("web-jobs", 760)
    tab.open(f"{url}#/job/j2")  # the job whose number of nodes changes most
    tab.until_text("h1", JOBS[1][0])
    tab.until_text("#job-scale", "Nodes over time")
    picture("web-job", 1400)
    tab.open(f"{url}#/sweeps")
    tab.until_text("body", "learning-rate")
    picture("web-sweep", 760)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    parser.add_argument("--work", type=Path, help="working directory of the jobs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="malletrain-", dir="/tmp") as name:
        root = Path(name)
        trace = root / "trace.csv"
        files.write(busy_machine(60 * options.minutes + 600), trace)
        with (
            site(
                root / "site",
                nodes=NODES,
                grace_s=20.0,
                profiling="enabled = true",
                cluster={"trace": trace, "start_s": 0.0},
            ) as made,
            page(made.state) as web,
            browser(root / "profile") as tab,
        ):
            tab.open(web.url)
            if options.work is not None:
                made.work = options.work
                made.work.mkdir(parents=True)
            submit(made)
            os.makedirs(options.output, exist_ok=True)
            time.sleep(60 * options.minutes)
            photograph(tab, web.base, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
