"""The demo from beginning to end: stage, jobs, chaos, account. Decides the order of the steps; the
other modules decide the rest.

Meanwhile :class:`DemoWatcher` shows the progress and records data for the account. It continues
without the daemon.
"""

from __future__ import annotations

import contextlib
import csv
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from malletrain.client import ClientError, Connection
from malletrain.config.model import load_config
from malletrain.demo import plan
from malletrain.demo.account import (
    Account,
    DemoResult,
    JobResult,
    account,
    assignments_of,
    machine_of,
    render,
    rounds_of,
    throughput,
)
from malletrain.demo.stage import DemoError, DemoStage
from malletrain.protocol.counting import counted
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView, JobDetail, JobView, StatusView
from malletrain.render import tables
from malletrain.render.columns import console, redraws
from malletrain.render.live import Follower, Screen
from malletrain.render.tables import ENDED
from malletrain.render.text import count, rate
from malletrain.render.timeline import Timeline, animation, draw
from malletrain.shipped import shipped
from malletrain.submission.options import ScriptOptions
from malletrain.submission.spec import build
from scavenger.interface import SchedulerError
from scavenger.trace import files, replay, synthesis, trace
from scavenger.trace.trace import TraceError

SPEEDUP = 30.0
"""Seconds of the trace that pass in one second."""
SHORTEST_GAP_S = 8.0
"""Minimum length of a synthetic gap, real seconds: loading PyTorch on a busy small machine takes
about as long.
"""
IDLE_SHARE = 0.65
"""Mean fraction of idle nodes in a synthetic trace. Summit's 8 % of six nodes would be half a node.
"""
MAX_TRACES = 40
"""Maximum number of synthetic traces drawn to find one that takes enough nodes while jobs train:
``TAKEN_PER_S`` before ``LATE`` of its time.
"""
TAKEN_PER_S, LATE = 1 / 10, 0.75
HELD_S = 1.0
"""Seconds at the beginning of a synthetic trace in which all nodes are idle."""
CALM = 0.3
"""Calm fraction at the beginning of a synthetic trace, in which no node changes, because the first
job is profiled on nodes that stay.
"""
MAX_CALM = 0.5
"""Maximum of this fraction, if the machine is so slow that the profile takes longer."""
LOOK_EVERY_S = 0.5
KILL_AT = 0.45
"""With chaos: time at which the daemon is killed, as a fraction of the trace."""
DOWN_S = 3.0
NEWS_S = 3.0
"""Time until a restarted daemon knows all samples that were processed without it, seconds."""
UNDISTURBED_S = 120.0


@dataclass(frozen=True)
class DemoOptions:
    """The command line of ``malletrain demo``."""

    nodes: int
    trace: Path | None
    duration_s: float
    seed: int
    chaos: bool
    plain: bool
    as_json: bool
    output: Path
    web: bool = False


def run(options: DemoOptions) -> int:
    """Run the demo. Return 0 if all jobs completed.

    Raises:
        DemoError: the demo cannot run, or the jobs do not complete in time.
    """

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    terminal = console(stderr=options.as_json)
    try:
        result, stage_files = _run(options, terminal)
    except (SchedulerError, TraceError, ClientError) as error:
        raise DemoError(str(error)) from None
    terminal.print(render(result, stage_files))
    if options.as_json:
        print(json.dumps(result.to_dict()))
    return 0 if result.completed else 1


