"""What a change of nodes costs a training: the pause between the last step before and the first
step after.

    python -m benchmarks.rescale [--mode live|restart|c10d|all …] [--model-mb 10 400] [--nodes 6]
    [--repeats 3] [--json]

Events: shrink and grow by 1, 2 and 4 virtual nodes, the loss of one without notice, and the first
start of another training on nodes that are held (``first-start``: from its submission to its first
step; MalleTrain's nodes are warm then, torchrun imports). Otherwise the pause
is the longest gap between two steps that rank 0 wrote down, the same way for every mode; it
contains one step, whose usual time is ``step_s``. ``phases`` (medians) are, in live mode, what rank
0 spent in each part of the change, else what MalleTrain's own monitor says. ``restart-memory`` has
its snapshots in the memory of the nodes (malletrain.Snapshot(memory=True)); ``restart-cold`` is
restart mode without the warm interpreter (MALLETRAIN_PRELOAD=0); ``restart-container`` in a
container of Charliecloud (``--mode restart restart-container`` compares them in one run). Every
mode runs the same training (benchmarks/train_step.py, train_live.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import end_in_order
from benchmarks.rescale_modes import CONTENDERS, Contender, until

STEADY_STEPS = 40
"""Number of steps at the same world size after which the training has settled."""
LOSS_STEPS = 10
"""Number of steps after a loss until it is over."""
LONG_GAP_S = 0.6
"""Minimum gap between steps that counts as a pause if the number of nodes does not show it,
seconds.
"""


class StepLog:
    """The steps that rank 0 recorded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[tuple[float, int, int]]:
        """(time, step, world size), in the order of time."""
        if not self.path.exists():
            return []
        lines = [line.split() for line in self.path.read_text().splitlines()]
        return [
            (float(t), int(s), int(w)) for t, s, w in (line for line in lines if len(line) == 3)
        ]

    def settled(self, world: int, since: float) -> bool:
        """Return whether the newest steps after ``since`` are all at this world size."""
        after = [s for s in self.steps() if s[0] > since]
        return len(after) >= STEADY_STEPS and all(w == world for _, _, w in after[-STEADY_STEPS:])

    def went_on(self, steps: int, nodes: int, since: float) -> bool:
        """Return whether enough steps followed, after ``since``, the first one at another size than
        ``nodes`` or the longest gap.
        """
        after = [s for s in self.steps() if s[0] > since - 1.0]
        fewer = next((i for i, s in enumerate(after) if s[0] > since and s[2] != nodes), None)
        if fewer is not None:
            return len(after) - fewer > steps
        gaps = [b[0] - a[0] for a, b in itertools.pairwise(after)]
        return bool(gaps) and max(gaps) > LONG_GAP_S and len(gaps) - gaps.index(max(gaps)) > steps

    def begun(self, since: float) -> bool:
        """Return whether a step was made after ``since``."""
        return any(t > since for t, _, _ in self.steps())

    def step_s(self) -> float:
        """Return the usual time between two steps, of the newest ones."""
        return statistics.median(
            b[0] - a[0] for a, b in itertools.pairwise(self.steps()[-STEADY_STEPS:])
        )

    def pause(self, since: float) -> tuple[float, int]:
        """Return (longest gap between steps after ``since``, number of repeated steps)."""
        steps = self.steps()
        first = max((i for i, s in enumerate(steps) if s[0] <= since), default=0)
        window = steps[first:]
        gaps = [(b[0] - a[0], a[1] - b[1] + 1) for a, b in itertools.pairwise(window)]
        gap, repeated = max(gaps)
        return gap, max(0, repeated)


