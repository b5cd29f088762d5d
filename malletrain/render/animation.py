"""The timeline as an animation: nodes become idle and busy, and jobs follow them.

One SVG of plain shapes and CSS: browsers animate it, also as an image on a page, unless the user
prefers reduced motion. The data are a :class:`malletrain.render.timeline.Timeline`; this module
decides only how they are drawn.
"""

from __future__ import annotations

from html import escape

from malletrain.render.palette import BUSY, IDLE, LEASED, colours
from malletrain.render.timeline import (
    IDLE_SPAN,
    JOB_SPAN,
    LEASED_SPAN,
    PAUSE_SPAN,
    Timeline,
    resample,
    tint,
)

WIDTH, LEFT, RIGHT = 900, 56, 14
ROW, GAP, TOP = 26, 5, 58
RATES = 110
POINTS = 240
"""Number of points of the throughput over the whole time."""
DURATION_S = 16
"""Duration of the animation, seconds; during the last fifth it stands still."""
STYLE = f"""
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
    height = bottom + RATES + 46

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
        f"<title>{escape(timeline.title)}</title><style>{STYLE}</style>",
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
    step = (timeline.end - timeline.begin) / POINTS
    grid = [timeline.begin + k * step for k in range(POINTS + 1)]
    below, areas = [0.0] * len(grid), []
    for series in timeline.series:
        above = [low + rate for low, rate in zip(below, resample(series, grid), strict=True)]
        areas.append((series.job, below, above))
        below = above
    most = max([*below, 1e-9])
    across = [LEFT + k * (WIDTH - LEFT - RIGHT) / POINTS for k in range(POINTS + 1)]

    def path(low: list[float], high: list[float]) -> str:
        upper_edge = [
            f"{x:.1f} {top + RATES * (1 - value / most):.1f}"
            for x, value in zip(across, high, strict=True)
        ]
        lower_edge = [
            f"{x:.1f} {top + RATES * (1 - value / most):.1f}"
            for x, value in zip(across[::-1], low[::-1], strict=True)
        ]
        return f"M{'L'.join(upper_edge)}L{'L'.join(lower_edge)}Z"

    return [
        f'<path d="{path(low, high)}" fill="{colour.get(job, LEASED)}"/>'
        for job, low, high in areas
    ]
