"""The report as one self-contained HTML file: text, tables, plots. Decides the content and its
order.

The plots (:func:`idle_over_time`, :func:`gap_lengths`, :func:`use_over_time`,
:func:`where_it_went`) are SVG text. They import matplotlib (extra ``demo``)
when they draw, and need no display.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from malletrain.assess.gaps import GapReport
from malletrain.assess.gpus import MIN_GAP_S, FragmentBin, GpuReport, Harvest
from malletrain.assess.sharing import SharingReport
from malletrain.assess.whatif import Case
from malletrain.protocol.counting import counted
from malletrain.render.palette import JOB_COLOURS
from malletrain.sim.idle import IdleBounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN = JOB_COLOURS[0], JOB_COLOURS[1], JOB_COLOURS[2]
PINK, SKY, GREY = JOB_COLOURS[3], JOB_COLOURS[4], "#BDBDBD"


def idle_over_time(report: GapReport) -> str:
    """Plot idle nodes over the observation: mean and range."""
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
    """Plot the histogram of gap lengths: number of gaps, and their idle node-hours."""
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
    """Plot idle nodes, and nodes with a job, over the simulated time."""
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
    """Plot the use of the idle node-hours in each case."""
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
    """Return the figure as an SVG element for a page; the same figure gives the same text."""
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


YEAR_H = 365.25 * 24

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}
h1{font-size:1.7rem;margin-bottom:.2rem}h2{font-size:1.2rem;margin-top:2rem;border-bottom:1px solid #ddd}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}td,th{padding:.25rem .6rem;border-bottom:1px solid #eee}
th{text-align:left;font-weight:600}tr>th:first-child{white-space:nowrap}td.n,th.n{text-align:right}
svg{width:100%;height:auto}.lead{font-size:1.15rem}
.note{color:#555;font-size:.9rem}code{background:#f4f4f4;padding:0 .2rem}
"""  # noqa: E501


@dataclass(frozen=True)
class Assessment:
    """The content of the report. ``source``: the log or trace that was read. ``window``: begin and
    end of the simulated part, hours of the observation. ``assumptions``: sentences. ``command``:
    the command that creates the report again.
    """

    source: str
    gaps: GapReport
    cases: tuple[Case, ...]
    """The simulations, with the requested settings first; empty if no node was ever idle."""
    window: tuple[float, float]
    assumptions: tuple[str, ...]
    command: str = ""
    gpus: GpuReport | None = None
    """The idle GPUs; None if the log does not say what jobs hold, or no host has a GPU."""
    bounds: IdleBounds | None = None
    """What the log leaves open about the idle nodes; None for a trace."""
    sharing: SharingReport | None = None
    """Jobs that share nodes; None for a trace."""

    @property
    def most_idle_mean(self) -> float:
        """Most nodes that can have been idle on average."""
        if self.bounds is None or self.bounds.equal:
            return self.gaps.idle_mean
        return self.bounds.most_node_s / (3600.0 * self.gaps.hours)

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return {
            "source": self.source,
            "gaps": self.gaps.to_dict(),
            "window_hours": list(self.window),
            "cases": [{"name": c.name, "what": c.what, **c.result.to_dict()} for c in self.cases],
            "assumptions": list(self.assumptions),
            **({} if self.gpus is None else self.gpus.to_dict()),
            **({} if self.bounds is None else {"idle_bounds": self.bounds.to_dict()}),
            **({} if self.sharing is None else {"sharing": self.sharing.to_dict()}),
        }


def verdict(assessment: Assessment) -> list[str]:
    """Return the result in a few sentences."""
    g = assessment.gaps
    gpus = [] if assessment.gpus is None else gpu_sentences(assessment.gpus)
    most = assessment.most_idle_mean
    machine = counted(g.nodes, "node")
    most_idle = f"{most:.1f} of {machine} ({100 * most / g.nodes:.1f} %)"
    is_open = f"{most:.1f}" != f"{g.idle_mean:.1f}"
    if not assessment.cases and is_open:
        return [
            f"The log leaves open whether nodes were idle during {_time(g.hours)}: none if each "
            f"job was on nodes of its own, {most_idle} on average if jobs shared nodes as far as "
            "they could. Nothing is simulated.",
            *gpus,
        ]
    if not assessment.cases:
        nothing = "whole nodes yield nothing." if gpus else "there is nothing to harvest."
        return [
            f"None of {machine} was idle at any time during {_time(g.hours)}: {nothing}",
            *gpus,
        ]
    r = assessment.cases[0].result
    per_year = g.idle_mean * r.harvested_fraction * YEAR_H
    window = assessment.window[1] - assessment.window[0]
    ran_out = r.jobs_completed == r.jobs and r.hours < window * 0.999
    lines = [
        f"On average {g.idle_mean:.1f} of {machine} ({100 * g.idle_fraction:.1f} %) were "
        f"idle during {_time(g.hours)}; "
        f"{100 * g.longer_than(600):.0f} % of the idle node-hours lie in gaps of ten minutes "
        "and more.",
        f"With {counted(r.jobs, 'job')} MalleTrain would have trained in "
        f"{100 * r.harvested_fraction:.0f} % of the idle node-hours: as much as "
        f"{r.equivalent_nodes * r.harvested_fraction:.1f} nodes of their own would, or about "
        f"{_thousands(per_year)} node-hours a year.",
        f"That is {100 * r.fraction_of_ideal:.0f} % of the samples that the same jobs could "
        "process at most: if changes of scale cost nothing, and the fastest of them always went "
        "before those that wait for their turn.",
    ]
    if is_open:
        lines.insert(
            1,
            f"Up to {most_idle} were idle if jobs shared nodes; what follows is of the fewest "
            "idle nodes that the log allows.",
        )
    if r.preemptions:
        often = r.hours * r.equivalent_nodes / r.preemptions
        times = counted(r.preemptions, "time")
        lines.append(f"Jobs lost nodes {times}, once in {often:.1f} idle node-hours.")
    if ran_out:
        lines.insert(
            1,
            f"The {counted(r.jobs, 'job')} ran out after {_time(r.hours)} of {_time(window)}: what "
            "follows is of that time, and there is room for more work (--jobs, --samples).",
        )
    return [*lines, *gpus]