def _run(options: DemoOptions, terminal: Console) -> tuple[DemoResult, list[tuple[str, str]]]:
    began = time.time()
    script = example_script()
    user_trace = (
        cut_trace(options) if options.trace else None
    )  # report an error in it before anything is replaced
    plain = options.plain or not redraws(terminal)
    with DemoStage(options.output) as stage:
        folder = stage.folder
        folder.config.write_text(
            plan.config_text(folder.state, folder.cluster, stage.port, options.nodes)
        )
        load_config(folder.config)  # an error shows here and not in the daemon's log
        terminal.print(
            f"Three jobs on {options.nodes} virtual nodes; everything is kept in {folder.root}. "
            "Loading PyTorch once …"
        )
        loading = stage.loading_s()
        cut = user_trace or cut_trace(options)
        files.write(cut, folder.trace)
        times, counts = cut.idle_count()
        offered = plan.offered_node_seconds(
            list(zip(times.tolist(), counts.tolist(), strict=True)), options.duration_s
        )
        if not user_trace:
            offered += CALM * options.duration_s * options.nodes
        work = plan.share(loading) * offered
        for job in plan.JOBS:
            stage.run_undisturbed(job.name, script, job.arguments(work, options.seed))
        stage.start_cluster(
            options.nodes,
            watch_limit_s(options.duration_s),
            trace=folder.trace,
            trace_end_s=cut.duration_s,
            at_end="idle",
            hold=user_trace is None,
            grace_s=plan.GRACE_S,
            notice_fraction=plan.NOTICE_CHAOS if options.chaos else plan.NOTICE,
            seed=options.seed,
        )
        stage.start_daemon()
        if options.web:
            stage.client().close()  # answers
            terminal.print(f"Watch it in a browser: {stage.start_page()}", soft_wrap=True)
        watcher = DemoWatcher(
            terminal, stage.client(), "MalleTrain demo: training on nodes that come and go", plain
        )
        with watcher.showing():
            start = time.time()
            for job in plan.JOBS:
                submit(watcher.client, job, script, folder.snapshots, work, options)
            deadline = start + watch_limit_s(options.duration_s)
            jobs = _watch(watcher, stage, start, deadline, options)
            end = max((j.ended for j in jobs if j.ended), default=time.time())
            details = [watcher.client.job(j.id) for j in jobs]
            status = watcher.client.status()
            if stage.undisturbed_running():
                watcher.say("The jobs are done; waiting for the undisturbed runs.")
            undisturbed = stage.wait_for_undisturbed(UNDISTURBED_S)
        accuracies = {job.name: stage.undisturbed_accuracy(job.name) for job in plan.JOBS}
        sums, picture = _account(watcher, stage, details, start, end)
    notes = (
        ()
        if undisturbed
        else (f"An undisturbed run did not end well; its log is in {folder.undisturbed}.",)
    )
    result = _result(jobs, status, accuracies, sums, time.time() - began, notes)
    draw(picture, folder.timeline)
    folder.moving.write_text(animation(picture), encoding="utf-8")
    logs = f"{folder.daemon_log}, jobs in {folder.state / 'logs'}"
    return result, [("picture", str(folder.timeline)), ("logs", logs)]


def example_script() -> Path:
    """Return the digits example that ships with the package. Raises DemoError if it is not
    installed.
    """
    try:
        return shipped("jobscripts/examples/digits.py")
    except FileNotFoundError as error:
        raise DemoError(str(error)) from None


def cut_trace(options: DemoOptions) -> trace.Trace:
    """Return the trace that is replayed, in real seconds and with the names of the virtual nodes.
    In the first second of a synthetic trace all nodes are idle; the replay stays there until the
    first profile is over.
    """
    names = [f"n{k + 1}" for k in range(options.nodes)]
    if options.trace is not None:
        return replay.fit(
            files.read(options.trace),
            names,
            speedup=SPEEDUP,
            duration_s=options.duration_s,
            seed=options.seed,
        )
    make = lively_trace
    lively_s = (1 - CALM) * options.duration_s
    best: trace.Trace | None = None
    most = -1
    for attempt in range(MAX_TRACES):
        seed = options.seed * MAX_TRACES + attempt
        try:
            candidate = make(names, lively_s, seed)
        except TraceError:
            if make is any_trace:
                raise
            # there is no lively trace of this size; further attempts would take long
            make = any_trace
            candidate = make(names, lively_s, seed)
        candidate = plan.with_calm_start(candidate, HELD_S)
        # Preemptions when the jobs are nearly done show nothing.
        taken = int((~candidate.idle & (candidate.time < LATE * lively_s)).sum())
        if taken > most:
            best, most = candidate, taken
        if taken >= TAKEN_PER_S * lively_s:
            break
    assert best is not None
    return best


