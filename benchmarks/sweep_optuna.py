"""Optuna alone on nodes that come and go: a process on each node while it is idle in the trace,
killed when the node is taken.

This favours Optuna: a process starts at the moment at which its node becomes idle, without a
request to a scheduler.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.train_sweep_optuna import ENDED, open_study
from scavenger.trace.trace import Trace

LOOK_S = 0.1


class Workers:
    """The processes, by node, and how long each node had one."""

    def __init__(self, argv: list[str], log: Path) -> None:
        self._argv = argv
        self._log = log
        self._running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}
        self.used_s = 0.0

    def set(self, idle: set[int], now: float) -> None:
        """Start and kill processes so that exactly the idle nodes have one."""
        for node in self._running.keys() - idle:
            process, since = self._running.pop(node)
            process.kill()
            process.wait()
            self.used_s += now - since
        for node in idle - self._running.keys():
            with self._log.open("ab") as log:
                self._running[node] = (subprocess.Popen(self._argv, stdout=log, stderr=log), now)


def run(
    values: list[dict[str, Any]], cut: Trace, example: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Run the study on this trace. Return the fields of a SweepCost."""
    root = Path(tempfile.mkdtemp(prefix="sweep-optuna-"))
    url = f"sqlite:///{root}/study.db"
    study = open_study(url, "optuna", args.seed)
    for each in values:
        study.enqueue_trial(each)
    options = {
        "--example": example,
        "--trials": len(values),
        "--epochs": args.epochs,
        "--sample-delay": args.sample_delay,
        "--seed": args.seed,
    }
    words = [str(word) for pair in options.items() for word in pair]
    argv = [sys.executable, "-m", "benchmarks.train_sweep_optuna", url, "optuna", str(root), *words]
    workers = Workers(argv, root / "workers.log")
    gaps = cut.gaps()
    intervals = list(zip(gaps.node.tolist(), gaps.start.tolist(), gaps.end.tolist(), strict=True))
    began = time.monotonic()
    now = 0.0
    try:
        while len(study.get_trials(deepcopy=False, states=ENDED)) < len(values):
            now = time.monotonic() - began
            after = now >= cut.duration_s
            idle = {n for n, start, end in intervals if after or start <= now < end}
            workers.set(set(range(len(cut.names))) if after else idle, now)
            time.sleep(LOOK_S)
        now = time.monotonic() - began
    finally:
        workers.set(set(), now)
    ended = study.get_trials(deepcopy=False, states=ENDED)
    return {
        "wall_s": now,
        "best": max((t.value or 0.0 for t in ended if t.state.name == "COMPLETE"), default=0.0),
        "trials": {
            word: sum(t.state.name.lower() == word for t in ended)
            for word in ("complete", "pruned")
        },
        "steps": sum(t.last_step or 0 for t in ended),
        "processed": sum(float(f.read_text() or 0) for f in root.glob("samples-*")),
        "used_s": workers.used_s,
    }
