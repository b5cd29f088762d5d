"""Views as tables and lines for ``status``, ``nodes``, ``events``, ``usage`` and ``sweep``, and as
CSV. Decides columns and wording, and which rows of the use of leases are added up.
:mod:`malletrain.render.job_detail` is ``malletrain show``.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from malletrain.config.units import show_duration
from malletrain.protocol.counting import counted
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.payloads import SIZE_NOUNS
from malletrain.protocol.views import (
    EventView,
    JobView,
    NodeView,
    ShareView,
    StatusView,
    TrainerView,
    UsageView,
)
from malletrain.render import goals
from malletrain.render.columns import Column, FittedTable, indented, shorten
from malletrain.render.palette import STATE_STYLES
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
from scavenger.interface import host_of, kind_of

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
    return counted(int(job.samples), "task") if job.mode == "farm" else count(job.samples)


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
        f"{rate(status.rate)}; {count(status.samples)} samples, "
        f"{counted(status.rescales, 'rescale')}, {counted(status.preemptions, 'preemption')}"
    )
    for trainer in status.trainers:
        line.append(f"\n{_trainer(trainer)}")
    for share in status.shares:
        line.append(f"\n{share_line(share)}")
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
        f"Trainer {plain(trainer.name)} ({plain(trainer.objective)}): "
        f"{counted(trainer.jobs, 'job')} on {counted(trainer.nodes, 'node')}, {trainer.waiting} "
        f"{'waits' if trainer.waiting == 1 else 'wait'}; {rate(trainer.rate)}"
    )


def share_line(share: ShareView) -> str:
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
    return f"{counted(total, f'{kind} slot')}, {'; '.join(parts)}"


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


BY = {"user": "user", "account": "account", "class": "node_class", "month": "month"}
"""Key of ``--by`` → field of the rows that it distinguishes."""
ALL = "all"
"""Value of the fields over which rows were added up."""
HOURS = (
    ("LEASED", "leased_nh", 1),
    ("TRAINED", "trained_nh", 2),
    ("STARTS", "starting_nh", 5),
    ("RESCALES", "rescaling_nh", 6),
    ("PREEMPTED", "preempted_nh", 7),
    ("NO SAMPLES", "silent_nh", 3),
    ("NO JOB", "unused_nh", 4),
)
"""Heading, field and drop priority of a column on a narrow terminal."""
CHARGES = (("CHARGED", "charged_nh", 8), ("GPU-H", "gpu_h", 9))
"""Heading, field and drop priority of columns for sites with slots."""
SUMS = (*(field for _, field, _ in HOURS), "samples")


def added_up(rows: Sequence[UsageView], by: Sequence[str]) -> list[UsageView]:
    """Return the rows added up by the fields ``by`` (keys of BY). The energy of a sum is known if
    that of all its parts is.
    """
    fields = {BY[each] for each in by}
    rows_by_key: dict[tuple[str, ...], UsageView] = {}
    for row in rows:
        key = tuple(getattr(row, f) if f in fields else ALL for f in BY.values())
        row = msgspec.structs.replace(row, **dict(zip(BY.values(), key, strict=True)))
        if (before := rows_by_key.get(key)) is not None:
            sums = {field: getattr(before, field) + getattr(row, field) for field in SUMS}
            complete = before.kwh is not None and row.kwh is not None
            kwh = (before.kwh or 0.0) + (row.kwh or 0.0) if complete else None
            charges = {field: _known_sum(before, row, field) for _, field, _ in CHARGES}
            row = msgspec.structs.replace(row, **sums, **charges, kwh=kwh)
        rows_by_key[key] = row
    return [rows_by_key[key] for key in sorted(rows_by_key)]


def _known_sum(one: UsageView, other: UsageView, field: str) -> float | None:
    """Return the sum of the values that are known; None if neither is."""
    values = [v for v in (getattr(one, field), getattr(other, field)) if v is not None]
    return sum(values) if values else None


def _amount(value: float) -> str:
    """Return an amount with tenths; below one with thousandths, so that some seconds do not show
    as 0."""
    return f"{value:,.1f}" if value >= 1 or not value else f"{value:.3f}"


def usage(rows: Sequence[UsageView], by: Sequence[str]) -> RenderableType:
    """Return a table of node-hours, with a last line for the sums. What slots count, and their
    GPU-hours, are columns if there are slots.
    """
    if not rows:
        return Text("No node was leased in that time.")
    charges = CHARGES if any(row.gpu_h is not None for row in rows) else ()
    hours = (*HOURS[:1], *charges, *HOURS[1:])
    table = FittedTable(
        *(Column(each.upper()) for each in by),
        *(Column(head, drop=drop, right=True) for head, _, drop in hours),
        Column("SAMPLES", drop=3, right=True),
        Column("KWH", drop=2, right=True),
    )
    total = added_up(rows, ())
    for row in (*rows, *(total if len(rows) > 1 else ())):
        table.add_row(
            *(plain(getattr(row, BY[each])) for each in by),
            *("" if (v := getattr(row, f)) is None else _amount(v) for _, f, _ in hours),
            count(row.samples),
            "?" if row.kwh is None else _amount(row.kwh),
        )
    return table


def usage_csv(rows: Sequence[UsageView]) -> str:
    """Return CSV: a line of headings, then one for each row; an unknown energy is empty."""
    out = io.StringIO()
    fields = UsageView.__struct_fields__
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(fields)
    for row in rows:
        values = [getattr(row, field) for field in fields]
        writer.writerow(
            f"{v:.6g}" if isinstance(v, float) else "" if v is None else v for v in values
        )
    return out.getvalue()


STATES = ("complete", "pruned", "running", "fail")


def sweeps(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the table of ``malletrain sweep status``: a line for each sweep."""
    if not rows:
        return Text("There is no sweep. Begin one with: malletrain sweep run FILE")
    table = FittedTable(
        Column("SWEEP"),
        *(Column(state.upper(), right=True) for state in STATES),
        Column("WANTED", right=True, drop=1),
        Column("BEST", right=True),
        Column("", note=True),
    )
    for row in rows:
        counts = row["trials"]
        table.add_row(
            plain(row["name"]),
            *(str(counts.get(state, 0)) for state in STATES),
            str(row["target_trials"]),
            "" if row["best"] is None else f"{row['best']:.6g}",
            plain(row["sentence"]),
        )
    return table


