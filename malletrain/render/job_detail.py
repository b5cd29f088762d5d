"""``malletrain show``: all details of one job. Decides the columns and the wording.

The parts on a job's scaling, the layout of its nodes, the times of its steps, its data caches and
its rescales have a function each. The numbers and the advice on steps come from the daemon.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from malletrain.config.units import show_duration
from malletrain.protocol import sizes
from malletrain.protocol.counting import counted
from malletrain.protocol.payloads import SIZE_NOUNS
from malletrain.protocol.views import (
    DataCacheView,
    JobDetail,
    ProfileView,
    RankTimesView,
    RateView,
    RescaleView,
    StepTimesView,
    TriedLayoutView,
)
from malletrain.render import goals
from malletrain.render.columns import Column, FittedTable
from malletrain.render.tables import metrics, share_line, state
from malletrain.render.text import clock, count, date, figure, plain, rate, span
from scavenger.hostlist import named

STANDS = {
    "off": "not measured",
    "waiting": "not measured yet",
    "profiling": "being measured now",
    "measured": "measured",
    "partial": "measured in part",
    "unknown": "not known",
    "gone": "measured in part",
    "known": "known without a measurement of its own",
}
"""State of a profile → text."""
RESCALES = {
    "start": "started on {to}",
    "up": "grew: {before} → {to}",
    "down": "shrank: {before} → {to}",
    "loss": "after a loss: {before} → {to}",
    "same": "moved: {to}",
}
"""Kind of rescale → text. ``to``: the number after it, with its noun."""
PARTS = {
    "data": "waiting for data",
    "computing": "computing",
    "others": "waiting for other ranks",
    "transfer": "exchanging gradients",
    "snapshot": "in snapshots",
}
"""Part of a step → text after its share."""
PART_HEADS = {
    "data": "DATA",
    "computing": "COMPUTING",
    "others": "OTHER RANKS",
    "transfer": "EXCHANGE",
    "snapshot": "SNAPSHOTS",
}
"""Part of a step → head of its column."""
MAX_SHOWN_RANKS = 8
"""Maximum number of ranks of which each has a line. Of more, some have one."""
LAST_RANKS, FIRST_RANKS = 5, 2
"""Of more ranks: the number of lines for those that come last to exchanges, and for those that come
first.
"""
PAGE_CACHE_SHARE = 0.5
"""Part of a node's memory that the page cache is assumed to have beside the job's processes."""


def job(detail: JobDetail) -> RenderableType:
    """Return all details of one job: facts, scaling, starts and rescales with their phases,
    notices, and why it failed or its last failure.
    """
    j = detail.job
    owner_curve = detail.spec.get("curve") is not None
    parts: list[RenderableType] = [_facts(detail)]
    if not detail.spec.get("farm"):  # its tasks do not depend on each other: nothing is measured
        parts += scaling(detail.profile, detail.rates, owner_curve=owner_curve)
        parts += layouts(detail)
        parts += step_times(detail)
        parts += data_caches(detail)
    if detail.rescales:
        parts += _rescales(detail.rescales)
    for sentence in detail.notices:
        parts.append(Text(f"\nNotice: {plain(sentence)}", "yellow"))
    for who, text in detail.stacks.items():
        parts += [Text(f"\nWhere {plain(who)} hung", "bold yellow"), Text(plain(text))]
    if detail.failure:
        has_failed = j.state == "failed"
        parts.append(Text("\nWhy it failed" if has_failed else "\nLast failure", "bold red"))
        if has_failed and j.reason and j.reason not in detail.failure:
            parts.append(Text(plain(j.reason)))
        parts.append(Text(plain(detail.failure)))
    return Group(*parts)


def _facts(detail: JobDetail) -> Table:
    j, spec = detail.job, detail.spec
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")

    def fact(label: str, value: str | Text) -> None:
        facts.add_row(label, Text(plain(value)) if isinstance(value, str) else value)

    word = state(j.state)
    if j.reason:
        word.append(f"  {plain(j.reason)}", "default")
    fact("Job", f"{j.name} ({j.id}) of {j.owner}")
    fact("State", word)
    farm = spec.get("farm")
    if farm:
        fact("Command", shlex.join(map(str, farm.get("command", ()))))
    else:
        fact("Script", " ".join([str(spec.get("script", "")), *map(str, spec.get("args", ()))]))
    fact("Directory", str(spec.get("workdir", "")))
    python = str(spec.get("python", ""))
    if not farm:
        fact("Python", "that of the environment" if python == "python" else python)
    if spec.get("setup"):
        fact("Setup", str(spec["setup"]))
    for label, value in _software(spec.get("software") or {}):
        fact(label, value)
    processes = int(spec.get("nproc_per_node", 1))  # the default is not stored
    tuned = "processes" in spec.get("tuned", ())
    shown = (
        f"{processes} process{'es' if processes > 1 else ''} each"
        if processes
        else "the fastest number of processes"
        if tuned
        else "a process for each GPU"
    )
    for name in ("threads", "loader_workers"):
        if number := int(spec.get(name, 0)):
            noun = name.replace("_", " ").removesuffix("s")
            shown += f", {counted(number, noun)}"
    if farm:
        cores = int(farm.get("cpus", 0))
        shown = f"{counted(cores, 'core')} a task" if cores else "a task a node"
    noun = SIZE_NOUNS.get(j.counts, "nodes")
    fact(noun[0].upper() + noun[1:], f"{span(j.min_nodes, j.max_nodes)} wanted, {shown}")
    if spec.get("node_class"):
        fact("Kind", str(spec["node_class"]))
    fact("Now on", f"{len(j.nodes)}: {named(j.nodes)}" if j.nodes else "no node")
    fact("Goal", f"{spec.get('goal', 'throughput')}, weight {float(spec.get('weight', 1.0)):g}")
    fact("Tasks done" if farm else "Samples", f"{count(j.samples)}, now {rate(j.rate)}")
    if j.goal is not None:
        now = time.time()
        work = "tasks" if farm else "samples"
        for label, text in goals.facts(j.goal, now, ended=j.ended is not None, work=work):
            fact(label, text)
    if j.metrics:
        fact("Metrics", metrics(j.metrics))
    if spec.get("after"):
        fact("After", ", ".join(map(str, spec["after"])))
    for name, url in sorted((spec.get("links") or {}).items()):
        fact("Link", f"{name}: {url}")
    if spec.get("time_limit_s"):
        fact("Time limit", show_duration(float(spec["time_limit_s"])))
    if spec.get("on_hang"):
        fact("When it hangs", "its workers are started again")
    for notification in spec.get("notify", ()):
        fact("Notifies", f"{notification['to']} of its {', '.join(notification['on'])}")
    ended = f", ended {date(j.ended)}" if j.ended else ""
    fact("Times", f"submitted {date(j.submitted)}, started {date(j.started)}{ended}")
    if detail.trainer:
        fact("Trainer", detail.trainer)
    if detail.share is not None:
        fact("Share", share_line(detail.share))
    if detail.network:
        fact("Network", detail.network)
    if detail.memory:
        fact("Memory", detail.memory)
    if detail.slow:
        fact("Slow nodes", Text("\n".join(map(plain, detail.slow)), "yellow"))
    if j.tries:
        fact("Failed tries", str(j.tries))
    return facts


def _software(software: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the job's software environment, as labels and values."""
    by = software.get("runtime", "auto")
    binds = ", ".join(map(str, software.get("binds", ())))
    shown = {
        "Modules": ", ".join(map(str, software.get("modules", ()))),
        "Conda": str(software.get("conda", "")),
        "Virtual env": str(software.get("venv", "")),
        "Container": str(software.get("container") or ""),
    }
    if shown["Container"]:
        shown["Container"] += ("" if by == "auto" else f" by {by}") + (
            f", with {binds}" if binds else ""
        )
    return [(label, value) for label, value in shown.items() if value]


