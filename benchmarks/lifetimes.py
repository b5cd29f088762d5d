"""Whether forecasts of how long gaps last yet can be believed: Brier score and reliability on a
trace, against the base rate.

    python -m benchmarks.lifetimes --trace summit_idle_week1.csv.gz --node-list summit_nodes.txt
    [--train 4] [--poll 60] [--every 300] [--out docs/images] [--json]

The trace is polled as the daemon polls a machine. For its first ``--train`` days the forecasts
learn; every ``--every`` seconds of the days after, each node in a gap gets the probability that it
is idle still after one minute to four hours, and the trace says what came of it. Gaps whose end the
trace does not show within that time are left out. Contenders:

* ``base rate``: how many of all gaps open at such moments of the training days lasted so long;
* ``age``: the life table of gap lengths given the gap's age (:mod:`scavenger.horizon`), which
  learns on;
* ``lifetimes, frozen``: :mod:`scavenger.lifetimes` as it was after the training days;
* ``lifetimes``: the same, learning on, as in the daemon.

Brier score: mean squared difference of probability and outcome; skill: by how much it is below that
of the base rate. Calibration error: mean distance of probability and frequency over ten equal
groups of forecasts. All gaps of one moment are not independent, so ``days`` gives the skill of each
day judged.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.pictures import COLOURS, finish
from scavenger.horizon import GapWatch, SurvivalEstimator
from scavenger.lifetimes import EDGES_S, Lifetimes
from scavenger.trace.files import read, read_names
from scavenger.trace.trace import Trace

Floats = npt.NDArray[np.float64]
DAY_S = 86400.0
BEGAN = 1612915732.0
"""2021-02-10 00:08:52 UTC, when the Summit week begins: hours and weekdays count from there."""
CONTENDERS = ("base rate", "age", "lifetimes, frozen", "lifetimes")
HEADS = ("base rate", "by age", "model, frozen after training", "model, learning on")
"""The same, as the table has them."""


def polls(trace: Trace, every_s: float) -> Iterator[tuple[float, dict[str, float]]]:
    """(time, node → since when it was seen idle): what polls of the machine show, epoch seconds."""
    since: dict[str, float] = {}
    idle = np.zeros(len(trace.names), dtype=bool)
    done = 0
    for now in np.arange(0.0, trace.duration_s, every_s).tolist():
        stop = int(np.searchsorted(trace.time, now, side="right"))
        changed = trace.node[done:stop].tolist()
        # A node that was busy in between is in another gap, as the scheduler's log would say.
        for node, becomes in zip(changed, trace.idle[done:stop].tolist(), strict=True):
            idle[node] = becomes
            since.pop(trace.names[node], None)
        for node in dict.fromkeys(changed):
            if idle[node]:
                since[trace.names[node]] = BEGAN + now
        done = stop
        yield BEGAN + now, since


def ends_of(trace: Trace) -> dict[str, tuple[list[float], list[float]]]:
    """Node → begins of its gaps, and their ends; infinite where the trace does not show it."""
    gaps = trace.gaps()
    results: dict[str, tuple[list[float], list[float]]] = {}
    for node, begin, end in zip(gaps.node.tolist(), gaps.start, gaps.end, strict=True):
        begins, ends = results.setdefault(trace.names[node], ([], []))
        begins.append(float(begin))
        ends.append(float(end) if end < trace.duration_s else np.inf)
    return results


def judge(trace: Trace, train_s: float, poll_s: float, every_s: float) -> dict[str, Any]:
    """Scores of all contenders over the time after ``train_s``."""
    horizons = np.array(EDGES_S[1:])
    ends = ends_of(trace)
    age, lifetimes, frozen = GapWatch(SurvivalEstimator()), Lifetimes(), None
    base: list[Floats] = []
    forecast_lists: dict[str, list[Floats]] = {name: [] for name in CONTENDERS[1:]}
    outcomes: list[Floats] = []
    days: list[Floats] = []
    spent = forecasts = 0.0
    due = BEGAN + every_s
    train_until, last = BEGAN + train_s, BEGAN + trace.duration_s
    for now, since in polls(trace, poll_s):
        began = time.process_time()
        lifetimes.update(since, now)
        spent += time.process_time() - began
        age.update(since, now)
        if now < due or not since:
            continue
        due = now + every_s
        nodes = sorted(since)
        remaining_s = np.array([_end(ends[n], now - BEGAN) for n in nodes]) - (now - BEGAN)
        outcome = np.where(
            horizons[None] <= last - now, remaining_s[:, None] > horizons[None], np.nan
        )
        if now < train_until:
            base.append(outcome)
            continue
        if frozen is None:
            frozen = copy.deepcopy(lifetimes.model)
        outcomes.append(outcome)
        days.append(np.full(len(nodes), (now - BEGAN) // DAY_S))
        by_age = {
            s: [age.estimator.survival(float(h), now - s) for h in horizons]
            for s in set(since.values())
        }
        forecast_lists["age"].append(np.array([by_age[since[n]] for n in nodes]))
        began = time.process_time()
        forecast_lists["lifetimes"].append(lifetimes.survival(nodes, now)[:, 1:])
        forecasts += time.process_time() - began
        rows = lifetimes.features.of(nodes, now)
        table = lifetimes.table(nodes, now)
        forecast_lists["lifetimes, frozen"].append(frozen.survival(rows, table)[:, 1:])
    if not outcomes or not base:
        raise SystemExit("The trace is too short: nothing is left to learn from, or to judge.")
    truth, day = np.concatenate(outcomes), np.concatenate(days)
    rates = np.nanmean(np.concatenate(base), axis=0)
    forecasts_by_model = {name: np.concatenate(parts) for name, parts in forecast_lists.items()}
    forecasts_by_model["base rate"] = np.broadcast_to(rates, truth.shape)
    rows = []
    for k, horizon in enumerate(horizons.tolist()):
        observed = ~np.isnan(truth[:, k])
        y = truth[observed, k]
        row: dict[str, Any] = {"horizon_s": horizon, "forecasts": len(y), "lasted": y.mean()}
        reference = np.mean((forecasts_by_model["base rate"][observed, k] - y) ** 2)
        for name in CONTENDERS:
            p = forecasts_by_model[name][observed, k]
            brier = np.mean((p - y) ** 2)
            skills = []
            for d in np.unique(day[observed]):
                on = day[observed] == d
                one = np.mean((forecasts_by_model["base rate"][observed, k][on] - y[on]) ** 2)
                skills.append(float(1 - np.mean((p[on] - y[on]) ** 2) / one))
            row[name] = {
                "brier": float(brier),
                "skill": float(1 - brier / reference),
                "days": skills,
                "calibration_error": _calibration(p, y)[0],
                "reliability": _calibration(p, y)[1],
            }
        rows.append(row)
    return {"rows": rows, "learning_s": spent, "forecast_s": forecasts}


def _end(gaps: tuple[list[float], list[float]], now: float) -> float:
    begins, ends = gaps
    k = int(np.searchsorted(begins, now, side="right")) - 1
    return ends[k]


def _calibration(p: Floats, y: Floats) -> tuple[float, list[list[float]]]:
    """The mean distance of said and seen over ten groups of equal size, and the groups."""
    groups = np.array_split(np.argsort(p, kind="stable"), 10)
    table = [[float(p[g].mean()), float(y[g].mean()), len(g)] for g in groups if len(g)]
    error = sum(n * abs(a - b) for a, b, n in table) / max(1, sum(n for _, _, n in table))
    return float(error), table


def tell(results: dict[str, Any]) -> list[str]:
    """The Markdown table: Brier score, by how much it is better than the base rate's (on each of
    the days judged), and the calibration error.
    """
    head = "| idle still after | so many were | " + " | ".join(HEADS) + " |"
    lines = [head, "|---" * (2 + len(CONTENDERS)) + "|"]
    for row in results["rows"]:
        cells = []
        for name in CONTENDERS:
            one = row[name]
            days = ", ".join(f"{100 * s:+.0f}" for s in one["days"])
            cell = f"{one['brier']:.4f}"
            if name != "base rate":
                cell += f", {100 * one['skill']:+.1f} % ({days})"
            cells.append(f"{cell}; off {100 * one['calibration_error']:.1f} %")
        cells = [f"{row['horizon_s'] / 60:g} min", f"{100 * row['lasted']:.1f} %", *cells]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def draw(results: dict[str, Any], path: Path) -> None:
    """Brier scores by horizon, and reliability at four of them."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9.6, 3.8), dpi=100, layout="constrained")
    left_axes, right = picture.subplots(1, 2)
    minutes = [row["horizon_s"] / 60 for row in results["rows"]]
    for colour, name in zip(COLOURS, CONTENDERS, strict=False):
        left_axes.plot(
            minutes,
            [r[name]["brier"] for r in results["rows"]],
            color=colour,
            marker="o",
            label=name,
        )
    left_axes.set_xscale("log")
    left_axes.set(xlabel="minutes ahead", ylabel="Brier score", ylim=(0, None))
    left_axes.set_xticks(minutes, [f"{m:g}" for m in minutes])
    left_axes.legend(frameon=False)
    right.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    chosen = [r for r in results["rows"] if r["horizon_s"] in (120.0, 600.0, 3600.0)]
    for colour, row in zip(COLOURS, chosen, strict=False):
        table = row["lifetimes"]["reliability"]
        right.plot(
            [a for a, _, _ in table],
            [b for _, b, _ in table],
            color=colour,
            marker="o",
            label=f"{row['horizon_s'] / 60:g} min",
        )
    right.set(xlabel="said: idle still with probability", ylabel="seen", xlim=(0, 1), ylim=(0, 1))
    right.legend(frameon=False)
    finish(picture, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--node-list", type=Path)
    parser.add_argument("--train", type=float, default=4.0, metavar="DAYS")
    parser.add_argument("--poll", type=float, default=60.0, metavar="S")
    parser.add_argument("--every", type=float, default=300.0, metavar="S")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    trace = read(args.trace, names=read_names(args.node_list) if args.node_list else None)
    results = judge(trace, args.train * DAY_S, args.poll, args.every)
    print(json.dumps(results) if args.json else "\n".join(tell(results)))
    print(
        f"processor time: learning {results['learning_s']:.1f} s, "
        f"forecasts {results['forecast_s']:.1f} s",
        file=sys.stderr,
    )
    draw(results, args.out / "lifetimes.png")


if __name__ == "__main__":
    main()
