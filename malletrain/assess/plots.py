"""The plots of the report, as SVG text. Imports matplotlib (``pip install 'malletrain[demo]'``)
when drawing; needs no display.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from malletrain.assess.gaps import GapReport
from malletrain.assess.whatif import Case
from malletrain.render.palette import JOB_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN = JOB_COLOURS[0], JOB_COLOURS[1], JOB_COLOURS[2]
PINK, SKY, GREY = JOB_COLOURS[3], JOB_COLOURS[4], "#BDBDBD"


def idle_over_time(report: GapReport) -> str:
    """Plots idle nodes over the observation: mean and range."""
    figure, axes = _figure(2.6)
    hours = [h for h, *_ in report.over_time]
    unit, name = (24.0, "days") if report.hours > 72 else (1.0, "hours")
    at = [h / unit for h in hours]
    low, high = [a for _, a, _, _ in report.over_time], [b for *_, b in report.over_time]
    axes.fill_between(at, low, high, color=SKY, alpha=0.5, linewidth=0, label="from least to most")
    axes.plot(at, [m for _, _, m, _ in report.over_time], color=BLUE, linewidth=1.0, label="mean")
    axes.set(
        xlabel=f"{name} since the begin",
        ylabel="idle nodes",
        xlim=(0, report.hours / unit),
        ylim=(0, None),
    )
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    return _svg(figure, "Idle nodes over time: mean and span of each piece of the observation")


def gap_lengths(report: GapReport) -> str:
    """Plots the histogram of gap lengths: number of gaps, and their idle node-hours."""
    figure, axes = _figure(2.6)
    total, hours = (
        max(1, sum(b.gaps for b in report.bins)),
        max(1e-9, sum(b.node_hours for b in report.bins)),
    )
    at = range(len(report.bins))
    axes.bar(
        [k - 0.2 for k in at],
        [100 * b.gaps / total for b in report.bins],
        0.4,
        color=GREY,
        label="of the gaps",
    )
    axes.bar(
        [k + 0.2 for k in at],
        [100 * b.node_hours / hours for b in report.bins],
        0.4,
        color=BLUE,
        label="of the idle node-hours",
    )
    axes.set_xticks(list(at), [_span(b.from_s, b.to_s) for b in report.bins])
    axes.set(xlabel="length of the gap", ylabel="%")
    axes.legend(frameon=False)
    return _svg(figure, "Lengths of gaps: share of the gaps and of the idle node-hours by length")


def use_over_time(case: Case) -> str:
    """Plots idle nodes, and nodes with a job, over the simulated time."""
    figure, axes = _figure(2.6)
    unit, name = (24.0, "days") if case.result.hours > 72 else (1.0, "hours")
    at = [h / unit for h, _, _ in case.series]
    axes.fill_between(
        at, [idle for _, idle, _ in case.series], color=GREY, linewidth=0, step="post", label="idle"
    )
    axes.fill_between(
        at,
        [used for _, _, used in case.series],
        color=GREEN,
        linewidth=0,
        step="post",
        label="with a training job",
    )
    axes.set(
        xlabel=f"{name} simulated", ylabel="nodes", xlim=(0, max(at, default=1.0)), ylim=(0, None)
    )
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    return _svg(figure, "Idle nodes and nodes with a training job over the simulated time")


def where_it_went(cases: Sequence[Case]) -> str:
    """Plots the use of the idle node-hours in each case."""
    figure, axes = _figure(0.8 + 0.42 * len(cases))
    parts = (
        ("harvested", GREEN, "harvested_fraction"),
        ("starting", SKY, "start_fraction"),
        ("rescaling", ORANGE, "rescale_fraction"),
        ("after preemptions", PINK, "preemption_fraction"),
    )
    offsets = [0.0] * len(cases)
    names = [c.name for c in cases]
    for label, colour, part in parts:
        widths = [100 * getattr(c.result, part) for c in cases]
        axes.barh(names, widths, left=offsets, color=colour, label=label, height=0.6)
        offsets = [a + b for a, b in zip(offsets, widths, strict=True)]
    axes.barh(
        names,
        [max(0.0, 100 - a) for a in offsets],
        left=offsets,
        color=GREY,
        label="not used",
        height=0.6,
    )
    axes.invert_yaxis()
    axes.set(xlabel="% of the idle node-hours", xlim=(0, 100))
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    return _svg(figure, "Where the idle node-hours went")


def _figure(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, height), layout="constrained")
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _svg(figure: Any, title: str) -> str:
    """Returns the figure as an SVG element for a page; the same figure gives the same text."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.hashsalt": title, "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    # Ids are unique in a figure but not between figures of one page.
    tag = re.sub(r"\W+", "-", title.lower())[:24]
    text = re.sub(r'(id="|url\(#|xlink:href="#)', rf"\g<1>{tag}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def _span(low: float, high: float) -> str:
    def word(seconds: float) -> str:
        return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds / 60:g} min"

    if low == 0:
        return f"< {word(high)}"
    return f"≥ {word(low)}" if math.isinf(high) else f"{word(low)}–\n{word(high)}"