def scaling(
    profile: ProfileView | None, seen: Sequence[RateView], *, owner_curve: bool
) -> list[RenderableType]:
    """Return the part of ``malletrain show`` on the job's scaling; empty if nothing is known.
    ``owner_curve``: whether its owner gave the curve.
    """
    if profile is None and not seen:
        return []
    head = Text("\nScaling: ", "bold")
    if profile is None:
        head.append("only what was seen is known, because profiling is off here.", "default")
    else:
        stands = "given" if owner_curve else STANDS.get(profile.state, plain(profile.state))
        head.append(f"{stands}.", "default")
        head.append(f" {plain(profile.sentence)}" if profile.sentence else "", "default")
    parts: list[RenderableType] = [head]
    if seen or (profile is not None and profile.points):
        parts.append(_sizes(profile, seen, owner_curve))
    if profile is None:
        return parts
    if profile.up_s or profile.down_s or profile.start_s:
        parts.append(
            Text(
                f"The plan counts with a pause of {profile.up_s:.1f} s to grow, "
                f"{profile.down_s:.1f} s to shrink and {profile.start_s:.1f} s to start."
            )
        )
    for i in profile.interruptions:
        parts.append(
            Text(
                f"Interrupted {clock(i.time)}: {i.before} → {counted(i.nodes, 'node')}, so that "
                f"{plain(i.by)} could be measured."
            )
        )
    return parts


