"""What a change of the number of ranks costs a sharded model: restart from disk, from memory, live,
and with plain torchrun.

    python -m benchmarks.sharded [--modes disk disk-cold cold torchrun memory live]
    [--params-m 10] [--sizes 8 4 6 8]
    [--repeats 1] [--changes 20] [--loss-steps 200] [--every-s 5] [--json]

A transformer with AdamW (benchmarks/sharded_training.py), sharded over all ranks with FSDP2 over
gloo, one rank a virtual node, goes through ``--sizes``. Of every change:

* pause: the longest time without a finished step. It contains one step.
* stopped: the pause without that step, by the median of those on as many ranks.
* moved / least: the bytes that were read and written to move the state, beside the fewest that have
  to reach a rank anew, over all orders of the new ranks (benchmarks/sharded_account.py).
  In restart mode from memory they are not counted.
* pause / wire: the pause beside moving these bytes at the bandwidth measured in the same run.
* cpu: seconds of processor time, whatever the load is. In live mode those that the training thread
  of a rank which stays takes from its last step to the end of its first, beyond those of a step; in
  restart mode those that the slowest rank's ``restore()`` takes.
* peak: the most memory a rank took beyond what it had before the model, beside its old and its new
  shards and 64 MB.

The loss of every step is compared with plain torchrun's that nobody disturbs, over ``--loss-steps``
steps with the same global batch. Then a trace of ``--changes`` changes gives the goodput: the time
that the steps would take by themselves, counted once each, as a fraction of all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import end_in_order
from benchmarks.peers import settled
from benchmarks.peers_account import Logs, count, finished, good_time, pause, usual_steps
from benchmarks.rescale_modes import until
from benchmarks.sharded_account import Tensor, apart, least, over, shard_bytes
from benchmarks.sharded_modes import (
    MODES,
    Mode,
    ShardedUndisturbed,
    disk_bandwidth,
    network_bandwidth,
)
from benchmarks.sharded_training import facts, tensors_of

SLACK = 64e6
"""Memory that a rank may use beyond its old and new shards, bytes."""
SHAPES = {
    1: (64, 8),
    10: (256, 10),
    30: (448, 11),
    100: (768, 13),
    200: (1024, 15),
    1000: (2048, 19),
}
"""Parameters in millions → (width, layers), approximately."""


def losses(folder: Path) -> dict[int, float]:
    """Return the last recorded loss of each step, the mean over the global batch."""
    results, parts = {}, {}
    for fact in facts(folder):
        if fact["kind"] == "loss":
            results[fact["step"]] = fact["loss"]
        elif fact["kind"] == "part of loss":
            ranks = parts.setdefault((fact["step"], fact["world"]), {})
            ranks[fact["rank"]] = fact["loss"]
            if len(ranks) == fact["world"]:
                results[fact["step"]] = sum(ranks.values()) / fact["world"]
    return results


def begin(kind: Any, root: Path, most: int, args: argparse.Namespace) -> tuple[Any, Logs]:
    """A training that has not begun, and its logs."""
    folder = root / "logs"
    folder.mkdir()
    width, layers = SHAPES[args.params_m]
    arguments = [str(folder), "--width", str(width), "--layers", str(layers)]
    arguments += ["--checkpoint", str(root / "snapshot"), "--max-ranks", str(most)]
    arguments += ["--step-s", str(args.step_s), "--checkpoint-every-s", str(args.snapshot_every_s)]
    arguments += ["--replicate-every", str(args.replicate_every)]
    return kind(root, most, arguments), Logs(folder)


def undisturbed(args: argparse.Namespace) -> dict[int, float]:
    """Return the loss of each step of plain torchrun on a fixed number of ranks."""
    with tempfile.TemporaryDirectory(prefix="mt-sharded-") as root:
        training, logs = begin(ShardedUndisturbed, Path(root), max(args.sizes), args)
        try:
            training.begin(args.undisturbed_ranks)
            until(
                lambda: len(losses(logs.folder)) >= args.loss_steps,
                f"{args.loss_steps} undisturbed steps",
                args.patience_s,
            )
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{training.last_words()}") from None
        finally:
            training.stop()
        return losses(logs.folder)


def written(root: Path) -> int:
    """Return the bytes of the newest snapshot on disk, with its shards."""
    newest = max(
        (p.parent for p in root.glob("snapshot*/*/.metadata")),
        key=lambda p: p.stat().st_mtime,
        default=None,
    )
    own = (root / "snapshot").stat().st_size if (root / "snapshot").is_file() else 0
    return own + (sum(f.stat().st_size for f in newest.iterdir()) if newest else 0)


def changed(
    root: Path,
    old: int,
    new: int,
    span: tuple[float, float],
    state: Sequence[Tensor],
    mode: Mode,
) -> dict[str, Any]:
    """Return the figures of one change that is over."""
    begun, ended = span
    cells = [
        f for f in facts(root / "logs") if f.get("world") == new and begun <= f["time"] <= ended
    ]
    theirs = [f for f in cells if f["kind"] == "restored"]
    fewest = least(state, old, new, range(min(old, new)))
    allowed = max(shard_bytes(state, r, old) for r in range(old)) + max(
        shard_bytes(state, r, new) for r in range(new)
    )
    # on disk the state is written once, and read by the new ranks
    moved = (written(root) if mode.on_disk else 0) + sum(f["moved"] for f in theirs)
    return {
        "moved": moved if mode.counted else 0,
        "least": fewest,
        "peak": max((f["peak"] for f in theirs), default=0),
        "allowed": allowed + SLACK,
        "cpu_s": max((f["cpu"] for f in [*cells, *theirs] if "cpu" in f), default=0.0),
        "moving_s": max((f["seconds"] for f in theirs), default=0.0),
    }


def go(
    mode: Mode, sizes: Sequence[int], args: argparse.Namespace, every_s: float, steps: int = 0
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[int, float]]:
    """Train in this mode with these numbers of ranks in turn. Return (changes, account, losses by
    step).
    """
    width, layers = SHAPES[args.params_m]
    state, changes = tensors_of(width, layers), []
    with tempfile.TemporaryDirectory(prefix="mt-sharded-", dir=args.folder) as folder:
        root = Path(folder)
        measured = disk_bandwidth if mode.on_disk else network_bandwidth
        bandwidth = measured(root, sum(t.rows * t.row_bytes for t in state))
        training, logs = begin(mode.kind, root, max(sizes), args)
        try:
            training.begin(sizes[0])
            start = partial(settled, world=sizes[0], since=0.0, steps=args.settled)
            until(lambda: start(logs.look()), f"it trains on {sizes[0]}", args.patience_s)
            began = time.time()
            time.sleep(every_s)
            for old, new in itertools.pairwise(sizes):
                at = time.time()
                training.resize(new)
                there = partial(settled, world=new, since=at, steps=args.settled)
                until(
                    lambda there=there: there(logs.look()), f"it trains on {new}", args.patience_s
                )
                ended = time.time()
                result = changed(root, old, new, (at, ended), state, mode)
                took = pause(finished(logs.look()), at, ended)
                changes.append({"event": f"{old} to {new}", "pause_s": took, "to": new, **result})
                changes[-1]["bandwidth"] = bandwidth
                time.sleep(max(0.0, at + every_s - time.time()))
            over_at = time.time()
            until(
                lambda: max(losses(logs.folder), default=0) >= steps,
                f"{steps} steps",
                args.patience_s,
            )
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{training.last_words()}") from None
        finally:
            training.stop()
        lines = logs.look()
        usual, samples = usual_steps(lines), count(lines)
        for change in changes:
            change["step_s"] = usual.get(change.pop("to"), 0.0)
            change["stopped_s"] = max(0.0, change["pause_s"] - change["step_s"])
        account = {
            "goodput": good_time(lines, began, over_at),
            "seconds": over_at - began,
            "repeated": samples.repeated,
            "lost": samples.lost,
        }
        return changes, account, losses(logs.folder)


def walk(sizes: Sequence[int], changes: int, seed: int = 0) -> list[int]:
    """Return a trace of ``count`` changes between the smallest and the largest of ``sizes``."""
    dice, path = random.Random(seed), [sizes[0]]
    while len(path) <= changes:
        path.append(dice.choice([n for n in range(min(sizes), max(sizes) + 1) if n != path[-1]]))
    return path


def measure(
    name: str, args: argparse.Namespace, plain: dict[int, float], say: Console
) -> dict[str, Any]:
    """Return one mode's row. Raises RuntimeError."""
    mode = MODES[name]
    by_event: dict[str, list[dict[str, Any]]] = {}
    difference, row = 0.0, {"mode": name}
    for _ in range(args.repeats):
        changes, account, curve = go(mode, args.sizes, args, args.every_s, args.loss_steps)
        for number, change in enumerate(changes, 1):
            by_event.setdefault(f"{number}: {change['event']}", []).append(change)
        say.print(f"{name}: {[round(c['pause_s'], 2) for c in changes]} s", highlight=False)
        if plain:
            difference = max(difference, apart(curve, plain))
        row["samples_repeated"], row["samples_lost"] = account["repeated"], account["lost"]
    events = []
    for event, results in by_event.items():
        middle = {k: statistics.median(f[k] for f in results) for k in results[0] if k != "event"}
        events.append(
            {
                "event": event,
                **middle,
                "moved_over_least": middle["moved"] / middle["least"] if middle["least"] else 0.0,
                "pause_over_wire": over(middle["pause_s"], middle["moved"], middle["bandwidth"])
                if middle["moved"]
                else 0.0,
            }
        )
    row |= {"events": events, "loss_apart": difference if plain else None}
    if args.changes:
        try:
            changes, account, _ = go(mode, walk(args.sizes, args.changes), args, args.every_s)
        except RuntimeError as error:  # keep the measurements so far
            print(error, file=sys.stderr)
            row["trace_failed"] = str(error).splitlines()[0]
            return row
        account["pause_s"] = statistics.median(c["pause_s"] for c in changes)
        row["trace"] = account
    return row