def gpu_sentences(gpus: GpuReport) -> list[str]:
    """Return the result about GPUs in a few sentences."""
    idle = gpus.idle_gpu_hours
    partly, whole = gpus.idle_gpu_hours_partly_used_hosts, gpus.idle_gpu_hours_idle_hosts
    lines = [
        f"Of {gpus.gpus:,} GPUs on {gpus.hosts:,} hosts, {100 * gpus.idle_gpu_fraction:.1f} % of "
        f"the GPU-hours were idle: {partly:,.1f} on hosts that jobs use in part and {whole:,.1f} "
        "on hosts without a job."
    ]
    if idle:
        parts = [
            f"{harvest.gpu_hours:,.1f} ({100 * harvest.gpu_hours / idle:.0f} %) in slots of {slot}"
            for slot, harvest in gpus.slots
        ]
        nodes = gpus.whole_nodes.gpu_hours
        lines.append(
            f"Of these idle GPU-hours, leases could hold {', '.join(parts)}, and {nodes:,.1f} "
            f"({100 * nodes / idle:.0f} %) in whole nodes."
        )
    return lines


def gpu_tables(gpus: GpuReport) -> list[tuple[str, list[list[str]]]]:
    """Return (title, rows) of the tables about GPUs; the first row is the header."""
    edges = sorted({(b.from_s, b.to_s) for b in gpus.fragments})
    kinds = sorted({(b.host_idle, b.idle_gpus) for b in gpus.fragments})
    bins = {(b.host_idle, b.idle_gpus, b.from_s): b for b in gpus.fragments}
    fragments = [["idle GPUs of the host", *(_span(*each).replace("\n", "") for each in edges)]]
    for host_idle, count in kinds:
        cells = (bins.get((host_idle, count, low)) for low, _ in edges)
        name = f"{count}, no job" if host_idle else f"{count}"
        fragments.append([name, *map(_fragments, cells)])
    idle = gpus.idle_gpu_hours
    leases = [["lease", f"gaps > {MIN_GAP_S:g} s", "median", "GPU-hours", "of the idle"]]
    leases += [_lease(f"slot {slot}", harvest, idle) for slot, harvest in gpus.slots]
    leases.append(_lease("whole node", gpus.whole_nodes, idle))
    tables = [("What leases could hold", leases)]
    if kinds:
        title = "Fragments: GPU-hours (number of fragments) by the time the host has them idle"
        tables.append((title, fragments))
    return tables


def _fragments(cell: FragmentBin | None) -> str:
    return "" if cell is None else f"{cell.gpu_hours:,.1f} ({cell.fragments:,})"


def _lease(name: str, harvest: Harvest, idle_gpu_hours: float) -> list[str]:
    fraction = harvest.gpu_hours / idle_gpu_hours if idle_gpu_hours else 0.0
    return [
        name,
        f"{harvest.gaps:,}",
        "" if harvest.median_s is None else _minutes(harvest.median_s),
        f"{harvest.gpu_hours:,.1f}",
        f"{100 * fraction:.1f} %",
    ]


