"""Views as tables and lines for ``status``, ``show``, ``nodes`` and ``events``. Decides columns and
wording.

:func:`scaling` is the part of ``malletrain show`` on a job's observed and expected throughput at
each size. The numbers come from the daemon.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from malletrain.config.units import show_duration
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.payloads import SIZE_NOUNS
from malletrain.protocol.views import (
    EventView,
    JobDetail,
    JobView,
    NodeView,
    ProfileView,
    RateView,
    RescaleView,
    ShareView,
    StatusView,
    TrainerView,
)
from malletrain.render import goals
from malletrain.render.columns import Column, FittedTable, indented, shorten
from malletrain.render.data_caches import data_caches
from malletrain.render.layouts import layouts
from malletrain.render.palette import STATE_STYLES
from malletrain.render.step_times import step_times
from malletrain.render.text import (
    clock,
    count,
    date,
    figure,
    plain,
    rate,
    since,
    span,
)
from scavenger.hostlist import named
from scavenger.interface import host_of, kind_of

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
                f"Interrupted {clock(i.time)}: {i.before} → {i.nodes} nodes, so that "
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


NO_NAMES: Mapping[str, str] = MappingProxyType({})
ENDED = ("completed", "failed", "cancelled")
BAD_NEWS = (
    EventKind.NODE_LEAVING,
    EventKind.NODE_EXPIRING,
    EventKind.NODE_RECLAIMED,
    EventKind.NODE_LOST,
    EventKind.NODE_SICK,
    EventKind.NODE_SLOW,
    EventKind.TASKS_FAILING,
    EventKind.JOB_FAILED,
    EventKind.WORKERS_FAILED,
)
KIND_WIDTH = 18
"""Width of the column for the kind of an event; the few longer kinds shift the rest of
their line."""
FARMING = "running tasks"
"""Text for the state of a node whose job is a farm."""
NODE_WORDS = {"free": "held, no job", "job": "training", "leasing": "asked for"}
"""Node state → text for users, if the word of the protocol is not clear."""
STEPS = {
    "start": "started on {to} nodes",
    "up": "grew: {before} → {to} nodes",
    "down": "shrank: {before} → {to} nodes",
    "loss": "lost nodes: {before} → {to} nodes",
    "same": "moved: {to} nodes",
}
"""Kind of rescale → text."""
JOB_COLUMNS = (
    Column("JOB"),
    Column("NAME", drop=2, least=16, middle=True),
    Column("OWNER", drop=9, least=6),
    Column("STATE", drop=1),
    Column("NODES", drop=3, right=True),
    Column("MIN:MAX", drop=6),
    Column("RATE", drop=5, right=True),
    Column("SAMPLES", drop=4, right=True),
    Column("RESCALES", drop=8, right=True),
    Column("AGE", drop=7, right=True),
    Column("REASON", note=True),
)
GOAL_COLUMN = Column("GOALS", drop=3)
"""Column for deadlines and budgets, shown if a job has any."""
NODE_COLUMNS = (
    Column("NODE"),
    Column("STATE", drop=1),
    Column("JOB", drop=2, least=10, middle=True),
    Column("FOR", drop=3, right=True),
    Column("LASTS ABOUT", drop=5, right=True),
    Column("CLASS", drop=6, least=7),
    Column("LEASE", drop=7),
)


def state(word: str) -> Text:
    """Return a job's or node's state in its colour."""
    return Text(plain(NODE_WORDS.get(word, word)), STATE_STYLES.get(word, ""))


def work_done(job: JobView) -> str:
    """Return the samples of a job, or the number of done tasks of a farm."""
    return f"{count(job.samples)} tasks" if job.mode == "farm" else count(job.samples)


def metrics(values: Mapping[str, float]) -> str:
    """Return metrics as ``loss 0.05 test_accuracy 0.9844``; empty if there are none."""
    return "  ".join(f"{plain(name)} {figure(value)}" for name, value in sorted(values.items()))


def headline(status: StatusView) -> Text:
    """Return the daemon and the machine in two lines."""
    line = Text()
    line.append(f"malletraind {status.version}", "bold")
    line.append(
        f" (pid {status.pid}) on {plain(status.scheduler)}, up "
        f"{since(status.started, status.now)}\n"
    )
    leased, trains, idle = status.nodes_leased, status.nodes_training, status.nodes_idle
    farming = status.nodes_farming
    work = f"{trains} {'trains' if trains == 1 else 'train'}, "
    if farming:
        work = f"{work if trains else ''}{farming} {'runs' if farming == 1 else 'run'} tasks, "
    line.append(
        f"{leased} {'node' if leased == 1 else 'nodes'} held: {work}"
        f"{max(0, leased - trains - farming)} without a job; "
        f"{idle} more {'is' if idle == 1 else 'are'} idle\n"
    )
    line.append(
        f"{rate(status.rate)}; {count(status.samples)} samples, {status.rescales:,} rescales, "
        f"{status.preemptions:,} preemptions"
    )
    for trainer in status.trainers:
        line.append(f"\n{_trainer(trainer)}")
    for share in status.shares:
        line.append(f"\n{_share(share)}")
    if status.restrictions:
        line.append(f"\n{plain(status.restrictions)}", "yellow")
    for problem in status.users_problems:
        line.append(f"\n{plain(problem)}", "red")
    for failure in status.failed_starts:
        line.append(f"\n{plain(failure)}", "red")
    if status.handler_failures:
        line.append(f"\n{plain(status.handler_failures)}", "red")
    if status.poll_error:
        line.append(f"\nThe main scheduler could not be asked: {plain(status.poll_error)}", "red")
    return line


def _trainer(trainer: TrainerView) -> str:
    """Return a line about one trainer's plan."""
    return (
        f"Trainer {plain(trainer.name)} ({plain(trainer.objective)}): {trainer.jobs} jobs on "
        f"{trainer.nodes} nodes, {trainer.waiting} wait; {rate(trainer.rate)}"
    )


