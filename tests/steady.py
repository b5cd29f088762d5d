"""Runs the part of the suite with many processes several times in a row, some runs under load.

    python -m tests.steady [--runs 10] [--load 4] [--loaded 4] [--json] [pytest's arguments]

``--load`` busy processes run beside each of the last ``--loaded`` runs. Prints a line for each run,
and keeps the output of failed ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOMS = (
    "malletrain/launch",
    "malletrain/elastic",
    "malletrain/agent",
    "malletrain/daemon",
    "malletrain/training",
    "integration",
)
"""Folders with tests of many simultaneous processes. The days of users, containers and Slurm's
clusters take longer and are part of every check.
"""
SELECTION = "not sites and not thorough and not gpu and not vllm"
"""Number of repetitions, as in ``make test``."""
WORKERS = max(2, (5 * (os.cpu_count() or 1) + 1) // 2)
"""Number of workers, as in ``make test``."""


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run ``count`` busy processes during the block."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def one_run(load: int, arguments: list[str]) -> tuple[dict[str, float], str]:
    """Run the tests once beside ``load`` busy processes. Return the numbers and the output."""
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    rooms = [str(HERE / room) for room in ROOMS]
    argv += arguments or [
        "-n",
        str(WORKERS),
        "--dist",
        "worksteal",
        "-m",
        SELECTION,
        *rooms,
    ]
    begin = time.monotonic()
    with busy(load):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    last = (done.stdout.strip() or "-").splitlines()[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", last)}
    bad = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    return {
        "load": load,
        "passed": counts.get("passed", 0),
        "failed": bad or int(done.returncode != 0),
        "seconds": round(time.monotonic() - begin, 1),
    }, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--load", type=int, default=4, help="busy processes")
    parser.add_argument("--loaded", type=int, default=4, help="number of runs with that load")
    parser.add_argument("--json", action="store_true")
    options, arguments = parser.parse_known_args()
    logs = Path(tempfile.mkdtemp(prefix="steady-"))
    rows = []
    print(f"{'run':>3} {'load':>5} {'passed':>7} {'failed':>7} {'seconds':>8}", file=sys.stderr)
    for number in range(1, options.runs + 1):
        loaded = number > options.runs - options.loaded
        row, output = one_run(options.load if loaded else 0, arguments)
        rows.append({"run": number, **row})
        shown = "{run:>3} {load:>5} {passed:>7} {failed:>7} {seconds:>8}".format(**rows[-1])
        if row["failed"]:
            (logs / f"run{number}.log").write_text(output)
            shown += f"  {logs}/run{number}.log"
        print(shown, file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(rows))
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
