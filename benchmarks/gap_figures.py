"""The dissertation's Figures 3.7 to 3.9: statistics of the idle nodes of a machine.

    python -m benchmarks.figures 3.7 --trace week1.csv.gz --node-list nodes.txt [--log KTH.swf.gz]
    python -m benchmarks.figures 3.8 …
    python -m benchmarks.figures 3.9 …

* ``3.7``: lengths of gaps (share of the gaps, and of the idle node-hours, below a length);
* ``3.8``: idle nodes over time;
* ``3.9``: both for the real trace, and for three traces with its statistics
  (:mod:`scavenger.trace.synthesis`).

``--trace``: a trace; ``--log``: the nodes that the jobs of a log left idle. Each machine has a
line; 3.9 uses the first. ``--days``: only that many days. :mod:`malletrain.assess.gaps` computes
the statistics.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.pictures import COLOURS, finish
from malletrain.assess.gaps import GapReport, gap_report
from malletrain.sim.idle import idle_nodes
from malletrain.sim.joblogs import read_log
from scavenger.trace import synthesis
from scavenger.trace.files import read, read_names
from scavenger.trace.trace import Trace

Floats = npt.NDArray[np.float64]
DRAWS = 3
QUARTILES = (0.25, 0.5, 0.75)
HOUR_S, DAY_S = 3600.0, 86400.0


@dataclass(frozen=True)
class Machine:
    """The idle nodes of one machine."""

    name: str
    trace: Trace
    report: GapReport

    def lengths(self) -> Floats:
        """Lengths of the gaps of which begin and end were observed, seconds, ascending."""
        gaps = self.trace.gaps()
        return np.sort(gaps.length[gaps.complete])

    def idle_spread(self) -> Floats:
        """Idle nodes as a share of the machine: 5th, 50th and 95th percentile over time."""
        times, counts = self.trace.idle_count()
        ends = np.append(times[1:], self.trace.duration_s)
        order = np.argsort(counts)
        passed = np.cumsum((ends - times)[order]) / self.trace.duration_s
        at = np.searchsorted(passed, (0.05, 0.5, 0.95))
        return np.asarray(counts[order][at] / len(self.trace.names))

    def row(self) -> dict[str, Any]:
        """Return the row of the table."""
        lengths, spread = self.lengths(), self.idle_spread()
        quarter = np.quantile(lengths, QUARTILES)
        return {
            "machine": self.name,
            "nodes": self.report.nodes,
            "days": round(self.report.hours / 24, 1),
            "gaps": self.report.gaps,
            "mean_s": round(float(lengths.mean())),
            **{
                f"q{100 * q:.0f}_s": round(float(x))
                for q, x in zip(QUARTILES, quarter, strict=True)
            },
            "short": round(float(np.mean(lengths < 600.0)), 3),
            "idle": round(self.report.idle_fraction, 4),
            **{f"idle_{n}": round(x, 4) for n, x in zip((5, 50, 95), spread.tolist(), strict=True)},
        }


def machines(args: argparse.Namespace) -> list[Machine]:
    """Return the requested machines."""
    traces = []
    if args.trace:
        names = read_names(args.node_list) if args.node_list else None
        traces.append((_name(args.trace), read(args.trace, names=names)))
    traces += [(_name(path), idle_nodes(read_log(path)).trace) for path in args.log]
    parts = [
        (name, t if args.days is None else t.window(0.0, min(t.duration_s, args.days * DAY_S)))
        for name, t in traces
    ]
    return [Machine(name, trace, gap_report(trace)) for name, trace in parts]


def _name(path: str) -> str:
    return Path(path).name.split(".")[0]


def synthetic_machines(real: Machine) -> list[Machine]:
    """Return traces with the statistics, length and number of nodes of the real one."""
    model = synthesis.like(real.trace)
    count, length = len(real.trace.names), real.trace.duration_s
    traces = [synthesis.synthesise(model, count, length, seed) for seed in range(DRAWS)]
    return [Machine(f"synthetic {k + 1}", t, gap_report(t)) for k, t in enumerate(traces)]


def _lengths(axes: Any, every: list[Machine], hours: bool = True) -> None:
    for k, machine in enumerate(every):
        lengths = machine.lengths()
        parts = [("gaps", np.arange(1, len(lengths) + 1) / len(lengths), "-")]
        if hours:
            parts.append(("idle node-hours", np.cumsum(lengths) / lengths.sum(), "--"))
        for label, part, style in parts:
            # as many points as a picture can show, and always the longest gaps
            few = np.linspace(0, len(lengths) - 1, 2000).astype(int)
            at = np.unique(np.concatenate((few, np.arange(len(lengths))[-300:])))
            colour = COLOURS[k % len(COLOURS)]
            text = f"{machine.name}, {label}" if hours else machine.name
            axes.plot(lengths[at], 100 * part[at], style, color=colour, label=text, linewidth=1.2)
    axes.set_xscale("log")
    ticks = {60: "1 min", 600: "10 min", 3600: "1 h", 6 * 3600: "6 h", DAY_S: "1 d"}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set(xlabel="length of the gap", ylabel="% below", xlim=(10, None), ylim=(0, 100))
    axes.legend(frameon=False, fontsize=8)


def _idle(axes: Any, machine: Machine, colour: str, *, band: bool = True) -> None:
    at = [hour / 24 for hour, *_ in machine.report.over_time]
    part = 100 / machine.report.nodes
    low, mean, high = ([part * each[k] for each in machine.report.over_time] for k in (1, 2, 3))
    if band:
        axes.fill_between(at, low, high, color=colour, alpha=0.25, linewidth=0)
    axes.plot(at, mean, color=colour, linewidth=0.9)
    axes.set(
        ylabel="% of nodes idle",
        title=f"{machine.name}: {machine.report.nodes:,} nodes",
        xlim=(0, machine.report.hours / 24),
        ylim=(0, None),
    )


def draw(which: str, every: list[Machine], path: Path) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    if which == "3.7":
        picture = Figure(figsize=(6.4, 3.8), dpi=100, layout="constrained")
        _lengths(picture.subplots(), every)
    elif which == "3.8":
        picture = Figure(figsize=(6.4, 2.3 * len(every)), dpi=100, layout="constrained")
        rows = picture.subplots(len(every), 1, squeeze=False)[:, 0]
        for k, (axes, machine) in enumerate(zip(rows, every, strict=True)):
            _idle(axes, machine, COLOURS[k])
        rows[-1].set_xlabel("days")
    else:
        picture = Figure(figsize=(6.4, 6.4), dpi=100, layout="constrained")
        below = picture.subplots(3, 1, height_ratios=(3, 2, 2))
        _lengths(below[0], every, hours=False)
        for k, axes in enumerate(below[1:]):
            _idle(axes, every[k], COLOURS[k])
        top = max(axes.get_ylim()[1] for axes in below[1:])
        for axes in below[1:]:
            axes.set_ylim(0, top)
        below[-1].set_xlabel("days")
    finish(picture, path)


def figure(which: str, args: argparse.Namespace) -> None:
    """Make one of the three figures."""
    every = machines(args)
    if which == "3.9":
        every = [every[0], *synthetic_machines(every[0])]
    rows = [machine.row() for machine in every]
    if which == "3.9":
        real = every[0].lengths()
        for row, machine in zip(rows, every, strict=True):
            row["distance"] = round(distance(real, machine.lengths()), 3)
    if args.json:
        print(json.dumps({"figure": which, "rows": rows}))
    else:
        print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
        for row in rows:
            print(
                "| "
                + " | ".join(
                    f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()
                )
                + " |"
            )
    draw(which, every, args.out / f"fig{which.replace('.', '-')}.png")


def distance(one: Floats, other: Floats) -> float:
    """Return the largest difference of the two distributions (Kolmogorov and Smirnov), 0 to 1."""
    at = np.concatenate((one, other))
    parts = [np.searchsorted(each, at, side="right") / len(each) for each in (one, other)]
    return float(np.abs(parts[0] - parts[1]).max())