def show(rows: Sequence[dict[str, Any]], say: Console) -> None:
    """Return two tables."""
    table = Table("mode", "change", "pause s", "stopped s", "moved MB", "least MB")
    table.add_column("moved / least")
    for column in ("pause / wire", "cpu s", "peak MB", "allowed MB"):
        table.add_column(column)
    for row in rows:
        if "why" in row:
            table.add_row(row["mode"], row["why"])
            continue
        for e in row["events"]:
            table.add_row(
                row["mode"],
                e["event"],
                f"{e['pause_s']:.2f}",
                f"{e['stopped_s']:.2f}",
                f"{e['moved'] / 1e6:.1f}" if e["moved"] else "-",
                f"{e['least'] / 1e6:.1f}",
                f"{e['moved_over_least']:.2f}" if e["moved"] else "-",
                f"{e['pause_over_wire']:.1f}" if e["moved"] else "-",
                f"{e['cpu_s']:.2f}" if e["cpu_s"] else "-",
                f"{e['peak'] / 1e6:.0f}",
                f"{e['allowed'] / 1e6:.0f}",
            )
    say.print(table)
    table = Table("mode", "goodput", "median pause s", "repeated", "lost", "loss apart")
    for row in rows:
        if "why" in row:
            continue
        trace = row.get("trace")
        table.add_row(
            row["mode"],
            f"{trace['goodput']:.3f}" if trace else "-",
            f"{trace['pause_s']:.2f}" if trace else "-",
            str(row["samples_repeated"]),
            str(row["samples_lost"]),
            "-" if row["loss_apart"] is None else f"{row['loss_apart']:.1e}",
        )
    say.print(table)


