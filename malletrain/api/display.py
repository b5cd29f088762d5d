"""The display of a job in a notebook: its state, and plots of its scale and of a metric over time.
Pure: views in, HTML out; every text of a script or a user is escaped.

This module draws the plots as SVG, so that no plotting package is needed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from html import escape

from malletrain.api.series import MetricSeries
from malletrain.protocol.views import JobDetail, RescaleView

WIDTH, HEIGHT, EDGE = 360, 96, 4
"""Size of a plot and width of its empty border, pixels."""
PREFERRED = ("loss", "train_loss", "val_loss", "accuracy")
"""Metrics that are shown before others."""
COLOURS = {
    "running": "#2e7d32",
    "profiling": "#1565c0",
    "queued": "#616161",
    "suspended": "#ef6c00",
    "completed": "#2e7d32",
    "failed": "#c62828",
    "cancelled": "#616161",
}
Point = tuple[float, float]


def job_html(detail: JobDetail, metrics: Mapping[str, MetricSeries], now: float) -> str:
    """Returns the job as HTML.

    Args:
        detail: the details of the job.
        metrics: its metrics over time; one of them is drawn.
        now: seconds since the epoch, at which the plots of an unfinished job end.
    """
    job = detail.job
    end = job.ended or now
    facts = [
        ("State", f"{job.state}{f': {job.reason}' if job.reason else ''}"),
        ("Nodes", f"{len(job.nodes)} of {job.min_nodes}:{job.max_nodes}"),
        ("Samples", f"{job.samples:,.0f}, now {job.rate:,.1f}/s"),
        ("Submitted", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.submitted))),
    ]
    facts += [(name, f"{value:.6g}") for name, value in sorted(job.metrics.items())[:8]]
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in facts
    )
    pictures = _picture("nodes", scale(detail.rescales, end, bool(job.nodes)), steps=True)
    if name := shown(metrics):
        series = metrics[name]
        pictures += _picture(name, list(zip(series.times, series.values, strict=True)))
    colour = COLOURS.get(job.state, "#616161")
    return (
        f"<div><b>{escape(job.name)}</b> ({escape(job.id)}) of {escape(job.owner)} "
        f'<span style="color:{colour}">&#9679; {escape(job.state)}</span>'
        f"<table>{rows}</table>{pictures}</div>"
    )


def scale(rescales: Sequence[RescaleView], end: float, holds: bool) -> list[Point]:
    """Returns the number of nodes over time as (time, nodes), up to ``end``; ``holds``: whether the
    job has nodes then."""
    points = [(step.ended or step.began, float(step.to_nodes)) for step in rescales]
    if not points:
        return []
    return [(points[0][0], 0.0), *points, (max(end, points[-1][0]), points[-1][1] * holds)]


def shown(metrics: Mapping[str, MetricSeries]) -> str:
    """Returns the name of the metric to plot: the first preferred one, else the one with most
    values."""
    plottable = [name for name in metrics if len(metrics[name]) > 1]
    preferred = [name for name in PREFERRED if name in plottable]
    return (preferred or sorted(plottable, key=lambda name: -len(metrics[name])) or [""])[0]


def _picture(title: str, points: Sequence[Point], *, steps: bool = False) -> str:
    """Returns a line plot as SVG, scaled to the range of its times and values."""
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) < 2:
        return ""
    (begin, end), values = (points[0][0], points[-1][0]), [value for _, value in points]
    low, high = (0.0 if steps else min(values)), max(values)
    span, height = (end - begin) or 1.0, (high - low) or 1.0

    def place(at: float, value: float) -> str:
        x = EDGE + (WIDTH - 2 * EDGE) * (at - begin) / span
        y = HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * (value - low) / height
        return f"{x:.1f},{y:.1f}"

    corners = []
    for number, (at, value) in enumerate(points):
        if steps and number:
            corners.append(place(at, values[number - 1]))
        corners.append(place(at, value))
    caption = f"{title}: {low:.4g} to {high:.4g} in {end - begin:.0f} s"
    return (
        f'<figure style="display:inline-block;margin:4px"><svg role="img" aria-label='
        f'"{escape(caption)}" width="{WIDTH}" height="{HEIGHT}" style="border:1px solid #bdbdbd">'
        f'<polyline fill="none" stroke="#1565c0" stroke-width="1.5" points="{" ".join(corners)}"/>'
        f"</svg><figcaption>{escape(caption)}</figcaption></figure>"
    )
