"""The timeline picture: nodes × time coloured by job, throughput per job below. Also as an
animation: nodes become idle and busy, and jobs follow them.

:class:`Timeline` holds the data; the caller provides them (the demo, an exported audit log).
:func:`draw` writes them as a PNG file. It imports matplotlib (extra ``demo``) and needs no display.
:func:`animation` writes one SVG of plain shapes and CSS: browsers animate it, also as an image on a
page, unless the user prefers reduced motion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from malletrain.render.palette import BUSY, IDLE, LEASED, MARK, colours

IDLE_SPAN, LEASED_SPAN, JOB_SPAN, PAUSE_SPAN = "idle", "leased", "job", "pause"
"""Kinds of span. ``idle``: neither the main scheduler nor MalleTrain uses the node. ``leased``:
MalleTrain has a lease on it. ``job``: a job holds it and processes samples. ``pause``: a job holds
it and processes none.
"""
MAX_HATCHED_ROWS = 64
"""With more nodes than this, rows are too thin for hatches and marks."""


@dataclass(frozen=True)
class Span:
    """One node in one state from ``start`` to ``end`` (seconds). ``job`` is set for the kinds
    ``job`` and ``pause``.
    """

    node: str
    start: float
    end: float
    kind: str
    job: str = ""


@dataclass(frozen=True)
class PreemptionMark:
    """The main scheduler preempted the lease on ``node`` at ``time``. ``notice``: whether it gave
    notice."""

    node: str
    time: float
    notice: bool = True


@dataclass(frozen=True)
class ThroughputSeries:
    """Throughput of one job: samples/s at ``times`` (seconds)."""

    job: str
    times: tuple[float, ...]
    rates: tuple[float, ...]


@dataclass(frozen=True)
class Timeline:
    """The history of nodes and jobs from ``begin`` to ``end``. All times are seconds of one clock;
    the time axis starts at 0.

    ``nodes`` are the rows from top to bottom, ``jobs`` the order of the legend. Where a node has no
    span, the main scheduler uses it. Kinds are drawn in the order idle, leased, job, pause; a later
    kind covers an earlier one. ``outages``: (begin, end) of each interval in which the daemon was
    down.
    """

    nodes: tuple[str, ...]
    jobs: tuple[str, ...]
    begin: float
    end: float
    spans: tuple[Span, ...]
    marks: tuple[PreemptionMark, ...] = ()
    series: tuple[ThroughputSeries, ...] = ()
    outages: tuple[tuple[float, float], ...] = ()
    title: str = ""


def resample(series: ThroughputSeries, grid: Sequence[float]) -> list[float]:
    """Return the rate at each time of ``grid`` (ascending): the last value at or before it, or 0
    before the first value.
    """
    out, k, value = [], 0, 0.0
    for t in grid:
        while k < len(series.times) and series.times[k] <= t:
            value = series.rates[k]
            k += 1
        out.append(value)
    return out


def tint(colour: str, share: float) -> str:
    """Return ``colour`` (#rrggbb) mixed with white; a ``share`` of 1 is the colour itself."""
    parts = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - (255 - p) * share):02X}" for p in parts)