def main() -> None:
    """Run, and print tables (stderr) and, with --json, one object (stdout)."""
    end_in_order()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument(
        "--params-m", type=int, choices=list(SHAPES), default=10, help="millions of parameters"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 4, 6, 8])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--changes", type=int, default=20, help="of the trace; 0: no trace")
    parser.add_argument("--loss-steps", type=int, default=200, help="0: no comparison")
    parser.add_argument("--undisturbed-ranks", type=int, default=2)
    parser.add_argument("--every-s", type=float, default=5.0, help="seconds between changes")
    parser.add_argument("--step-s", type=float, default=0.0, help="sleep in every step")
    parser.add_argument("--settled", type=int, default=5, help="steps until a change is over")
    parser.add_argument("--snapshot-every-s", type=float, default=60.0)
    parser.add_argument("--replicate-every", type=int, default=0, help="steps; 0: no replicas")
    parser.add_argument("--patience-s", type=float, default=600.0)
    parser.add_argument("--folder", type=Path, help="of the snapshots (a file system to measure)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    say = Console(stderr=True)
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    load, begun = os.getloadavg()[0], time.monotonic()
    plain = undisturbed(args) if args.loss_steps else {}
    rows: list[dict[str, Any]] = []
    for name in args.modes:
        if MODES[name].missing:
            rows.append({"mode": name, "why": MODES[name].missing})
            continue
        try:
            rows.append(measure(name, args, plain, say))
            show(rows[-1:], say)
            say.print(f"{time.monotonic() - begun:.0f} s by now", highlight=False)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            rows.append({"mode": name, "why": str(error).splitlines()[0]})
    show(rows, say)
    if args.json:
        machine = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_before": load,
            "load_after": os.getloadavg()[0],
        }
        setting = {k: str(v) for k, v in vars(args).items() if k not in ("json", "modes")}
        print(json.dumps({"machine": machine, "setting": setting, "rows": rows}))


if __name__ == "__main__":
    main()