def run(
    mode: str, model_mb: float, nodes: int, repeats: int, device: str, say: Console
) -> list[dict[str, Any]]:
    """Measure all events in one mode. Return one row per event."""
    pauses: dict[str, list[float]] = defaultdict(list)
    repeated: dict[str, list[int]] = defaultdict(list)
    usual: dict[str, list[float]] = defaultdict(list)
    phases: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="mt-rescale-") as folder:
        root = Path(folder)
        log = StepLog(root / "steps")
        arguments = [
            "--mb",
            str(model_mb),
            "--device",
            device,
            "--steps-file",
            str(log.path),
            "--snapshot",
            str(root / "snapshot"),
        ]
        contender: Contender = CONTENDERS[mode](root, nodes, arguments)

        def event(name: str, change: Callable[[], None], over: Callable[[float], bool]) -> None:
            usual[name].append(log.step_s())
            began, phase_count = time.time(), len(contender.phases())
            change()
            until(lambda: over(began), f"{mode}: {name} is over")
            gap, again = log.pause(began)
            pauses[name].append(gap)
            repeated[name].append(again)
            for phase, seconds in (contender.phases()[phase_count:] or [{}])[0].items():
                phases[name][phase].append(seconds)
            say.print(f"{mode} {name}: {gap:.2f} s", highlight=False)

        try:
            contender.start()
            until(lambda: log.settled(nodes, 0.0), f"{mode} trains on {nodes}")
            for _ in range(repeats):
                for by in (k for k in (1, 2, 4) if k < nodes):
                    event(
                        f"shrink-{by}",
                        partial(contender.shrink, by),
                        partial(log.settled, nodes - by),
                    )
                    event(f"grow-{by}", partial(contender.grow, by), partial(log.settled, nodes))
                event("loss", contender.lose, partial(log.went_on, LOSS_STEPS, nodes))
                began = time.time()
                contender.recover()
                until(partial(log.settled, nodes, began), f"{mode} trains on {nodes} again")
                usual["first-start"].append(log.step_s())
                began = time.time()
                contender.begin_anew()
                requested_at = time.time()
                until(partial(log.begun, requested_at), f"{mode} trains anew")
                first = min(t for t, _, _ in log.steps() if t > requested_at)
                pauses["first-start"].append(first - requested_at)
                repeated["first-start"].append(0)
                say.print(f"{mode} first-start: {first - requested_at:.2f} s", highlight=False)
                until(partial(log.settled, nodes, began), f"{mode} trains on {nodes} anew")
        except RuntimeError:
            print(contender.last_words(), file=sys.stderr)
            raise
        finally:
            contender.stop()
    return [
        {
            "mode": mode,
            "event": name,
            "model_mb": model_mb,
            "pause_s": round(statistics.median(values), 3),
            "spread": [round(min(values), 3), round(max(values), 3)],
            "repeats": len(values),
            "step_s": round(statistics.median(usual[name]), 3),
            "steps_repeated": max(repeated[name]),
            "phases": {
                phase: round(statistics.median(seconds), 3)
                for phase, seconds in phases[name].items()
            },
        }
        for name, values in pauses.items()
    ]


def main() -> None:
    """Run, and print a table (stderr) and, with --json, one object (stdout)."""
    end_in_order()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=[*CONTENDERS, "all"], nargs="+", default=["all"])
    parser.add_argument("--model-mb", type=float, nargs="+", default=[10.0])
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="of the training: cpu, cuda")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    say = Console(stderr=True)
    modes = list(CONTENDERS) if "all" in args.mode else args.mode
    rows = [
        row
        for mb in args.model_mb
        for mode in modes
        for row in run(mode, mb, args.nodes, args.repeats, args.device, say)
    ]
    table = Table(
        "mode", "event", "MB", "pause s", "min…max", "step s", "repeated steps", "phases s"
    )
    for row in rows:
        shown = ", ".join(f"{k} {v:.3f}" for k, v in row["phases"].items())
        low, high = row["spread"]
        pause, spread = f"{row['pause_s']:.2f}", f"{low:.2f}…{high:.2f}"
        mb, usual = f"{row['model_mb']:g}", f"{row['step_s']:.3f}"
        table.add_row(
            str(row["mode"]),
            str(row["event"]),
            mb,
            pause,
            spread,
            usual,
            str(row["steps_repeated"]),
            shown,
        )
    say.print(table)
    if args.json:
        machine = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_before": os.getloadavg()[0],
        }
        print(json.dumps({"machine": machine, "rows": rows}))


if __name__ == "__main__":
    main()