def draw(timeline: Timeline, path: str | Path) -> Path:
    """Write the picture as a PNG file to ``path`` and return ``path``.

    Raises OSError if the file cannot be written and ImportError if matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colour = colours(timeline.jobs)
    rows = {name: k for k, name in enumerate(timeline.nodes)}
    height = min(9.0, max(2.0, 0.42 * len(rows)))
    figure = Figure(figsize=(12, height + 3.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[height, 2.2])
    _draw_nodes(top, timeline, rows, colour)
    _draw_throughput(bottom, timeline, colour)
    for begin, end in timeline.outages:
        for axes in (top, bottom):
            for moment in (begin, end):
                axes.axvline(
                    moment - timeline.begin, color=MARK, linestyle=":", linewidth=1.4, zorder=6
                )
    top.set_title(timeline.title or "Nodes and who used them", loc="left", fontsize=12)
    bottom.set_xlim(0, max(1e-6, timeline.end - timeline.begin))
    bottom.set_xlabel("time in seconds")
    figure.legend(
        handles=_legend_handles(timeline, colour),
        loc="outside lower center",
        ncols=5,
        fontsize=9,
        frameon=False,
    )
    figure.savefig(path, format="png")
    return Path(path)


def _draw_nodes(
    axes: Any, timeline: Timeline, rows: dict[str, int], colour: dict[str, str]
) -> None:
    rows_are_tall = len(rows) <= MAX_HATCHED_ROWS
    row_margin = 0.08 if rows_are_tall else 0.0
    axes.set_facecolor(BUSY)
    for kind in (IDLE_SPAN, LEASED_SPAN, JOB_SPAN, PAUSE_SPAN):
        groups: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for s in timeline.spans:
            if s.kind == kind and s.node in rows and s.end > s.start:
                groups.setdefault((s.job, rows[s.node]), []).append(
                    (s.start - timeline.begin, s.end - s.start)
                )
        for (job, row), pieces in groups.items():
            style: dict[str, Any] = {"linewidth": 0}
            if kind == IDLE_SPAN:
                style["facecolor"] = IDLE
            elif kind == LEASED_SPAN:
                style["facecolor"] = LEASED
            elif kind == JOB_SPAN:
                style["facecolor"] = colour.get(job, MARK)
            else:
                style |= {"facecolor": tint(colour.get(job, MARK), 0.35)}
                if rows_are_tall:
                    style |= {"hatch": "////", "edgecolor": colour.get(job, MARK)}
            axes.broken_barh(pieces, (row - 0.5 + row_margin, 1 - 2 * row_margin), **style)
    if rows_are_tall:
        for m in timeline.marks:
            if m.node in rows:
                axes.plot(
                    m.time - timeline.begin,
                    rows[m.node],
                    marker="v" if m.notice else "X",
                    color=MARK,
                    markeredgecolor="white",
                    markersize=9,
                    zorder=5,
                    clip_on=False,
                )
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    step = max(1, math.ceil(len(rows) / 24))
    axes.set_yticks(
        range(0, len(rows), step), [n for k, n in enumerate(timeline.nodes) if k % step == 0]
    )
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_throughput(axes: Any, timeline: Timeline, colour: dict[str, str]) -> None:
    duration_s = timeline.end - timeline.begin
    moments = sorted({t for s in timeline.series for t in s.times} | {timeline.begin, timeline.end})
    series = {s.job: s for s in timeline.series}
    names = [j for j in timeline.jobs if j in series]
    if names and duration_s > 0:
        axes.stackplot(
            [t - timeline.begin for t in moments],
            [resample(series[j], moments) for j in names],
            colors=[colour[j] for j in names],
            step="post",
        )
    axes.set_ylabel("samples/s\n(stacked)")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend_handles(timeline: Timeline, colour: dict[str, str]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=colour[j], label=j) for j in timeline.jobs]
    kinds = {s.kind for s in timeline.spans}
    if PAUSE_SPAN in kinds:
        handles.append(
            Patch(
                facecolor="#DDDDDD",
                edgecolor="#777777",
                hatch="////",
                label="job starts or rescales",
            )
        )
    handles.append(Patch(facecolor=BUSY, label="used by the main scheduler"))
    handles.append(Patch(facecolor=IDLE, edgecolor="#999999", label="idle"))
    if LEASED_SPAN in kinds:
        handles.append(Patch(facecolor=LEASED, label="leased, no job on it"))
    for notice, marker, label in (
        (True, "v", "preempted"),
        (False, "X", "preempted without notice"),
    ):
        if any(m.notice is notice for m in timeline.marks):
            handles.append(
                Line2D(
                    [], [], marker=marker, color=MARK, linestyle="none", markersize=8, label=label
                )
            )
    if timeline.outages:
        handles.append(
            Line2D(
                [], [], color=MARK, linestyle=":", linewidth=1.4, label="daemon killed, daemon back"
            )
        )
    return handles


WIDTH, LEFT, RIGHT = 900, 56, 14
ROW, GAP, TOP = 26, 5, 58
THROUGHPUT_HEIGHT = 110
THROUGHPUT_POINTS = 240
"""Number of points of the throughput over the whole time."""
DURATION_S = 16
"""Duration of the animation, seconds; during the last fifth it stands still."""
ANIMATION_STYLE = f"""
text {{ font: 13px system-ui, sans-serif; fill: #222; }}
.title {{ font-weight: 600; font-size: 15px; }}
.small {{ font-size: 11px; fill: #555; }}
#seen {{ transform-box: fill-box; transform-origin: 0 0; animation: pass {DURATION_S}s linear infinite; }}
@keyframes pass {{ from {{ transform: scaleX(0); }} 80%, to {{ transform: scaleX(1); }} }}
@media (prefers-reduced-motion: reduce) {{
  #seen {{ animation: none; }}
}}
"""  # noqa: E501


def animation(timeline: Timeline) -> str:
    """Return the animation as the text of an SVG file."""
    colour = colours(timeline.jobs)
    span_s = max(timeline.end - timeline.begin, 1e-9)
    top = {name: TOP + k * (ROW + GAP) for k, name in enumerate(timeline.nodes)}
    bottom = TOP + len(top) * (ROW + GAP)
    height = bottom + THROUGHPUT_HEIGHT + 46

    def x(moment: float) -> float:
        share = (moment - timeline.begin) / span_s
        return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT)

    shown = []
    fills = {IDLE_SPAN: IDLE, LEASED_SPAN: LEASED}
    for kind in (IDLE_SPAN, LEASED_SPAN, JOB_SPAN, PAUSE_SPAN):
        for span in timeline.spans:
            if span.kind != kind or span.node not in top:
                continue
            fill = fills.get(kind) or (
                colour[span.job] if kind == JOB_SPAN else tint(colour[span.job], 0.4)
            )
            start, end = x(span.start), x(span.end)
            shown.append(_rect(start, top[span.node], end - start, ROW, fill))
    for mark in timeline.marks:
        if mark.node in top:
            at, high = x(mark.time), top[mark.node]
            shown.append(f'<path d="M{at - 5:.1f} {high}h10l-5 9z" fill="#000"/>')
    shown += _rates(timeline, colour, bottom + 14)
    rows = [
        _rect(LEFT, high, WIDTH - LEFT - RIGHT, ROW, BUSY)
        + f'<text x="{LEFT - 8}" y="{high + 18}" text-anchor="end">{escape(name)}</text>'
        for name, high in top.items()
    ]
    legend, at = [], float(LEFT)
    for name, fill in [
        *((escape(job), colour[job]) for job in timeline.jobs),
        ("leased", LEASED),
        ("idle", IDLE),
        ("the main scheduler's", BUSY),
    ]:
        box = f'<rect x="{at:.0f}" y="34" width="12" height="12" fill="{fill}" stroke="#888"/>'
        legend.append(f'{box}<text class="small" x="{at + 17:.0f}" y="44">{name}</text>')
        at += 34 + 6.4 * len(name)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(timeline.title)}</title><style>{ANIMATION_STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text class="title" x="{LEFT}" y="22">{escape(timeline.title)}</text>',
        *legend,
        *rows,
        f'<clipPath id="until"><rect id="seen" x="{LEFT}" y="0" '
        f'width="{WIDTH - LEFT - RIGHT}" height="{height}"/></clipPath>',
        f'<g clip-path="url(#until)">{"".join(shown)}</g>',
        f'<text class="small" x="{LEFT}" y="{height - 10}">'
        f"Samples a second, stacked; {span_s:.0f} s in all. A triangle: the main scheduler takes a "
        "node back.</text>",
        "</svg>\n",
    ]
    return "\n".join(parts)


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(0.0, width):.1f}" height="{height}" fill="{fill}"/>'
    )


def _rates(timeline: Timeline, colour: dict[str, str], top: float) -> list[str]:
    """Return the stacked throughput of the jobs as SVG."""
    step = (timeline.end - timeline.begin) / THROUGHPUT_POINTS
    grid = [timeline.begin + k * step for k in range(THROUGHPUT_POINTS + 1)]
    below, areas = [0.0] * len(grid), []
    for series in timeline.series:
        above = [low + rate for low, rate in zip(below, resample(series, grid), strict=True)]
        areas.append((series.job, below, above))
        below = above
    most = max([*below, 1e-9])
    across = [
        LEFT + k * (WIDTH - LEFT - RIGHT) / THROUGHPUT_POINTS for k in range(THROUGHPUT_POINTS + 1)
    ]

    def path(low: list[float], high: list[float]) -> str:
        upper_edge = [
            f"{x:.1f} {top + THROUGHPUT_HEIGHT * (1 - value / most):.1f}"
            for x, value in zip(across, high, strict=True)
        ]
        lower_edge = [
            f"{x:.1f} {top + THROUGHPUT_HEIGHT * (1 - value / most):.1f}"
            for x, value in zip(across[::-1], low[::-1], strict=True)
        ]
        return f"M{'L'.join(upper_edge)}L{'L'.join(lower_edge)}Z"

    return [
        f'<path d="{path(low, high)}" fill="{colour.get(job, LEASED)}"/>'
        for job, low, high in areas
    ]
