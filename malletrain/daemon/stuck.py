"""Handles rounds that finish no step: tests the network between their nodes and acts on the result.

Decides when a round is stuck and what to do. A round whose workers failed because they could not
reach a peer is tested at once. If a connection is blocked, the job continues without one of its two
nodes. If all connections work and the workers have been silent for much longer than ever between
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
from malletrain.daemon.probes import MAX_TEST_NODES, Probes, Results
from malletrain.protocol.event_kinds import EventKind
from malletrain.rounds.interface import RoundStage

_STARTED_STAGES = (RoundStage.FORMING, RoundStage.RUNNING)
_PAUSE_RATIO = 3
"""Ratio of the silence that leads to a restart to the longest pause between reports."""


@dataclass
class _Watch:
    """Progress of one job."""

    samples: float
    """Samples that the job has reported."""
    works: int = 0
    """Newest round in which a step was finished."""
    since: float | None = None
    """Start of the first round without a step; None if the current round has finished one."""
    due: float = 0.0
    """Time of the next network test, if no step is finished by then."""
    barred: int = 0
    """Newest round that was tested because its workers could not reach a peer."""
    last_report_at: float | None = None
    """Time of the job's last report, or else of its start; None if unknown."""
    pause: float = 0.0
    """Longest time between two reports, seconds; 0 if none was observed."""

    def follow(self, run: ActiveJob, now: float) -> None:
        """Take over the job's newest reports."""
        monitor, generation = run.monitor, run.rounds.generation
        if monitor.total > self.samples:
            self.samples = monitor.total
            if self.last_report_at is not None:
                self.pause = max(self.pause, now - self.last_report_at)
            self.last_report_at = now
        if monitor.generation == generation and monitor.first_sample is not None:
            self.works = generation


class StuckRounds:
    """Watches the rounds of all jobs."""

    def __init__(self, core: Core, probes: Probes) -> None:
        self._core = core
        self._probes = probes
        self._watches: dict[str, _Watch] = {}

    def look(self, now: float) -> None:
        """Check the rounds of all jobs. Call it about every half second, while agents can be
        heard.
        """
        core = self._core
        self._watches = {job: w for job, w in self._watches.items() if job in core.runs}
        limit = core.config.jobs.warmup_timeout
        for job, run in list(core.runs.items()):
            watch = self._watches.get(job)
            if watch is None:
                watch = self._watches[job] = _Watch(run.monitor.total, _running_round(run))
            watch.follow(run, now)
            if not _has_started(run):
                watch.since = watch.last_report_at = None
            elif watch.works == run.rounds.generation:
                watch.since = None
            elif watch.since is None:
                watch.since, watch.due = now, now + limit
                watch.last_report_at = now if watch.last_report_at is None else watch.last_report_at
            elif watch.barred < run.barred == run.rounds.generation:
                watch.barred = run.barred
                self._examine(run, now, barred=True)
            elif now >= watch.due:
                watch.due = now + limit
                self._examine(run, now)

    def _examine(self, run: ActiveJob, now: float, barred: bool = False) -> None:
        """Test the connections of a round. ``barred``: whether its workers failed because they
        could not reach a peer. Such a failure without a blocked connection is reported as any other
        failure.
        """
        job, generation, all_members = run.row.id, run.rounds.generation, run.rounds.members
        members = all_members[:MAX_TEST_NODES]
        places = {node: self._core.rounds.place(run, node)[1] for node in members}
        tries = tuple((a, b) for a in members for b in members if a != b)

        def done(results: Results) -> None:
            current, watch = self._core.runs.get(job), self._watches.get(job)
            if current is None or watch is None or watch.since is None:
                return
            if not _has_started(current) or watch.works >= generation:
                return
            if current.rounds.members != all_members:
                return  # the results are about the nodes of another round
            if any(not result.reached for result in results.values()):
                self._exclude_nodes(current, results, barred)
            elif current.rounds.generation == generation and not barred:
                self._handle_open_network(
                    current, watch, now - watch.since, len(results) == len(tries)
                )

        if tries:
            self._probes.begin(places, tries, now, done)
        else:
            done({})

    def _no_step_phrase(self, run: ActiveJob) -> str:
        limit = format_duration(self._core.config.jobs.warmup_timeout)
        return f"Round {run.rounds.generation} has made no step within {limit}"

    def _exclude_nodes(self, run: ActiveJob, results: Results, barred: bool) -> None:
        """Continue the job without nodes behind blocked connections."""
        core, job = self._core, run.row.id
        blocked_connections = [
            (a, b, r.trouble) for (a, b), r in sorted(results.items()) if not r.reached
        ]
        failed = f"The workers of round {run.rounds.generation} failed before their first step"
        problem = failed if barred else self._no_step_phrase(run)
        why = f"{problem}: {blocked.sentence(blocked_connections)}"
        with core.transaction():
            for node in blocked.left_out(
                run.rounds.members, [(a, b) for a, b, _ in blocked_connections]
            ):
                text = f"{why} The job continues without {node}."
                core.audit.record(EventKind.ROUND_STUCK, text, job=job, node=node)
                core.feed(NodeRejected(node))
            core.repository.notice(run, why)
            core.feed(RoundInterrupted(job))

    def _handle_open_network(
        self, run: ActiveJob, watch: _Watch, silent: float, reported: bool
    ) -> None:
        """Handle a stuck round without a blocked connection. ``silent``: seconds without a step.
        ``reported``: whether all connections were tested.
        """
        core, job, began = self._core, run.row.id, self._no_step_phrase(run)
        with core.transaction():
            if not reported:
                text = (
                    f"{began}, and the network between its nodes could not be tested: not all of "
                    "their agents answered."
                )
                core.repository.notice(run, text)
            elif not watch.pause:
                text = (
                    f"{began}, though its nodes reach each other: its preparation takes long, it "
                    "hangs, or its script does not call malletrain.report()."
                )
                core.repository.notice(run, text)
            elif silent >= _PAUSE_RATIO * watch.pause:
                text = f"{began}, though its nodes reach each other; its workers are restarted."
                core.audit.record(EventKind.ROUND_STUCK, text, job=job)
                core.rounds.act(run, run.rounds.give_up())
                core.feed(WorkersFailed(job, text))


def _has_started(run: ActiveJob) -> bool:
    begun = run.rounds.stage in _STARTED_STAGES and run.spec.mode != "service"
    return begun and not run.rounds.finishing


def _running_round(run: ActiveJob) -> int:
    """Return the round that was running when the daemon started; 0 if there was none. Its steps may
    have been reported before.
    """
    is_running = run.rounds.stage is RoundStage.RUNNING and run.monitor.pending is None
    return run.rounds.generation if is_running else 0


def warn_of_silence(core: Core, run: ActiveJob, now: float) -> None:
    """Notify the owner of a job that has not reported progress for long.

    Args:
        core: the daemon's core.
        run: the job.
        now: time, seconds.
    """
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