def _share(share: ShareView) -> str:
    """Return a line about a party's share and what it got."""
    if not share.due_nh:
        return f"{plain(share.party)}: weight {share.weight:g}, nothing was due yet"
    part = 100.0 * share.served_nh / share.due_nh
    return (
        f"{plain(share.party)}: weight {share.weight:g}, {share.served_nh:,.1f} of "
        f"{share.due_nh:,.1f} node-hours due of late ({part:.0f} %), bids count "
        f"{share.factor:.2g} times"
    )


def jobs(rows: Sequence[JobView], now: float) -> RenderableType:
    """Return all jobs, one per line; the reason why a job waits is next to it, or below it on a
    narrow terminal.
    """
    if not rows:
        return Text("No jobs yet. Submit one with: malletrain submit --nodes 1:4 train.py", "dim")
    *most, reason = JOB_COLUMNS
    due = (GOAL_COLUMN,) if any(j.goal and j.goal.standing for j in rows) else ()
    table = FittedTable(*most, *due, reason, alike="these {rows}: ")
    for j in rows:
        age = (j.ended - j.submitted) if j.ended else now - j.submitted
        table.add_row(
            plain(j.id),
            plain(j.name),
            plain(j.owner),
            state(j.state),
            str(len(j.nodes)),
            _sizes_wanted(j),
            rate(j.rate) if j.nodes else "",
            work_done(j),
            str(j.rescales),
            show_duration(round(max(0.0, age))),
            *(plain(goals.standing(j.goal)) for _ in due),
            plain(j.reason),
        )
    return table


def _sizes_wanted(job: JobView) -> str:
    """Return the sizes of a job as its owner said them: ``1:16``, ``1:16 GPUs``."""
    sizes = span(job.min_nodes, job.max_nodes)
    return f"{sizes} {SIZE_NOUNS.get(job.counts, 'nodes')}" if job.counts else sizes


def job(detail: JobDetail) -> RenderableType:
    """Return all details of one job: facts, scaling, starts and rescales with their phases,
    notices, and why it failed.
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
        parts += _steps(detail.rescales)
    for sentence in detail.notices:
        parts.append(Text(f"\nNotice: {plain(sentence)}", "yellow"))
    for who, text in detail.stacks.items():
        parts += [Text(f"\nWhere {plain(who)} hung", "bold yellow"), Text(plain(text))]
    if detail.failure:
        parts += [Text("\nWhy it failed", "bold red"), Text(plain(detail.failure))]
        if j.reason and j.reason not in detail.failure:
            parts.append(Text(plain(j.reason)))
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
            shown += f", {number} {noun}{'s' if number > 1 else ''}"
    if farm:
        cores = int(farm.get("cpus", 0))
        shown = f"{cores} core{'s' if cores > 1 else ''} a task" if cores else "a task a node"
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
        fact("Share", _share(detail.share))
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


def _steps(rescales: Sequence[RescaleView]) -> list[RenderableType]:
    """Return the job's starts and rescales, with the cost of each."""
    table = FittedTable(
        Column("ROUND", right=True, drop=2),
        Column("AT"),
        Column("WHAT"),
        Column("PAUSE", right=True),
        Column("PHASES", note=True),
    )
    for s in rescales:
        words = STEPS.get(s.kind, plain(s.kind) + ": {before} → {to} nodes")
        table.add_row(
            str(s.generation),
            clock(s.began),
            _nodes(words.format(before=s.from_nodes, to=s.to_nodes)),
            "unfinished" if s.cost_s is None else f"{s.cost_s:.2f} s",
            ", ".join(f"{plain(name)} {seconds:.2f}" for name, seconds in s.phases.items()),
        )
    title = "\nStarts and rescales (pause without samples; its phases in seconds)"
    return [Text(title, "bold"), table]


def _nodes(words: str) -> str:
    return words.replace(" 1 nodes", " 1 node")


