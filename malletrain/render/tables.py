"""Views as tables and lines for ``status``, ``show``, ``nodes`` and ``events``. Decides columns and
wording; asks nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from malletrain.config.units import show_duration
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import (
    EventView,
    JobDetail,
    JobView,
    NodeView,
    ProfileView,
    StatusView,
)
from malletrain.render.palette import STATE_STYLES
from malletrain.render.text import (
    NOTHING,
    clock,
    count,
    date,
    plain,
    rate,
    shorten_nodes,
    since,
    span,
)

NO_NAMES: Mapping[str, str] = MappingProxyType({})
ENDED = ("completed", "failed", "cancelled")
BAD_NEWS = (
    EventKind.NODE_LEAVING,
    EventKind.NODE_LOST,
    EventKind.JOB_FAILED,
    EventKind.WORKERS_FAILED,
)


def table(*columns: str, right: Sequence[str] = (), wrap: Sequence[str] = ()) -> Table:
    """An empty table in the house style; ``right``: columns of numbers; ``wrap``: columns whose
    text may take several lines.
    """
    made = Table(
        box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold", show_edge=False
    )
    for name in columns:
        made.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name not in wrap,
            overflow="fold",
        )
    return made


def state(word: str) -> Text:
    """A state in its colour."""
    return Text(plain(word), STATE_STYLES.get(word, ""))


def metrics(values: dict[str, float]) -> str:
    """``test_accuracy 0.9844  loss 0.05``."""
    return (
        "  ".join(f"{plain(name)} {value:.4g}" for name, value in sorted(values.items())) or NOTHING
    )


def headline(status: StatusView) -> Text:
    """The daemon and the machine in two lines."""
    line = Text()
    line.append(f"malletraind {status.version}", "bold")
    line.append(
        f" (pid {status.pid}) on {plain(status.scheduler)}, up "
        f"{since(status.started, status.now)}\n"
    )
    line.append(
        f"{status.nodes_training} nodes train, {status.nodes_leased} leased, "
        f"{status.nodes_idle} idle; "
    )
    line.append(f"{rate(status.rate)}; {count(status.samples)} samples, ")
    line.append(f"{status.rescales} rescales, {status.preemptions} preemptions")
    if status.poll_error:
        line.append(f"\nThe main scheduler could not be asked: {plain(status.poll_error)}", "red")
    return line


def jobs(rows: Sequence[JobView], now: float) -> RenderableType:
    """All jobs, one a line; what a job waits for stands below it."""
    if not rows:
        return Text("No jobs yet. Submit one with: malletrain submit --nodes 1:4 train.py", "dim")
    made = table(
        "JOB",
        "NAME",
        "OWNER",
        "STATE",
        "NODES",
        "MIN:MAX",
        "RATE",
        "SAMPLES",
        "RESCALES",
        "AGE",
        "REASON",
        right=("NODES", "RATE", "SAMPLES", "RESCALES", "AGE"),
        wrap=("NAME", "REASON"),
    )
    for j in rows:
        age = (j.ended - j.submitted) if j.ended else now - j.submitted
        made.add_row(
            plain(j.id),
            Text(plain(j.name)),
            plain(j.owner),
            state(j.state),
            str(len(j.nodes)),
            span(j.min_nodes, j.max_nodes),
            rate(j.rate),
            count(j.samples),
            str(j.rescales),
            show_duration(round(max(0.0, age))),
            Text(plain(j.reason)),
        )
    return made


def job(detail: JobDetail, now: float) -> RenderableType:
    """Everything about one job: facts, measured throughput, rescales with their phases, notices,
    why it failed.
    """
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
    fact("Script", " ".join([str(spec.get("script", "")), *map(str, spec.get("args", ()))]))
    fact("Directory", str(spec.get("workdir", "")))
    fact("Python", str(spec.get("python", "")))
    if spec.get("setup"):
        fact("Setup", str(spec["setup"]))
    processes = int(spec.get("nproc_per_node", 1))
    shown = (
        f"{processes} process{'es' if processes > 1 else ''} each"
        if processes
        else "a process for each GPU"
    )
    fact("Nodes", f"{span(j.min_nodes, j.max_nodes)} wanted, {shown}")
    fact("Now on", f"{len(j.nodes)}: {shorten_nodes(j.nodes, 16)}" if j.nodes else "no node")
    fact("Goal", f"{spec.get('goal', 'throughput')}, weight {float(spec.get('weight', 1.0)):g}")
    fact("Samples", f"{count(j.samples)}, now {rate(j.rate)}")
    if j.metrics:
        fact("Metrics", metrics(j.metrics))
    ended = f", ended {date(j.ended)}" if j.ended else ""
    fact("Times", f"submitted {date(j.submitted)}, started {date(j.started)}{ended}")
    if j.tries:
        fact("Failed tries", str(j.tries))
    parts: list[RenderableType] = [facts]
    if detail.rates:
        rates = table(
            "NODES",
            "RATE",
            "SPREAD",
            "SAMPLES",
            "TIME",
            right=("NODES", "RATE", "SPREAD", "SAMPLES", "TIME"),
        )
        for r in detail.rates:
            rates.add_row(
                str(r.nodes),
                rate(r.rate),
                rate(r.spread),
                count(r.samples),
                show_duration(r.seconds),
            )
        parts += [Text("\nThroughput measured", "bold"), rates]
    if detail.profile is not None:
        parts += _profile(detail.profile)
    if detail.rescales:
        made = table(
            "ROUND",
            "AT",
            "KIND",
            "NODES",
            "COST",
            "PHASES",
            right=("ROUND", "COST"),
            wrap=("PHASES",),
        )
        for s in detail.rescales:
            cost = "unfinished" if s.cost_s is None else f"{s.cost_s:.2f} s"
            phases = ", ".join(f"{plain(name)} {seconds:.2f}" for name, seconds in s.phases.items())
            made.add_row(
                str(s.generation),
                clock(s.began),
                state(s.kind),
                f"{s.from_nodes} → {s.to_nodes}",
                cost,
                Text(phases or NOTHING),
            )
        parts += [
            Text(
                "\nRescales (cost: last sample before to first sample after; phases in seconds)",
                "bold",
            ),
            made,
        ]
    for sentence in detail.notices:
        parts.append(Text(f"\nNotice: {plain(sentence)}", "yellow"))
    if detail.failure:
        parts += [Text("\nWhy it failed", "bold red"), Text(plain(detail.failure))]
    return Group(*parts)


def _profile(profile: ProfileView) -> list[RenderableType]:
    """How the job scales as far as is known, and whom it gave nodes."""
    head = Text("\nScaling: ", "bold")
    head.append(plain(profile.state), "default")
    head.append(f". {plain(profile.sentence)}" if profile.sentence else "", "default")
    parts: list[RenderableType] = [head]
    if profile.points:
        made = table(
            "NODES",
            "RATE",
            "95 %",
            "PER NODE",
            "FROM",
            "BID",
            right=("NODES", "RATE", "95 %", "PER NODE", "BID"),
        )
        for p in profile.points:
            spread = f"± {rate(p.spread)}" if p.spread > 0 else NOTHING
            source = (
                "measured" if p.measured else "given" if profile.state == "off" else "estimated"
            )
            made.add_row(
                str(p.nodes), rate(p.rate), spread, rate(p.rate / p.nodes), source, rate(p.bid)
            )
        parts.append(made)
    if profile.up_s or profile.down_s or profile.start_s:
        costs = (
            f"{profile.up_s:.1f} s up, {profile.down_s:.1f} s down, {profile.start_s:.1f} s "
            "to start"
        )
        parts.append(Text(f"A rescale is taken to cost {costs}."))
    for i in profile.interruptions:
        parts.append(
            Text(
                f"Interrupted {clock(i.time)}: {i.before} → {i.nodes} nodes, for the profile of "
                f"{plain(i.by)}."
            )
        )
    return parts


def nodes(
    rows: Sequence[NodeView],
    now: float,
    *,
    explain: bool = False,
    names: Mapping[str, str] = NO_NAMES,
) -> RenderableType:
    """All nodes MalleTrain knows; with ``explain`` every rule a node passed or failed. ``names``:
    job id → name.
    """
    if not rows:
        return Text("No idle and no leased nodes now.", "dim")
    owners = ("OWNER",) if any(n.owner for n in rows) else ()
    made = table(
        "NODE",
        "STATE",
        "JOB",
        "SINCE",
        "HORIZON",
        "CLASS",
        "LEASE",
        *owners,
        right=("SINCE", "HORIZON"),
    )
    for n in rows:
        word = state(n.state)
        if n.leaving_in_s is not None:
            word.append(f" in {show_duration(max(0.0, n.leaving_in_s))}")
        horizon = NOTHING if n.horizon_s is None else show_duration(n.horizon_s)
        about = (
            plain(names.get(n.job, n.job)) or NOTHING,
            since(n.since, now),
            horizon,
            plain(n.node_class),
            plain(n.lease) or NOTHING,
        )
        made.add_row(plain(n.node), word, *about, *(plain(n.owner) or NOTHING for _ in owners))
    if not explain:
        return made
    rules = table("NODE", "RULE", "", "WHY", wrap=("WHY",))
    for n in rows:
        for k, (rule, passed, why) in enumerate(n.rules):
            answer = Text("yes", "green") if passed else Text("no", "red")
            rules.add_row(plain(n.node) if k == 0 else "", plain(rule), answer, Text(plain(why)))
    return Group(made, Text("\nWhy a node is or is not a gap", "bold"), rules)


def event(e: EventView, names: Mapping[str, str] = NO_NAMES) -> Text:
    """One line of the audit log. ``names``: job id → name."""
    line = Text(f"{clock(e.time)}  ", "dim")
    style = "red" if e.kind in BAD_NEWS else "cyan"
    line.append(f"{plain(e.kind):<18} ", style)
    about = " ".join(x for x in (plain(names.get(e.job, e.job)), plain(e.node)) if x)
    line.append(f"{about:<20} " if about else "", "bold")
    line.append(plain(e.sentence))
    return line