def _sizes(profile: ProfileView | None, seen: Sequence[RateView], owner_curve: bool) -> FittedTable:
    """Return a line for each number of nodes: the expected rate and the observed one."""
    points = {p.nodes: p for p in profile.points} if profile else {}
    rates = _by_nodes(seen)
    table = FittedTable(
        Column("NODES", right=True),
        Column("EXPECTED", right=True, drop=1),
        Column("GIVE OR TAKE", right=True, drop=5),
        Column("FROM", drop=3),
        Column("PER NODE", right=True, drop=6),
        Column("PLANNED AS", right=True, drop=8),
        Column("SEEN", right=True, drop=2),
        Column("SAMPLES", right=True, drop=7),
        Column("TIME", right=True, drop=4),
    )
    for nodes in sorted(points.keys() | rates.keys()):
        p, r = points.get(nodes), rates.get(nodes)
        expected = ["", "", "", "", ""]
        if p is not None:
            source = "measured" if p.measured else "given" if owner_curve else "estimated"
            margin = f"± {rate(p.spread)}" if p.spread > 0 else ""
            expected = [rate(p.rate), margin, source, rate(p.rate / p.nodes), rate(p.bid)]
        looked = [rate(r.rate), count(r.samples), show_duration(r.seconds)] if r else ["", "", ""]
        table.add_row(str(nodes), *expected, *looked)
    return table


def _by_nodes(seen: Sequence[RateView]) -> dict[int, RateView]:
    """Return the observed rates by number of nodes, over all batch sizes."""
    rate_of: dict[int, RateView] = {}
    for r in seen:
        if (so_far := rate_of.get(r.nodes)) is None:
            rate_of[r.nodes] = r
            continue
        seconds = so_far.seconds + r.seconds
        share = r.seconds / seconds if seconds > 0 else 0.5
        rate_of[r.nodes] = msgspec.structs.replace(
            so_far,
            rate=(1 - share) * so_far.rate + share * r.rate,
            samples=so_far.samples + r.samples,
            seconds=seconds,
        )
    return rate_of


def layouts(detail: JobDetail) -> list[RenderableType]:
    """Return the part of ``malletrain show`` on the layout of the job's nodes; empty if it is not
    looked for.
    """
    view = detail.layout
    if view is None:
        return []
    head = Text("\nEach node: ", "bold")
    head.append(f"{plain(view.layout)}. ", "default")
    parts: list[RenderableType] = [head, Text(plain(view.sentence))]
    if any(tried.rate is not None for tried in view.tried):
        parts.append(_tried(view.tried))
    return parts


def _tried(tried: tuple[TriedLayoutView, ...]) -> FittedTable:
    """Return a line for each layout that is or was tried."""
    table = FittedTable(
        Column("PROCESSES", right=True),
        Column("THREADS", right=True),
        Column("LOADER WORKERS", right=True),
        Column("SAMPLES/S", right=True),
        Column("±", right=True, drop=1),
        Column("RESULT"),
    )
    for each in tried:
        table.add_row(
            str(each.processes),
            str(each.threads),
            str(each.loader_workers),
            "" if each.rate is None else figure(each.rate),
            "" if each.half_width is None else figure(each.half_width),
            plain(each.result),
        )
    return table


