"""One training and one trace of joins, leaves and losses under MalleTrain and beside others.

    python -m benchmarks.peers [--contenders live restart torchft torchrun torchrun-short ray
    ray-torchft] [--trace join leave lose join] [--times 1] [--nodes 2] [--model-mb 10]
    [--repeats 1] [--every-s 10] [--checkpoint-every-s 2] [--minutes inf] [--json]

MalleTrain in live and in restart mode, torchft, plain torchrun (c10d rendezvous and a checkpoint
file; ``torchrun-short`` with its times set short) and Ray Train's elastic mode train the same model
(benchmarks/peers_training.py: a constant global batch, a sleep in every step) on virtual nodes of
this machine, and go through the same changes. A change is followed by the next one when the
training has settled at the new number of nodes and ``--every-s`` seconds have passed since.
``--times`` repeats the trace within a run: ``--nodes 3 --trace lose join --times 1000 --every-s 0
--checkpoint-every-s inf`` is a thousand losses of a training whose state is only in the memory of
the other nodes (live mode and torchft); with ``--minutes`` it ends earlier, after a whole pass.
``ray-torchft`` is Ray Train with torchft's replica groups, whose number is fixed: it needs a trace
that never exceeds ``--nodes``, such as ``--nodes 3 --trace lose join leave join``.

* pause: the longest time without a finished step, from the last one before the change. It contains
  one step.
* repeated, lost: samples trained on again, and passed over, counted from each rank's own log
  (benchmarks/peers_account.py).
* goodput: different samples a second over the whole trace, beside plain torchrun that nobody
  disturbs, in the same run; a machine that was busier at the one than at the other shows in it.
* good time: the part of the time that the steps take by themselves at the contender's own pace,
  each step counted once, which other work on the machine disturbs less.

torchft and Ray are installed into environments of their own below ~/.cache/malletrain/benchmarks
(some 0.5 GB, once); one that cannot be had is said so, with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
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
from benchmarks.peers_account import (
    Line,
    Logs,
    count,
    finished,
    good_time,
    goodput,
    kept_between,
    pause,
)
from benchmarks.peers_account import step_s as usual_step_s
from benchmarks.peers_contenders import PEERS, Peer, Undisturbed
from benchmarks.peers_environments import PACKAGES, NotInstalled
from benchmarks.rescale_modes import until

SETTLED_STEPS = 20
"""Number of steps of rank 0 at the new number of ranks after which a change is over."""
MOVES = {"join": 1, "leave": -1, "lose": -1}


def settled(
    lines: Sequence[Sequence[Line]], world: int, since: float, steps: int = SETTLED_STEPS
) -> bool:
    """Return whether the newest steps after ``since`` are all at this number of ranks."""
    done = [d for d in finished(lines) if d.time > since]
    newest = [d for d in done if d.rank == 0][-steps:]
    if len(newest) < steps:
        return False
    return all(d.world == world for d in done if d.time >= newest[0].time)


def made(kind: type[Peer], root: Path, most: int, args: argparse.Namespace) -> tuple[Peer, Logs]:
    """A contender before its training, and its logs."""
    folder = root / "logs"
    folder.mkdir()
    arguments = [str(folder), "--mb", str(args.model_mb), "--step-s", str(args.step_s)]
    arguments += ["--checkpoint", str(root / "checkpoint"), "--max-ranks", str(most)]
    arguments += ["--checkpoint-every-s", str(args.checkpoint_every_s)]
    peer: Any = kind
    return peer(root, most, arguments), Logs(folder)


def undisturbed(args: argparse.Namespace) -> dict[str, float]:
    """Return the samples per second and the duration of a step of plain torchrun on the initial
    number of nodes.
    """
    with tempfile.TemporaryDirectory(prefix="mt-peers-") as folder:
        peer, logs = made(Undisturbed, Path(folder), args.nodes, args)
        try:
            peer.begin(args.nodes)
            until(lambda: settled(logs.look(), args.nodes, 0.0), "the undisturbed training settled")
            began = time.time()
            time.sleep(args.undisturbed_s)
            ended = time.time()
        finally:
            peer.stop()
        lines = logs.look()
    samples = kept_between(lines, began, ended)
    step = usual_step_s([d for d in finished(lines) if d.time > began])
    return {"samples_per_s": samples / (ended - began), "step_s": step}


def trace(name: str, args: argparse.Namespace, rate: float, say: Console) -> dict[str, Any]:
    """Run one contender through the whole trace once. Raises NotInstalled, RuntimeError."""
    moves = [*args.trace] * args.times
    changes = [MOVES[move] for move in moves]
    most = max(itertools.accumulate(changes, initial=args.nodes))
    events = []
    with tempfile.TemporaryDirectory(prefix="mt-peers-") as folder:
        peer, logs = made(PEERS[name], Path(folder), most, args)
        try:
            world = args.nodes
            peer.begin(world)
            until(lambda: settled(logs.look(), world, 0.0), f"{name} trains on {world}")
            began = time.time()
            time.sleep(args.every_s)
            for number, (move, by) in enumerate(zip(moves, changes, strict=True), 1):
                at, world = time.time(), world + by
                if number % 100 == 0:
                    say.print(f"{name}: {number} of {len(moves)} changes", highlight=False)
                getattr(peer, move)()
                over_when = partial(lambda world, at: settled(logs.look(at), world, at), world, at)
                until(over_when, f"{name}: {move} to {world} is over")
                over = time.time()
                time.sleep(max(0.0, at + args.every_s - over))
                events.append((move, at, time.time(), over - at))
                if number % len(args.trace) == 0 and over - began >= 60 * args.minutes:
                    break
            ended = time.time()
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{peer.last_words()}") from None
        finally:
            peer.stop()
        lines = logs.look()
    done, samples = finished(lines), count(lines)
    pauses = {
        f"{number} {move}": round(pause(done, at, end), 3)
        for number, (move, at, end, _) in enumerate(events, 1)
    }
    shown = pauses if args.times == 1 else by_move([{"pauses_s": pauses}])
    say.print(f"{name}: {shown}, {samples}", highlight=False)
    return {
        "pauses_s": pauses,
        "settled_s": {f"{n} {e[0]}": round(e[3], 2) for n, e in enumerate(events, 1)},
        "seconds": round(ended - began, 1),
        "goodput": goodput(kept_between(lines, began, ended), ended - began, rate),
        "good_time": good_time(lines, began, ended),
        "step_s": usual_step_s([d for d in done if d.time > began]),
        "kept": samples.distinct,
        "repeated": samples.repeated,
        "lost": samples.lost,
    }


def by_move(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return move → number of such changes in all runs, and their median, 99th percentile and
    longest pause.
    """
    of_move: dict[str, list[float]] = {}
    for change, seconds in itertools.chain.from_iterable(run["pauses_s"].items() for run in runs):
        of_move.setdefault(change.split()[1], []).append(seconds)
    return {
        move: {
            "changes": len(times),
            "median_s": round(statistics.median(times), 3),
            "p99_s": sorted(times)[max(0, math.ceil(0.99 * len(times)) - 1)],
            "longest_s": max(times),
        }
        for move, times in of_move.items()
    }


