"""Rounds that make no step: tests the network between their nodes and acts on the result.

Decides when a round is stuck and what is done. A round whose workers failed because they could not
reach a peer is tested at once. If a connection is blocked, the job goes on without one of its two
nodes. If all are open and the workers have been silent for much longer than they ever were between
two reports, they are restarted, which uses up a try. If the script has never reported, only the
owner is notified: not every script reports.
"""

from __future__ import annotations

from dataclasses import dataclass

from malletrain.config.units import format_duration
from malletrain.core import blocked
from malletrain.core.events import NodeRejected, RoundInterrupted, WorkersFailed
from malletrain.daemon.core import Core
from malletrain.daemon.job_repository import ActiveJob
from malletrain.daemon.probes import MOST_NODES, Probes, Results
from malletrain.protocol.event_kinds import EventKind
from malletrain.rounds.interface import RoundStage

_BEGUN = (RoundStage.FORMING, RoundStage.RUNNING)
_PAUSES = 3
"""So many times the longest pause between reports is no pause any more."""


@dataclass
class _Watch:
    """How one job has come on."""

    samples: float
    works: int = 0
    """The newest round in which a step was made."""
    since: float | None = None
    """When the first round began in which no step was made; None: steps are made."""
    due: float = 0.0
    """When the ways are tried next, if no step is made until then."""
    barred: int = 0
    """The newest round whose ways were tried because its workers found none."""
    quiet: float | None = None
    """When the job last reported, or else began; None: that is not known."""
    pause: float = 0.0
    """The longest time for which it was quiet before it reported; 0: it was not seen to."""

    def follow(self, run: ActiveJob, now: float) -> None:
        """Take what the job has reported."""
        monitor, generation = run.monitor, run.rounds.generation
        if monitor.total > self.samples:
            self.samples = monitor.total
            if self.quiet is not None:
                self.pause = max(self.pause, now - self.quiet)
            self.quiet = now
        if monitor.generation == generation and monitor.first_sample is not None:
            self.works = generation


class StuckRounds:
    """Looks after the rounds of all jobs."""

    def __init__(self, core: Core, probes: Probes) -> None:
        self._core = core
        self._probes = probes
        self._watches: dict[str, _Watch] = {}

    def look(self, now: float) -> None:
        """Call it every half second or so, while agents are heard."""
        core = self._core
        self._watches = {job: w for job, w in self._watches.items() if job in core.runs}
        limit = core.config.jobs.warmup_timeout
        for job, run in list(core.runs.items()):
            watch = self._watches.get(job)
            if watch is None:
                watch = self._watches[job] = _Watch(run.monitor.total, _adopted(run))
            watch.follow(run, now)
            if not _begun(run):
                watch.since = watch.quiet = None
            elif watch.works == run.rounds.generation:
                watch.since = None
            elif watch.since is None:
                watch.since, watch.due = now, now + limit
                watch.quiet = now if watch.quiet is None else watch.quiet
            elif watch.barred < run.barred == run.rounds.generation:
                watch.barred = run.barred
                self._examine(run, now, barred=True)
            elif now >= watch.due:
                watch.due = now + limit
                self._examine(run, now)

    def _examine(self, run: ActiveJob, now: float, barred: bool = False) -> None:
        """Try the ways. ``barred``: the workers failed because they found one blocked; where none
        is, that is told as every failure.
        """
        job, generation, all_members = run.row.id, run.rounds.generation, run.rounds.members
        members = all_members[:MOST_NODES]
        places = {node: self._core.rounds.place(run, node)[1] for node in members}
        tries = tuple((a, b) for a in members for b in members if a != b)

        def done(results: Results) -> None:
            current, watch = self._core.runs.get(job), self._watches.get(job)
            if current is None or watch is None or watch.since is None:
                return
            if not _begun(current) or watch.works >= generation:
                return
            if current.rounds.members != all_members:
                return  # what was found out is of another round's nodes
            if any(not result.reached for result in results.values()):
                self._go_around(current, results, barred)
            elif current.rounds.generation == generation and not barred:
                self._open(current, watch, now - watch.since, len(results) == len(tries))

        if tries:
            self._probes.begin(places, tries, now, done)
        else:
            done({})

    def _began(self, run: ActiveJob) -> str:
        limit = format_duration(self._core.config.jobs.warmup_timeout)
        return f"Round {run.rounds.generation} has made no step within {limit}"

    def _go_around(self, run: ActiveJob, results: Results, barred: bool) -> None:
        """Some ways are blocked."""
        core, job = self._core, run.row.id
        shut = [(a, b, r.trouble) for (a, b), r in sorted(results.items()) if not r.reached]
        failed = f"The workers of round {run.rounds.generation} failed before their first step"
        why = f"{failed if barred else self._began(run)}: {blocked.sentence(shut)}"
        with core.transaction():
            for node in blocked.left_out(run.rounds.members, [(a, b) for a, b, _ in shut]):
                text = f"{why} The job goes on without {node}."
                core.audit.record(EventKind.ROUND_STUCK, text, job=job, node=node)
                core.feed(NodeRejected(node))
            core.repository.notice(run, why)
            core.feed(RoundInterrupted(job))

    def _open(self, run: ActiveJob, watch: _Watch, silent: float, reported: bool) -> None:
        """No way was found blocked. ``reported``: all were tried."""
        core, job, began = self._core, run.row.id, self._began(run)
        with core.transaction():
            if not reported:
                text = (
                    f"{began}, and whether its nodes reach each other could not be found out: not "
                    "all of their agents answered."
                )
                core.repository.notice(run, text)
            elif not watch.pause:
                text = (
                    f"{began}, though its nodes reach each other: it prepares for long, it hangs, "
                    "or its script does not call malletrain.report()."
                )
                core.repository.notice(run, text)
            elif silent >= _PAUSES * watch.pause:
                text = f"{began}, though its nodes reach each other; its workers are started again."
                core.audit.record(EventKind.ROUND_STUCK, text, job=job)
                core.rounds.act(run, run.rounds.give_up())
                core.feed(WorkersFailed(job, text))


def _begun(run: ActiveJob) -> bool:
    begun = run.rounds.stage in _BEGUN and run.spec.mode != "service"
    return begun and not run.rounds.finishing


def _adopted(run: ActiveJob) -> int:
    """The round that was at work when the daemon started; 0: none. Reports of its steps may have
    come before.
    """
    at_work = run.rounds.stage is RoundStage.RUNNING and run.monitor.pending is None
    return run.rounds.generation if at_work else 0


def warn_of_silence(core: Core, run: ActiveJob, now: float) -> None:
    """Tell the owner of a job that reports nothing for long."""
    limit = core.config.jobs.no_progress_warning
    if (
        run.spec.mode != "service"
        and run.rounds.stage is RoundStage.RUNNING
        and not run.rounds.finishing
        and run.monitor.silent_for(now) > limit
    ):
        sentence = (
            f"The job has reported no progress for more than {limit:g} s: it hangs, or its "
            "script does not call malletrain.report(). "
            "Without it MalleTrain cannot know how the job scales."
        )
        with core.transaction():
            core.repository.notice(run, sentence)