def step_times(detail: JobDetail) -> list[RenderableType]:
    """Return the part of ``malletrain show`` on the times of a job's steps; empty if they are not
    measured.
    """
    if detail.steps is None:
        return []
    head = Text("\nA step: ", "bold")
    head.append(f"{shares_sentence(detail.steps.shares)}.", "default")
    parts: list[RenderableType] = [head, Text(plain(detail.steps.advice))]
    measured = [rate for rate in detail.rates if rate.steps is not None]
    if len(measured) > 1:
        parts.append(_by_scale(measured))
    parts += _ranks(detail.steps)
    return parts


def _ranks(steps: StepTimesView) -> list[RenderableType]:
    """Return a line for each of a few ranks. Of more it returns a sentence, and lines for those
    that delay the others most, for those that wait longest for them, and for the median.
    """
    ranks, count = steps.ranks, max(steps.rank_count, len(steps.ranks))
    if count < 2:
        return []
    if count <= MAX_SHOWN_RANKS:
        return [_by_rank(ranks)]
    exchanges = any(rank.exchange_s is not None for rank in ranks)
    last_first = sorted(ranks, key=lambda rank: (rank.exchange_s or 0.0, -(rank.data_s or 0.0)))
    last = "come last to exchanges" if exchanges else "wait longest for data"
    first = "come first" if exchanges else "wait shortest"
    if count > len(ranks):  # the others are not known
        shown = last_first[: LAST_RANKS + FIRST_RANKS]
        text = f"Of {count:,} ranks the {len(shown)} that {last}:"
        return [Text(f"\n{text}"), _by_rank(shown)]
    text = (
        f"Of {count:,} ranks the {LAST_RANKS} that {last}, the {FIRST_RANKS} that {first}, and "
        "the median of all:"
    )
    shown = [*last_first[:LAST_RANKS], *last_first[-FIRST_RANKS:]]
    return [Text(f"\n{text}"), _by_rank(shown, median_of=ranks)]


def shares_sentence(shares: Mapping[str, float]) -> str:
    """Return the shares of a step as text: ``41 % waiting for data, 48 % computing, 11 % waiting
    for other ranks``. Parts below half a percent are left out.
    """
    return ", ".join(
        f"{100 * shares[part]:.0f} % {words}"
        for part, words in PARTS.items()
        if shares.get(part, 0.0) >= 0.005
    )


def _by_scale(rates: list[RateView]) -> FittedTable:
    """Return a line for each number of nodes."""
    table = FittedTable(
        Column("NODES", right=True),
        Column("STEP", right=True, drop=1),
        *(Column(name, right=True, drop=2 + i) for i, name in enumerate(PART_HEADS.values())),
    )
    for observed in rates:
        steps = observed.steps
        if steps is not None:
            shares = (
                f"{100 * steps.shares[part]:.0f} %" if part in steps.shares else ""
                for part in PART_HEADS
            )
            table.add_row(str(observed.nodes), step_duration(steps.step_s), *shares)
    return table


def _by_rank(
    ranks: Sequence[RankTimesView], median_of: Sequence[RankTimesView] = ()
) -> FittedTable:
    """Return a line for each rank, and one for the median of others if there are any. The time in
    exchanges is the wait for other ranks and the transfer.
    """
    table = FittedTable(
        Column("RANK", right=True),
        Column("NODE", drop=4),
        Column("STEP", right=True, drop=5),
        Column("DATA", right=True, drop=1),
        Column("COMPUTING", right=True, drop=1),
        Column("IN EXCHANGES", right=True, drop=2),
        Column("SNAPSHOTS", right=True, drop=3),
    )
    for rank in ranks:
        table.add_row(str(rank.rank), plain(rank.node), *map(_cell, _times(rank)))
    if median_of:
        columns = zip(*map(_times, median_of), strict=True)
        table.add_row("median", "", *(_cell(_median(column)) for column in columns))
    return table