def summary(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one contender's row: medians of times, sums of counts."""
    return {
        "contender": name,
        "version": " ".join(PACKAGES.get(name, ())),
        "pauses_s": {
            event: round(statistics.median(run["pauses_s"][event] for run in runs), 3)
            for event in runs[0]["pauses_s"]
        },
        "by_move": by_move(runs),
        "goodput": round(statistics.median(run["goodput"] for run in runs), 3),
        "good_time": round(statistics.median(run["good_time"] for run in runs), 3),
        "step_s": round(statistics.median(run["step_s"] for run in runs), 4),
        "repeated": sum(run["repeated"] for run in runs),
        "lost": sum(run["lost"] for run in runs),
        "runs": list(runs),
    }


def show(rows: Sequence[dict[str, Any]], args: argparse.Namespace, say: Console) -> None:
    """Print the table: a column for each change, or for each move if the trace is repeated."""
    events = [f"{number} {move}" for number, move in enumerate(args.trace, 1)]
    if args.times > 1:
        events = list(dict.fromkeys(args.trace))
    table = Table(
        "contender",
        *(f"{e}, s" for e in events),
        *("goodput", "good time", "repeated", "lost", "step s"),
    )
    for row in rows:
        if "why" in row:
            table.add_row(row["contender"], row["why"])
            continue
        if args.times > 1:
            pauses = [
                "{median_s:.2f}, p99 {p99_s:.2f}, longest {longest_s:.2f}".format(
                    **row["by_move"][event]
                )
                for event in events
            ]
        else:
            pauses = [f"{row['pauses_s'][event]:.2f}" for event in events]
        table.add_row(
            row["contender"],
            *pauses,
            f"{row['goodput']:.3f}",
            f"{row['good_time']:.3f}",
            str(row["repeated"]),
            str(row["lost"]),
            f"{row['step_s']:.3f}",
        )
    say.print(table)


def main() -> None:
    """Run, and print a table (stderr) and, with --json, one object (stdout)."""
    end_in_order()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contenders", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument(
        "--trace", nargs="+", choices=list(MOVES), default=["join", "leave", "lose", "join"]
    )
    parser.add_argument("--times", type=int, default=1, help="how often the trace is repeated")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="no pass of the trace begins after these"
    )
    parser.add_argument("--nodes", type=int, default=2, help="at the beginning")
    parser.add_argument("--model-mb", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--every-s", type=float, default=10.0, help="seconds between changes")
    parser.add_argument("--step-s", type=float, default=0.05, help="sleep in every step")
    parser.add_argument(
        "--checkpoint-every-s", type=float, default=2.0, help="inf: live mode writes none"
    )
    parser.add_argument("--undisturbed-s", type=float, default=15.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    changes = [MOVES[move] for move in args.trace] * args.times
    if min(itertools.accumulate(changes, initial=args.nodes)) < 1:
        parser.error("the trace leaves no node to train on")
    say = Console(stderr=True)
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    load = os.getloadavg()[0]
    plain = undisturbed(args)
    say.print(f"undisturbed: {plain['samples_per_s']:.1f} samples/s", highlight=False)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in args.contenders}
    why: dict[str, str] = {}
    begun = time.monotonic()
    for _ in range(args.repeats):
        for name in args.contenders:
            if name in why:
                continue
            try:
                runs[name].append(trace(name, args, plain["samples_per_s"], say))
                show([summary(name, runs[name])], args, say)
                say.print(f"{time.monotonic() - begun:.0f} s by now", highlight=False)
            except (NotInstalled, RuntimeError) as error:
                why[name] = str(error).splitlines()[0]
                print(error, file=sys.stderr)
    rows = [
        {"contender": name, "why": why[name]} if name in why else summary(name, runs[name])
        for name in args.contenders
    ]
    show(rows, args, say)
    if args.json:
        machine = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_before": load,
            "load_after": os.getloadavg()[0],
        }
        setting = {k: v for k, v in vars(args).items() if k not in ("json", "contenders")}
        print(json.dumps({"machine": machine, "setting": setting, "plain": plain, "rows": rows}))


if __name__ == "__main__":
    main()
