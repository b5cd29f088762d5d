"""The points of :mod:`benchmarks.figures` as Markdown tables and as pictures."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


STATEMENTS = {"exact": "true", "other": "another\nmodel's", "linear": "linear", "none": "none"}


@dataclass(frozen=True)
class Mean:
    """One point of the figure over all seeds: samples as a fraction of those without costs."""

    line: str
    x: str
    mean: float
    spread: float
    runs: tuple[dict[str, Any], ...]


def mean_of(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Gain:
    """Return the samples of MalleTrain (``policy``: with turns or without) divided by FreeTrain's,
    seed by seed, less 1.
    """

    length: str
    workload: str
    states: str
    policy: str
    mean: float
    spread: float
    theirs: Mean
    mine: Mean


def gains(means: Sequence[Mean]) -> list[Gain]:
    """Compare MalleTrain with FreeTrain, for each workload and each statement of owners."""
    paths = []
    for mine in (m for m in means if m.line != "FreeTrain"):
        length, workload, _ = mine.x.split()
        for theirs in (
            m for m in means if m.line == "FreeTrain" and m.x.startswith(f"{length} {workload} ")
        ):
            each = [
                a["samples"] / b["samples"] - 1.0
                for a, b in zip(mine.runs, theirs.runs, strict=True)
            ]
            paths.append(
                Gain(length, workload, theirs.x.split()[2], mine.line, *mean_of(each), theirs, mine)
            )
    return paths


def tell(figure: str, axis: str, means: Sequence[Mean]) -> list[str]:
    """Print the figure as a Markdown table. ``axis``: the property in which its points differ."""
    if figure == "3.10":
        lines = [
            "| jobs | owners state | FreeTrain | MalleTrain | | samples |",
            "|---|---|---|---|---|---|",
        ]
        for g in gains(means):
            gain = f"{100 * g.mean:+.1f} % ± {100 * g.spread:.1f}"
            turns = "with turns" if "turns" in g.policy else ""
            lines.append(
                f"| {g.length} {g.workload} | {g.states} | {_both(g.theirs)} | {_both(g.mine)} "
                f"| {turns} | {gain} |"
            )
        return lines
    names = list(dict.fromkeys(m.line for m in means))
    lines = [
        f"| {axis} | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for x in dict.fromkeys(m.x for m in means):
        cells = {m.line: f"{m.mean:.3f} ± {m.spread:.3f}" for m in means if m.x == x}
        lines.append(f"| {x} | " + " | ".join(cells.get(name, "") for name in names) + " |")
    return lines


def _both(m: Mean) -> str:
    """Return samples divided by those without costs, and by the bound for the jobs of each
    moment.
    """
    return f"{m.mean:.3f}, {statistics.fmean(r['fraction_of_ideal'] for r in m.runs):.3f}"


def draw(figure: str, axis: str, means: Sequence[Mean], path: Path) -> None:
    """Draw the figure as a small PNG. ``axis``: see :func:`tell`."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(6.4, 3.6), dpi=100, layout="constrained")
    if figure == "3.10":
        _draw_gains(picture, [g for g in gains(means) if g.policy == "MalleTrain"])
    else:
        axes = picture.subplots()
        for k, line in enumerate(dict.fromkeys(m.line for m in means)):
            mine = [m for m in means if m.line == line]
            axes.errorbar(
                [float(m.x) for m in mine], [m.mean for m in mine], yerr=[m.spread for m in mine],
                label=line, color=COLOURS[k], marker="os^"[k % 3], capsize=3, linewidth=1.2,
            )  # fmt: skip
        axes.set_xscale("log")
        ticks = [m.x for m in means if m.line == means[0].line]
        axes.set_xticks([float(x) for x in ticks], ticks)
        axes.minorticks_off()
        axes.set(xlabel=axis, ylabel="samples ÷ those without costs", ylim=(0, 1))
        axes.legend(frameon=False)
    finish(picture, path)


def _draw_gains(picture: Any, rows: Sequence[Gain]) -> None:
    """Draw bars by what owners state, a panel for each length of jobs."""
    lengths = list(dict.fromkeys(g.length for g in rows))
    for axes, length in zip(
        picture.subplots(1, len(lengths), squeeze=False)[0], lengths, strict=True
    ):
        for k, workload in enumerate(dict.fromkeys(g.workload for g in rows)):
            mine = [g for g in rows if g.length == length and g.workload == workload]
            at = [i + 0.4 * k - 0.2 for i in range(len(mine))]
            bars = axes.bar(
                at, [100 * g.mean for g in mine], 0.4, yerr=[100 * g.spread for g in mine],
                label=workload.upper(), color=COLOURS[k], capsize=2, error_kw={"linewidth": 0.8},
            )  # fmt: skip
            axes.bar_label(bars, [f"{round(100 * g.mean):+d}" for g in mine], fontsize=7, padding=2)
        axes.set_xticks(range(len(STATEMENTS)), STATEMENTS.values(), fontsize=8)
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.margins(y=0.1)
        axes.set_title(
            {"long": "ten jobs that go on", "stream": "jobs that end, ten at a time"}[length],
            fontsize=9,
        )
        axes.set_xlabel("curve stated by owners", fontsize=9)
    picture.axes[0].set_ylabel("MalleTrain's samples over FreeTrain's, %", fontsize=9)
    picture.axes[0].legend(frameon=False, fontsize=8, loc="upper left")


def finish(picture: Any, path: Path) -> None:
    """Apply the common style to a matplotlib figure, and write it."""
    for axes in picture.axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
        axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, metadata={"Software": None})
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB", file=sys.stderr)