def watch_limit_s(duration_s: float) -> float:
    """Return the maximum time for the jobs of a demo of this duration, seconds."""
    return 3 * duration_s + 120.0


def lively_trace(names: Sequence[str], duration_s: float, seed: int) -> trace.Trace:
    """Return a synthetic trace with Summit's gap lengths, in which nodes become idle and busy one
    by one, in real seconds.
    """
    idle = IDLE_SHARE * len(names)
    return synthesis.demo_trace(
        len(names), duration_s, SPEEDUP, seed, mean_idle=idle, shortest_gap_s=SHORTEST_GAP_S
    ).sped_up(SPEEDUP)


def any_trace(names: Sequence[str], duration_s: float, seed: int) -> trace.Trace:
    """Return a synthetic trace with Summit's gap lengths, without further conditions, in real
    seconds."""
    model = synthesis.MachineModel(
        IDLE_SHARE, synthesis.lognormal(475.0, 1192.0, SHORTEST_GAP_S * SPEEDUP)
    )
    return synthesis.synthesise(model, names, duration_s * SPEEDUP, seed).sped_up(SPEEDUP)


def submit(
    client: Connection,
    job: plan.DemoJob,
    script: Path,
    snapshots: Path,
    work: float,
    options: DemoOptions,
) -> JobView:
    """Submit one job like 'malletrain submit'."""
    arguments = [
        *job.arguments(work, options.seed),
        *plan.pacing_arguments(),
        *("--snapshot", str(snapshots / f"{job.name}.pt"), "--snapshot-every", "3"),
    ]
    return client.submit(
        build(
            str(script),
            arguments,
            ScriptOptions(name=job.name, nodes=job.nodes(options.nodes), workdir=str(snapshots)),
        )
    )


def _watch(
    watcher: DemoWatcher, stage: DemoStage, start: float, deadline: float, options: DemoOptions
) -> list[JobView]:
    """Wait until all jobs have ended; with chaos, kill the daemon meanwhile."""
    kill_at = start + KILL_AT * options.duration_s if options.chaos else None
    while True:
        jobs = watcher.update()
        if all(j.state in ENDED for j in jobs):
            return jobs
        now = time.time()
        if now > start + MAX_CALM * options.duration_s or any(
            e.kind == EventKind.PROFILE_FINISHED for e in watcher.events
        ):
            stage.go_on()
        if now > deadline:
            raise DemoError(
                f"After {now - start:.0f} s the jobs are not done, so the demo gives up; see "
                f"{stage.folder.daemon_log}."
            )
        if kill_at is not None and now >= kill_at:
            kill_at = None
            watcher.away(lambda: _chaos(watcher, stage))
        watcher.pause(LOOK_EVERY_S)


def _chaos(watcher: DemoWatcher, stage: DemoStage) -> Connection:
    """Kill the daemon (kill -9), wait some seconds, and start a new one."""
    stage.kill_daemon()
    watcher.say(
        "The daemon was killed (kill -9). Training goes on without it; a new one starts in "
        f"{DOWN_S:g} s."
    )
    watcher.pause(DOWN_S)
    stage.start_daemon()
    client = stage.client()
    watcher.say("The daemon is back.")
    return client


def _account(
    watcher: DemoWatcher, stage: DemoStage, details: list[JobDetail], start: float, end: float
) -> tuple[Account, Timeline]:
    names = {d.job.id: d.job.name for d in details}
    with open(stage.folder.cluster / "history.csv", newline="") as file:
        machine = machine_of(csv.DictReader(file), start, end)
    rounds = rounds_of(watcher.events, details, watcher.counts, end)
    sums = account(machine, rounds, assignments_of(watcher.events, end, names))
    nodes = sorted(machine.offered, key=lambda n: (len(n), n))
    unknown = [(went, back + NEWS_S) for went, back in watcher.outages]
    picture = Timeline(
        nodes=tuple(nodes),
        jobs=tuple(names.values()),
        begin=start,
        end=end,
        spans=sums.spans,
        marks=machine.preemptions,
        series=tuple(throughput(job, counts, unknown) for job, counts in watcher.counts.items()),
        outages=tuple(watcher.outages),
        title=f"Three jobs on {len(nodes)} nodes that the main scheduler takes and leaves",
    )
    return sums, picture