def _times(rank: RankTimesView) -> tuple[float | None, ...]:
    return rank.step_s, rank.data_s, rank.computing_s, rank.exchange_s, rank.snapshot_s


def _median(times: Sequence[float | None]) -> float | None:
    measured = [each for each in times if each is not None]
    return median(measured) if measured else None


def _cell(duration: float | None) -> str:
    return "" if duration is None else step_duration(duration)


def step_duration(duration: float) -> str:
    """Return a duration within a step as text: ``3.1 s``, ``120 ms``, ``0.25 ms``."""
    if duration >= 1.0:
        return f"{duration:.3g} s"
    return f"{1e3 * duration:.3g} ms" if duration else "0"


def data_caches(detail: JobDetail) -> list[RenderableType]:
    """Return a paragraph for each data set that the job reads through a cache."""
    parts: list[RenderableType] = []
    for cache in detail.data:
        head = Text("\nData ", "bold")
        head.append(f"{plain(cache.name)}: ", "bold")
        head.append(cache_sentence(cache), "default")
        parts.append(head)
        if advice := cache_advice(cache):
            parts.append(Text(advice))
    return parts


def cache_sentence(cache: DataCacheView) -> str:
    """Return where the samples came from: ``81 % of 12,000 reads on the node, 9 % from other
    nodes, 10 % from the data set; 1.2 GB were not read from it. …``
    """
    reads = cache.node_hits + cache.peer_hits + cache.source_reads
    if not reads:
        return "no reads yet."
    places = (
        (cache.node_hits, "on the node"),
        (cache.peer_hits, "from other nodes"),
        (cache.source_reads, "from the data set"),
    )
    shares = [f"{100 * number / reads:.0f} % {place}" for number, place in places]
    text = f"{reads:,} reads: {', '.join(shares)}; {sizes.shown(cache.hit_bytes)} were not read "
    text += "from it."
    if cache.samples and cache.memory_bytes:
        share = 100 * min(1.0, cache.present / cache.samples)
        text += f" The memory of its nodes has {share:.0f} % of the samples."
    return f"{text} {coverage(cache)}"


def coverage(cache: DataCacheView) -> str:
    """Return how much of the data an epoch reads: without it a share of hits means nothing."""
    if cache.coverage is None:
        return "Whether an epoch reads all samples is not known: the cache was given no sampler."
    each_once = ", each once" if cache.coverage == 1.0 else ""
    return f"An epoch reads {100 * cache.coverage:.3g} % of the samples{each_once}."


def cache_advice(cache: DataCacheView) -> str:
    """Return what the owner can do; empty if the cache is of use as it is."""
    if 0 < cache.data_bytes <= PAGE_CACHE_SHARE * cache.node_bytes:
        return (
            f"The data ({sizes.shown(cache.data_bytes)}) fit into the page cache of one node "
            f"({sizes.shown(cache.node_bytes)} of memory): from the second epoch on a node the "
            "cache is of no use there."
        )
    if cache.unpacked:
        return (
            f"{cache.unpacked:,} reads were of samples that cannot be cached; the log of a worker "
            "names the type."
        )
    return ""


def _rescales(rescales: Sequence[RescaleView]) -> list[RenderableType]:
    """Return the job's starts and rescales, with the cost of each."""
    table = FittedTable(
        Column("ROUND", right=True, drop=2),
        Column("AT"),
        Column("WHAT"),
        Column("PAUSE", right=True),
        Column("PHASES", note=True),
    )
    for s in rescales:
        words = RESCALES.get(s.kind, plain(s.kind) + ": {before} → {to}")
        table.add_row(
            str(s.generation),
            clock(s.began),
            words.format(before=s.from_nodes, to=counted(s.to_nodes, "node")),
            "unfinished" if s.cost_s is None else f"{s.cost_s:.2f} s",
            ", ".join(f"{plain(name)} {seconds:.2f}" for name, seconds in s.phases.items()),
        )
    title = "\nStarts and rescales (pause without samples; its phases in seconds)"
    return [Text(title, "bold"), table]
