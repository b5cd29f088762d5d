"""Ray Tune on nodes that come and go: its driver in an environment of its own, one raylet on each
node that the trace leaves idle.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers_environments import cache, python_of
from scavenger.trace.trace import Trace

DRIVER = Path(__file__).with_name("train_sweep_ray.py")


def run(
    values: list[dict[str, Any]], cut: Trace, example: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Run the sweep on this trace. Return the fields of a SweepCost.

    Raises:
        NotInstalled: Ray is not available.
        subprocess.CalledProcessError: the driver failed; its log is in the folder.
    """
    python = python_of("tune", cache())
    root = Path(tempfile.mkdtemp(prefix="sweep-ray-"))
    gaps = cut.gaps()
    plan = {
        "values": values,
        "intervals": list(
            zip(gaps.node.tolist(), gaps.start.tolist(), gaps.end.tolist(), strict=True)
        ),
        "duration_s": cut.duration_s,
        "nodes": len(cut.names),
        "example": str(example),
        "epochs": args.epochs,
        "sample_delay": args.sample_delay,
        "folder": str(root),
        "outcome": str(root / "outcome.json"),
    }
    (root / "plan.json").write_text(json.dumps(plan))
    with (root / "driver.log").open("wb") as log:
        argv = [str(python), str(DRIVER), str(root / "plan.json")]
        subprocess.run(argv, stdout=log, stderr=log, check=True)
    outcome: dict[str, Any] = json.loads((root / "outcome.json").read_text())
    return outcome