def nodes(
    rows: Sequence[NodeView],
    now: float,
    *,
    explain: bool = False,
    names: Mapping[str, str] = NO_NAMES,
) -> RenderableType:
    """Return all nodes that MalleTrain knows; with ``explain`` every rule that a node passed or
    failed. ``names``: job id → name.
    """
    if not rows:
        return Text("No node is held and none is idle now.", "dim")
    owners = (Column("OWNER", drop=4, least=6),) if any(n.owner for n in rows) else ()
    warm = (Column("WARM", drop=8, right=True),) if any(n.warm_bytes for n in rows) else ()
    trainers = (Column("TRAINER", drop=9, least=7),) if any(n.trainer for n in rows) else ()
    table = FittedTable(*NODE_COLUMNS, *owners, *warm, *trainers)
    for n in rows:
        word = state(FARMING if (n.state, n.mode) == ("job", "farm") else n.state)
        if n.gone_in_s is not None:
            word.append(f" in {show_duration(max(0.0, n.gone_in_s))}")
        horizon = "unknown" if n.horizon_s is None else show_duration(n.horizon_s)
        table.add_row(
            plain(n.node),
            word,
            plain(names.get(n.job, n.job)),
            since(n.since, now),
            horizon,
            plain(n.node_class),
            plain(n.lease),
            *(plain(n.owner) or "nobody" for _ in owners),
            *(f"{n.warm_bytes / 1e6:.0f} MB" if n.warm_bytes else "" for _ in warm),
            *(plain(n.trainer) for _ in trainers),
        )
    if not explain:
        reasons = [Text(f"{plain(n.node)}: {plain(n.rules[-1][2])}") for n in rows if n.rules]
        return Group(table, Text(""), *reasons) if reasons else table
    rules = FittedTable(
        Column("NODE"), Column("RULE", drop=2), Column("PASSED", drop=1), Column("WHY", note=True)
    )
    for n in rows:
        for k, (rule, passed, why) in enumerate(n.rules):
            answer = Text("yes", "green") if passed else Text("no", "red")
            rules.add_row(plain(n.node) if k == 0 else "", plain(rule), answer, plain(why))
    heading = Text("\nWhich idle nodes may be taken, rule by rule", "bold")
    hosts = host_sentences(rows)
    if not hosts:
        return Group(table, heading, rules)
    on_hosts = FittedTable(Column("HOST"), Column("SLOTS", note=True))
    for host, sentence in hosts:
        on_hosts.add_row(plain(host), plain(sentence))
    return Group(table, Text("\nWhat is idle on each host", "bold"), on_hosts, heading, rules)


def host_sentences(rows: Iterable[NodeView]) -> list[tuple[str, str]]:
    """Return (host, sentence) for each host and kind of slots among ``rows``, in their order.

    A slot counts as leased, as one that can be leased (all of its rules are passed), or as left
    alone, with the reason that the first rule gives that it did not pass.
    """
    slots: dict[tuple[str, str], list[NodeView]] = {}
    for row in rows:
        if kind := kind_of(row.node):
            slots.setdefault((host_of(row.node), kind), []).append(row)
    return [(host, _sentence(kind, members)) for (host, kind), members in slots.items()]


def _sentence(kind: str, slots: Iterable[NodeView]) -> str:
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for slot in slots:
        if slot.lease:
            counts["leased"] += 1
        elif refusal := next((why for _, passed, why in slot.rules if not passed), ""):
            reasons[refusal] += 1
        else:
            counts["can be leased"] += 1
    parts = [f"{counts[word]} {word}" for word in ("leased", "can be leased") if counts[word]]
    parts += [f"{number} left alone: {why}" for why, number in reasons.items()]
    total = counts.total() + reasons.total()
    return f"{total} {kind} slot{'s' if total != 1 else ''}, {'; '.join(parts)}"


@dataclass(frozen=True)
class EventLine:
    """One event of the audit log; on a narrow terminal its sentence is below it."""

    event: EventView
    """The event."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Job id → name."""
    dated: bool = False
    """Whether to show the day before the time."""

    @property
    def line(self) -> Text:
        """Return the event on one line of any length."""
        head, name, node = self._head()
        about = Text(" ").join(part for part in (name, node) if part.plain)
        about.append(" " * (21 - about.cell_len) if about.plain else "")
        return Text.assemble(head, about, " " if about.plain else "", plain(self.event.sentence))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line, width = self.line, options.max_width
        if line.cell_len <= width and "\n" not in line.plain:
            yield line
            return
        head, name, node = self._head()
        remaining = max(1, width - head.cell_len - node.cell_len - 1)
        short = Text.assemble(head, shorten(name, remaining, middle=True), " ", node)
        short.rstrip()
        yield short
        yield from indented(console, Text(plain(self.event.sentence)), width)

    def _head(self) -> tuple[Text, Text, Text]:
        e = self.event
        head = Text(f"{(date if self.dated else clock)(e.time)}  ", "dim")
        head.append(f"{plain(e.kind):<{KIND_WIDTH}} ", "red" if e.kind in BAD_NEWS else "cyan")
        return head, Text(plain(self.names.get(e.job, e.job)), "bold"), Text(plain(e.node), "bold")