def page(assessment: Assessment) -> str:
    """Return the report as HTML. Raises ImportError without matplotlib."""
    g, cases = assessment.gaps, assessment.cases
    parts = [
        f"<h1>What would MalleTrain harvest?</h1><p class=note>{_e(assessment.source)}</p>",
        "".join(f"<p class=lead>{_e(line)}</p>" for line in verdict(assessment)),
        "<h2>Idle nodes</h2>",
        idle_over_time(g),
        _facts(g),
        *(_harvest(assessment) if cases else ()),
        *(() if assessment.gpus is None else _idle_gpus(assessment.gpus)),
        "<h2>What this rests on</h2>",
        "<ul>" + "".join(f"<li>{_e(line)}</li>" for line in assessment.assumptions) + "</ul>",
    ]
    if assessment.command:
        parts.append(f"<p class=note>Made by <code>{_e(assessment.command)}</code></p>")
    body = "\n".join(parts)
    head = (
        "<meta charset=utf-8><meta name=viewport "
        f"content='width=device-width'><title>MalleTrain: {_e(assessment.source)}</title>"
    )
    return (
        "<!doctype html><html "
        f"lang=en><head>{head}<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _harvest(assessment: Assessment) -> Sequence[str]:
    """Return the part about the simulations; only if there was an idle node."""
    g, cases = assessment.gaps, assessment.cases
    begin, end = assessment.window
    return (
        "<h2>How long gaps last</h2>",
        gap_lengths(g),
        "<p class=note>A training job pays for every change of its nodes, so that many short "
        "gaps yield less than few long ones.</p>",
        "<h2>What would be harvested</h2>",
        f"<p>Simulated: hours {begin:.0f} to {end:.0f} of the observation, by the planner that "
        "the daemon runs.</p>",
        use_over_time(cases[0]),
        _comparison(cases),
        where_it_went(cases),
    )


def _idle_gpus(gpus: GpuReport) -> Iterable[str]:
    """Yield the part about GPUs."""
    yield "<h2>Idle GPUs</h2>"
    for title, rows in gpu_tables(gpus):
        lines: list[str] = []
        for row in rows:
            tag = "td" if lines else "th"
            cells = "".join(f"<{tag} class=n>{_e(cell)}</{tag}>" for cell in row[1:])
            lines.append(f"<tr><th>{_e(row[0])}</th>{cells}</tr>")
        yield f"<p>{_e(title)}</p><table>{''.join(lines)}</table>"
    yield (
        "<p class=note>Each kind of lease as if there were no others. A gap counts as a whole: "
        "what a start in it costs is not subtracted.</p>"
    )


def _facts(g: GapReport) -> str:
    rows = [
        ("nodes", f"{g.nodes}"),
        ("observed", _time(g.hours)),
        ("idle nodes", f"{g.idle_mean:.1f} on average ({100 * g.idle_fraction:.1f} %)"),
        ("idle node-hours", f"{g.idle_node_hours:,.0f}"),
        ("gaps", f"{g.gaps:,}"),
    ]
    if g.median_s is not None and g.mean_s is not None:
        rows.append(
            ("length of a gap", f"median {_minutes(g.median_s)}, mean {_minutes(g.mean_s)}")
        )
    return (
        "<table>"
        + "".join(f"<tr><th>{_e(a)}</th><td>{_e(b)}</td></tr>" for a, b in rows)
        + "</table>"
    )


def _comparison(cases: Sequence[Case]) -> str:
    head = (
        "",
        "harvested",
        "of the bound",
        "equivalent nodes",
        "rescales",
        "preemptions",
        "jobs done",
        "what is different",
    )
    rows = []
    for c in cases:
        r = c.result
        cells = (
            f"{100 * r.harvested_fraction:.1f} %",
            f"{100 * r.fraction_of_ideal:.1f} %",
            f"{r.equivalent_nodes * r.harvested_fraction:.1f}",
            f"{r.rescales}",
            f"{r.preemptions}",
            f"{r.jobs_completed}",
        )
        numbers = "".join(f"<td class=n>{_e(x)}</td>" for x in cells)
        rows.append(f"<tr><th>{_e(c.name)}</th>{numbers}<td>{_e(c.what)}</td></tr>")
    top = "".join(
        f"<th{' class=n' if 0 < k < 7 else ''}>{_e(word)}</th>" for k, word in enumerate(head)
    )
    note = (
        "<p class=note>Harvested: node-hours in which samples were processed, of all idle ones. "
        "Of the bound: samples processed, of those "
        "that the jobs of each moment could have processed if changes of scale were free.</p>"
    )
    return f"<table><tr>{top}</tr>{''.join(rows)}</table>{note}"


def text(assessment: Assessment) -> Iterable[str]:
    """Yield the result for a terminal, line by line."""
    yield assessment.source
    yield from verdict(assessment)
    for c in assessment.cases[1:]:
        r = c.result
        yield (
            f"{c.name}: {100 * r.harvested_fraction:.1f} % harvested, "
            f"{100 * r.fraction_of_ideal:.1f} % of the bound ({c.what})."
        )
    if assessment.gpus is not None:
        for title, rows in gpu_tables(assessment.gpus):
            yield f"{title}:"
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for row in rows:
                cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
                yield f"  {row[0].ljust(widths[0])}  {'  '.join(cells)}".rstrip()
    for line in assessment.assumptions:
        yield f"Assumed: {line}"


def _e(words: str) -> str:
    return html.escape(words, quote=True)


def _time(hours: float) -> str:
    return f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} hours"


def _minutes(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 7200 else f"{seconds / 60:.1f} min"


def _thousands(number: float) -> str:
    digits = (
        max(0, 2 - int(len(str(int(number))) - 1))
        if number < 100
        else -max(0, len(str(int(number))) - 2)
    )
    return f"{round(number, digits):,.0f}"