def _result(
    jobs: list[JobView],
    status: StatusView,
    undisturbed: dict[str, float | None],
    sums: Account,
    wall_s: float,
    notes: tuple[str, ...],
) -> DemoResult:
    job_results = tuple(
        JobResult(
            j.name,
            j.state,
            j.samples,
            j.rescales,
            _rounded(j.metrics, "accuracy"),
            undisturbed.get(j.name),
        )
        for j in jobs
    )
    return DemoResult(
        job_results, status.rescales, status.preemptions, status.samples, wall_s, sums, notes
    )


def _rounded(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    return None if value is None else round(float(value), 4)


LINE_INTERVAL_S = 10.0
"""With ``--plain``, time between two lines about the jobs, seconds."""


class DemoWatcher:
    """Requests the state from the daemon regularly; keeps all events, and the samples of each job
    over time. ``say`` shows a sentence of the demo itself.
    """

    def __init__(self, terminal: Console, client: Connection, title: str, plain: bool) -> None:
        self.terminal = terminal
        self.plain = plain
        self.screen = Screen(title)
        self.client = client
        self.follower = Follower(self.screen, client, all_nodes=True)
        self.follower.since = 0
        self.events: list[EventView] = []
        self.counts: dict[str, list[tuple[float, float]]] = {}
        self.outages: list[tuple[float, float]] = []
        self._line_due = 0.0
        self._live: Live | None = None

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        """Show the live screen in the body, unless plain."""
        if self.plain:
            yield
            return
        with Live(console=self.terminal, screen=True, auto_refresh=False) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def say(self, sentence: str) -> None:
        """Show a sentence of the demo itself."""
        if self._live is not None:
            self.screen.note = sentence
            self._draw()
        else:
            self.terminal.print(
                Text(f"{time.strftime('%H:%M:%S')}  {sentence}", "bold"), soft_wrap=True
            )

    def update(self) -> list[JobView]:
        """Send the requests once and show the news. Return the jobs. Raises ClientError if the
        daemon does not answer.
        """
        fresh = self.follower.update()
        now = time.time()
        self.events += fresh
        for j in self.screen.jobs:
            self.counts.setdefault(j.name, []).append((now, j.samples))
        if self.plain:
            self._lines(fresh, now)
        self._draw()
        return list(self.screen.jobs)

    def away(self, restart: Callable[[], Connection]) -> None:
        """Record that the daemon is down until ``restart`` returns."""
        began = time.time()
        self.client.close()
        self.client = self.follower.client = restart()
        self.outages.append((began, time.time()))

    def pause(self, seconds: float) -> None:
        """Wait; the screen stays visible."""
        self._draw()
        time.sleep(seconds)

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(
                self.screen.render(self.terminal.width, self.terminal.height), refresh=True
            )

    def _lines(self, fresh: list[EventView], now: float) -> None:
        names = {j.id: j.name for j in self.screen.jobs}
        for e in fresh:
            self.terminal.print(tables.EventLine(e, names).line, soft_wrap=True)
        if now >= self._line_due:
            self._line_due = now + LINE_INTERVAL_S
            for j in self.screen.jobs:
                where = (
                    f"{counted(len(j.nodes), 'node')}, {rate(j.rate)}"
                    if j.nodes
                    else j.reason or "no node"
                )
                line = (
                    f"{time.strftime('%H:%M:%S')}  {j.name}: {j.state}, {where}, "
                    f"{count(j.samples)} samples, {counted(j.rescales, 'rescale')}"
                )
                self.terminal.print(Text(line, "dim"), soft_wrap=True)