def trials(rows: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> RenderableType:
    """Return the table of ``malletrain sweep show``: a line for each trial."""
    if not rows:
        return Text("No trial has begun.")
    parameters = list(dict.fromkeys(name for row in rows for name in row["parameters"]))
    table = FittedTable(
        Column("TRIAL", right=True),
        Column("STATE"),
        *(Column(metric.upper(), right=True) for metric in metrics),
        Column("STEP", right=True, drop=2),
        *(Column(name, right=True) for name in parameters),
        Column("JOB", drop=1),
        Column("NODE-HOURS", right=True, drop=3),
        Column("", note=True),
    )
    for row in rows:
        table.add_row(
            str(row["trial"]),
            plain(row["state"]),
            *(_number(row["values"].get(metric)) for metric in metrics),
            "" if row["step"] is None else str(row["step"]),
            *(_number(row["parameters"].get(name)) for name in parameters),
            plain(row["job"]),
            f"{row['node_hours']:.3f}",
            plain(row["note"] or ("the best" if row["best"] else "")),
        )
    return table


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else str(value)


def trials_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return CSV: a line of headings, then one for each trial; each metric, then each parameter,
    has a column."""
    metrics = list(dict.fromkeys(name for row in rows for name in row["values"]))
    parameters = list(dict.fromkeys(name for row in rows for name in row["parameters"]))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    facts = ("trial", "state", "job", "step", "node_hours", "best", "note")
    writer.writerow([*facts, *metrics, *parameters])
    for row in rows:
        cells = [row[fact] for fact in facts]
        cells += [row["values"].get(metric) for metric in metrics]
        cells += [row["parameters"].get(name) for name in parameters]
        writer.writerow("" if value is None else value for value in cells)
    return out.getvalue()
