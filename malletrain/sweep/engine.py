"""The engine of a sweep: checks trials and jobs and carries out the next actions. A turn may be
interrupted anywhere; the next one, of this process or another, continues.

:class:`Engine` decides when a trial starts, is pruned and ends; :func:`weights` decides the weight
of its job. No clock, no sleep: the caller passes the time. States of a trial:

    asked → values chosen → job submitted (with a key: once) → values of the metric read
      → its end noted, then its job cancelled, then told       (pruned, or cancelled by its owner)
      → told                                                   (its job has ended)

Each arrow is stored before the next one starts, and all are idempotent. The successor of a trial
that is about to end is already in the queue, so that the nodes do not become idle: the next trial
starts after the end is noted and before the job is cancelled, or when the trial has reported its
last step. The exception is a sampler that learns and is to run one trial at a time.

:class:`Jobs` is what the engine needs of the jobs of trials; the implementation with a daemon is
:class:`malletrain.sweep.daemon_jobs.DaemonJobs`.

Weights: trials on higher rungs weigh more. The pruner and the allocator meet in the bid. The trials
on the highest rung have the weight that the sweep has; the others have less. When only those on the
highest rung remain, they have the whole weight and get the nodes that there are.
:mod:`malletrain.core.bidders` makes all trials together count as one job of that weight beside
other jobs.

The weights are close to each other, because a node brings most to a trial that has none: a second
node for a running trial brings about 0.87 as much (2^0.9 - 1, with throughput taken as nodes^0.9
until it is measured). No trial weighs less than 0.88 of another, so that many trials start small
before one grows, and the remaining nodes go to the most promising ones. A factor of 2 per rung
would let one trial grow while others wait, which trains less on the same nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from malletrain.protocol.counting import counted
from malletrain.protocol.messages import JobSpec
from malletrain.sweep import ledger as book
from malletrain.sweep.ledger import Ledger, StoredValueError
from malletrain.sweep.space import Value
from malletrain.sweep.spec import SweepError

ENDED = ("completed", "failed", "cancelled")
LOST = "lost"
WEIGHT_PER_RUNG = 1.02
"""Ratio of the weights of two trials that are one rung apart."""
MAX_RUNGS_BELOW = 6
"""A trial further below the highest rung weighs as much as one this far below it."""
DONE = "All trials have ended."
_QUEUED = " {0} more wait in the study: malletrain sweep add-trials {1} {0}."
"""Trials that another program has queued in the study (Optuna's enqueue_trial)."""
IN_THE_FILE = (
    "If the mistake is in the sweep's file, mend it: malletrain sweep run FILE --name OTHER starts "
    "a new sweep, because this one keeps its description."
)
CANCELLED = "It was cancelled."
PRUNED, WITHDRAWN = "pruned", "cancelled"
"""Ends of a trial for which its job is cancelled."""
ENDED_IN_STUDY = "ended in the study"
QUOTA_RETRY_S = 5.0
"""Time between two submissions of a trial that its owner's quota does not allow, seconds. Its job
is built anew for each, which can call functions of the owner.
"""


class JobsAway(RuntimeError):
    """The daemon does not answer at the moment. The message is a sentence."""


class JobRefused(RuntimeError):
    """The job cannot be submitted as it is; the message is a sentence."""


class TooManyJobs(RuntimeError):
    """The owner may submit the job when another one has ended. It does not exist yet. The message
    is a sentence.
    """


@dataclass(frozen=True)
class TrialJob:
    """State of a trial's job."""

    id: str
    state: str
    """As in the glossary; ``lost``: the daemon knows no such job."""
    reason: str = ""
    nodes: int = 0
    """Number of nodes on which it runs."""

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.state in ENDED or self.state == LOST


class Jobs(Protocol):
    """Interface to the jobs. Every call raises JobsAway if the daemon does not answer."""

    def daemon(self) -> str:
        """Return the name of the daemon that has the jobs: ids are valid for this daemon only."""

    def submit(self, spec: JobSpec) -> str:
        """Submit a job and return its id. If its key was submitted before, returns that job's id.
        Raises JobRefused, TooManyJobs.
        """

    def states(self, ids: Sequence[str]) -> Mapping[str, TrialJob]:
        """Return the state of each of these jobs."""

    def points(self, job: str, metric: str, since: int) -> list[tuple[int, float]]:
        """Return the reported values of a metric as (step, value), at least those after
        ``since``."""

    def last(self, job: str, metric: str) -> float | None:
        """Return the newest value that the job reported of a metric."""

    def names(self, job: str) -> list[str]:
        """Return the names of the metrics that the job has reported."""

    def node_seconds(self, job: str) -> float:
        """Return the node-seconds that the job had."""

    def weigh(self, job: str, weight: float) -> None:
        """Set the weight of a job; no effect if it has ended."""

    def cancel(self, job: str, why: str) -> None:
        """Cancel a job; no effect if it has ended. ``why``: the reason that is reported."""

    def wait(self, ids: Sequence[str], within_s: float) -> None:
        """Wait until one of these jobs has, or may have, reported a value or ended since the last
        call; at most ``within_s`` seconds.
        """


def rung(step: int | None, first: int, reduction: int) -> int:
    """The rung of a trial: how many rungs it has passed.

    Args:
        step: the last step that the trial reported; None if it reported none.
        first: step of the first rung.
        reduction: factor between the steps of two rungs.
    """
    passed, at = 0, first
    while step is not None and step >= at:
        passed, at = passed + 1, at * reduction
    return passed


def weights(rungs: Mapping[int, int], highest: float) -> dict[int, float]:
    """The weight of each trial's job.

    Args:
        rungs: trial → its rung.
        highest: the weight of the trials on the highest rung.
    """
    top = max(rungs.values(), default=0)
    return {
        trial: highest * WEIGHT_PER_RUNG ** -min(top - rung_, MAX_RUNGS_BELOW)
        for trial, rung_ in rungs.items()
    }


def _increasing(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points whose step is above those of all earlier ones. Which points of a script
    whose steps decrease are used must not depend on when they are read.
    """
    increasing: list[tuple[int, float]] = []
    for step, value in points:
        if not increasing or step > increasing[-1][0]:
            increasing.append((step, value))
    return increasing


SpecOf = Callable[[Ledger, int, dict[str, Value]], JobSpec]

_REASONS = {
    PRUNED: "its trial was pruned",
    WITHDRAWN: "its sweep was cancelled",
    ENDED_IN_STUDY: "another program ended its trial in the study",
}
_TRIAL_STATES = {PRUNED: TrialState.PRUNED, WITHDRAWN: TrialState.FAIL}


class Engine:
    """The engine of one sweep. ``spec_of`` builds the job of a trial; ``point`` is called with a
    name between any two writes or actions, where tests interrupt the engine.
    """

    def __init__(
        self,
        ledger: Ledger,
        jobs: Jobs,
        spec_of: SpecOf,
        point: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.ledger = ledger
        self.jobs = jobs
        self._spec_of = spec_of
        self._point = point
        self._s = ledger.sweep
        self._failed_before = {t.number for t in ledger.trials(TrialState.FAIL)}
        self._released: set[int] = set()
        """Trials that another program has ended in the study, and whose jobs are cancelled."""
        self.waits_because = ""
        """Why a trial's job cannot be submitted now, as a sentence, since the last turn; empty if
        none waits.
        """
        self._waiting: dict[int, tuple[float, str]] = {}
        """Trial that its owner's quota does not allow → (time of the next attempt, why)."""

    def turn(self, now: float) -> bool:
        """Carry out all actions that are due. Return whether the sweep is over.

        Raises:
            JobsAway: the daemon does not answer; nothing is lost, try again.
            SweepError: the sweep cannot continue; the sentence says why.
        """
        ledger = self.ledger
        ledger.alone()
        self.waits_because = ""
        self._release_jobs()
        jobs, running = self.jobs.states(self.jobs_under_way()), ledger.running()
        losers: list[tuple[FrozenTrial, TrialJob]] = []
        for trial in running:
            name = trial.user_attrs.get(book.JOB, "")
            elsewhere = self._is_elsewhere(trial) and name
            state = TrialJob(name, LOST) if elsewhere else jobs.get(name)
            job = self._advance_trial(trial, state, now)
            if job is not None:
                losers.append((trial, job))
        if not self._starts_ahead or ledger.cancelled:
            self._finish_all(losers)
        if ledger.cancelled:
            if ledger.running():
                return False
            ledger.ends(CANCELLED)
            return True
        try:
            self._stop_if_hopeless()
            self._start_trials(now)
        except SweepError:
            self._finish_all(losers)
            raise
        self._finish_all(losers)
        self._update_weights()
        if ledger.running():
            return False
        self._stop_if_all_failed()
        ledger.ends(self._stop_reason(now) or DONE)
        return True

    def jobs_under_way(self) -> list[str]:
        """Return the jobs of the trials that have not ended."""
        running = [t for t in self.ledger.running() if book.JOB in t.user_attrs]
        return [t.user_attrs[book.JOB] for t in running if not self._is_elsewhere(t)]

    def _is_elsewhere(self, trial: FrozenTrial) -> bool:
        """Return whether the trial's job belongs to another daemon, so that the job with this id
        here is a different one."""
        daemon = trial.user_attrs.get(book.DAEMON)
        return daemon is not None and daemon != self.jobs.daemon()

    def _release_jobs(self) -> None:
        """Cancel the jobs of trials that another program has ended in the study, such as
        optuna-dashboard. The engine notes the node-seconds before it ends a trial.
        """
        for trial in self.ledger.trials():
            if (
                trial.state.is_finished()
                and book.JOB in trial.user_attrs
                and book.NODE_S not in trial.user_attrs
                and trial.number not in self._released
                and not self._is_elsewhere(trial)
            ):
                self.jobs.cancel(trial.user_attrs[book.JOB], _REASONS[ENDED_IN_STUDY])
                self._released.add(trial.number)

    # --- one trial ---

    def _advance_trial(
        self, trial: FrozenTrial, job: TrialJob | None, now: float
    ) -> TrialJob | None:
        """Carry out the actions for a trial, except pruning: if it is to be pruned, returns its
        job."""
        ending = trial.user_attrs.get(book.ENDING)
        if ending is None and self.ledger.cancelled:
            self.ledger.note(trial, book.ENDING, WITHDRAWN)
            self._point("ending noted")
            ending = WITHDRAWN
        if job is None and ending is not None and book.JOB not in trial.user_attrs:
            # It may have been submitted before the engine was killed.
            job = self._submit(trial, now)
            if trial.number in self._waiting:  # it was not
                self.waits_because = ""
                self._fail(trial, "its owner cancelled the sweep")
            if job is None:
                return None
        if job is None:
            self._submit_if_due(trial, now)
        elif ending == WITHDRAWN and job.state not in ("completed", "failed"):
            self._finish(trial, job, ending)
        elif ending == WITHDRAWN:  # it has ended by itself: use its result
            self._follow(trial, job)
        elif ending is not None or self._follow(trial, job):
            return job
        return None

    def _submit_if_due(self, trial: FrozenTrial, now: float) -> None:
        """Submit the job of a trial that has none, or let it wait or fail if the owner's quota did
        not allow it.
        """
        again_at, why = self._waiting.get(trial.number, (now, ""))
        if why and (over := self._limit_reached(now)):
            self._fail(trial, f"it waited for its owner's quota until the sweep ended: {over}")
        elif now < again_at:
            self.waits_because = why
        else:
            self._submit(trial, now)

    def _submit(self, trial: FrozenTrial, now: float) -> TrialJob | None:
        """Submit the job of a trial. Returns None if the trial has failed instead, or if its owner
        may have no more jobs now.
        """
        try:
            values = self.ledger.values(trial.number)
        except StoredValueError as error:  # another program has queued it in the study
            self._fail(trial, f"its values are not of the space: {error}")
            return None
        self._waiting.pop(trial.number, None)
        self._point("values chosen")
        spec = self._spec_of(self.ledger, trial.number, values)
        spec = msgspec.structs.replace(spec, weight=self._first_weight(trial))
        try:
            job = self.jobs.submit(spec)
        except TooManyJobs as error:
            self.waits_because = str(error)
            self._waiting[trial.number] = now + QUOTA_RETRY_S, str(error)
            return None
        except JobRefused as error:
            self._fail(trial, str(error))
            raise SweepError(f"Trial {trial.number} cannot be submitted: {error}") from None
        self._point("submitted")
        try:
            self.ledger.note(trial, book.DAEMON, self.jobs.daemon())
            self.ledger.note(trial, book.JOB, job)
        except UpdateFinishedTrialError:
            self.jobs.cancel(job, _REASONS[ENDED_IN_STUDY])
            raise
        self._point("bound")
        return self.jobs.states([job])[job]

    def _follow(self, trial: FrozenTrial, job: TrialJob) -> bool:
        """Read the values that a job reported, and end the trial if the job has ended. Returns
        whether it is to be pruned."""
        if self._one_metric and job.state != LOST and self._read_points(trial, job):
            self._point("pruner said")
            self.ledger.note(trial, book.ENDING, PRUNED)
            self._point("ending noted")
            return True
        if job.ended:
            self._handle_end(trial, job)
        return False

    @property
    def _one_metric(self) -> bool:
        return len(self._s.sweep.metrics) == 1

    def _read_points(self, trial: FrozenTrial, job: TrialJob) -> bool:
        since = trial.last_step if trial.last_step is not None else -1
        points = _increasing(self.jobs.points(job.id, self._s.sweep.metrics[0], since))
        # A trial whose job has ended is not pruned.
        judge = self._s.pruner.kind != "none" and not job.ended
        return bool(points) and self.ledger.report(trial.number, points, judge)

    def _finish_all(self, losers: list[tuple[FrozenTrial, TrialJob]]) -> None:
        """End the pruned trials. The list is empty afterwards."""
        while losers:
            self._finish(*losers.pop(0), PRUNED)

    def _finish(self, trial: FrozenTrial, job: TrialJob, ending: str) -> None:
        """End a trial whose end is noted: cancel its job first."""
        if not job.ended:
            self.jobs.cancel(job.id, _REASONS[ending])
            self._point("cancelled")
        if ending == WITHDRAWN:
            self._fail(trial, "its owner cancelled the sweep", job)
            return
        self._note_cost(trial, job)
        self.ledger.tell(trial.number, _TRIAL_STATES[ending])
        self._point("told")

    def _handle_end(self, trial: FrozenTrial, job: TrialJob) -> None:
        """Handle a job that has ended or was cancelled by a user."""
        if job.state != "completed":
            why = {
                "failed": f"its job {job.id} failed: {job.reason}",
                "cancelled": f"its job {job.id} was cancelled",
            }.get(job.state, f"the daemon knows no job {job.id}")
            if self._is_elsewhere(trial):
                why = f"its job {job.id} is that of another daemon, {trial.user_attrs[book.DAEMON]}"
            self._fail(trial, why, job)
            return
        values = self._values(job)
        missing = [m for m, v in zip(self._s.sweep.metrics, values, strict=True) if v is None]
        if missing and self._diverged(job, missing[0]):
            # For the sampler it counts as pruned, and not as a failure.
            self.ledger.note(trial, book.WHY, f"its last {missing[0]} is not a number")
            self._finish(trial, job, PRUNED)
            return
        if missing:
            self._fail(trial, self._missing_metric_reason(job, missing[0]), job)
            return
        self._note_cost(trial, job)
        numbers = [v for v in values if v is not None]
        self.ledger.tell(trial.number, TrialState.COMPLETE, numbers)
        self._point("told")

    def _diverged(self, job: TrialJob, metric: str) -> bool:
        """Return whether the last value that the job reported of the metric is NaN or infinite."""
        value = self.jobs.last(job.id, metric)
        return value is not None and not math.isfinite(value)

    def _missing_metric_reason(self, job: TrialJob, metric: str) -> str:
        """Return the reason of the failure if a job has ended without a value of the metric."""
        names = self.jobs.names(job.id)
        it = f"it reported {', '.join(names)}" if names else "it never called malletrain.metric"
        return f"its job {job.id} reported no {metric}; {it}"

    def _values(self, job: TrialJob) -> list[float | None]:
        """Return the result of a trial in each metric; None if it reported no finite value."""
        values: list[float | None] = []
        for metric, direction in zip(self._s.sweep.metrics, self._s.sweep.directions, strict=True):
            value = self.jobs.last(job.id, metric)
            diverged = value is not None and not math.isfinite(value)
            if self._s.sweep.value == "best" and not diverged:
                choose = max if direction == "maximize" else min
                points = self.jobs.points(job.id, metric, -1)
                # The last value can be one without a step, which is no point.
                series = [v for v in (value, *(v for _, v in points)) if v is not None]
                value = choose(filter(math.isfinite, series), default=value)
            values.append(None if diverged else value)
        return values

    def _fail(self, trial: FrozenTrial, why: str, job: TrialJob | None = None) -> None:
        self.ledger.note(trial, book.WHY, why)
        self._note_cost(trial, job)
        self.ledger.tell(trial.number, TrialState.FAIL)
        self._point("told")

    def _note_cost(self, trial: FrozenTrial, job: TrialJob | None) -> None:
        if job is not None:
            cost_s = 0.0 if job.state == LOST else self.jobs.node_seconds(job.id)
            self.ledger.note(trial, book.NODE_S, cost_s)
            self._point("cost noted")

    # --- all of them ---

    def _stop_if_hopeless(self) -> None:
        trials = self.ledger.trials()
        failed = [
            t for t in trials if t.state == TrialState.FAIL and t.number not in self._failed_before
        ]
        ended_well = any(
            t.state in (TrialState.COMPLETE, TrialState.PRUNED)
            or t.user_attrs.get(book.ENDING) == PRUNED
            for t in trials
        )
        if len(failed) >= self._s.sweep.most_failed and not ended_well:
            why = failed[-1].user_attrs.get(book.WHY, "for a reason that is not known")
            runs = any(t.state == TrialState.RUNNING for t in trials)
            raise SweepError(
                f"{counted(len(failed), 'trial')} failed and none ended well. Trial "
                f"{failed[-1].number}: {why.rstrip('.')}. {IN_THE_FILE} If it is "
                f"elsewhere, mend it, then: malletrain sweep resume {self.ledger.name}"
                + (f" (or end what runs: malletrain sweep cancel {self.ledger.name})" * runs)
            )

    def _stop_if_all_failed(self) -> None:
        trials = [t for t in self.ledger.trials() if t.state != TrialState.WAITING]
        if trials and all(t.state == TrialState.FAIL for t in trials):
            why = trials[-1].user_attrs.get(book.WHY, "for a reason that is not known")
            raise SweepError(
                f"All trials failed ({len(trials)}). Trial {trials[-1].number}: "
                f"{why.rstrip('.')}. {IN_THE_FILE}"
            )

    def _start_trials(self, now: float) -> None:
        """Start as many trials as ``at_once`` and the owner's quota allow."""
        while not (self.waits_because or self._stop_reason(now)):
            if self._active_trials() >= self._s.sweep.at_once:
                return
            trial = self.ledger.ask()
            self._point("asked")
            self._submit(trial, now)

    @property
    def _starts_ahead(self) -> bool:
        """Whether a trial starts before the end of another is reported to the sampler."""
        return self._s.sweep.at_once > 1 or self._s.sampler.kind in ("random", "grid")

    def _active_trials(self) -> int:
        """Return the number of running trials, without those that are about to end: those whose end
        is noted, and at most ``at_once`` of those that have reported their last step. A script
        whose steps begin again in each epoch reports that long before its end.
        """
        running = self.ledger.running()
        if not self._starts_ahead:
            return len(running)
        running = [t for t in running if book.ENDING not in t.user_attrs]
        last = self._last_step()
        training = sum(t.last_step != last for t in running)
        return max(training, len(running) - self._s.sweep.at_once)

    def _last_step(self) -> int:
        """Return the last step of a trial: the step at which all completed trials ended, else as
        the sweep says; -1 if not known.
        """
        ends = {t.last_step for t in self.ledger.trials(TrialState.COMPLETE)}
        last = ends.pop() if len(ends) == 1 else None
        return last or self._s.pruner.max_steps or -1

    def _stop_reason(self, now: float) -> str:
        """Return why no more trials start; empty if more may start."""
        ledger = self.ledger
        trials = [t for t in ledger.trials() if t.state != TrialState.WAITING]
        if len(trials) >= ledger.target_trials:
            waiting = len(ledger.trials(TrialState.WAITING))
            return DONE + (_QUEUED.format(waiting, ledger.name) if waiting else "")
        return self._limit_reached(now)

    def _limit_reached(self, now: float) -> str:
        """Return which limit of the sweep, its time or its node-hours, is reached; empty if none
        is.
        """
        s, ledger = self._s.sweep, self.ledger
        trials = [t for t in ledger.trials() if t.state != TrialState.WAITING]
        target = counted(ledger.target_trials, "trial")
        if s.time is not None and now - ledger.began >= s.time:
            return f"Its time is over, after {len(trials)} of {target}."
        if s.node_hours is not None and self._used_s(trials) >= s.node_hours * 3600:
            return f"Its node-hours are used up, after {len(trials)} of {target}."
        return ""

    def _used_s(self, trials: list[FrozenTrial]) -> float:
        used = 0.0
        for trial in trials:
            running = trial.state == TrialState.RUNNING and book.JOB in trial.user_attrs
            if running and not self._is_elsewhere(trial):
                used += self.jobs.node_seconds(trial.user_attrs[book.JOB])
            else:
                used += trial.user_attrs.get(book.NODE_S, 0.0)
        return used

    def _weights(self, running: list[FrozenTrial]) -> dict[int, float]:
        """Return the weights of the jobs of these trials: trial → weight."""
        p = self._s.pruner
        rungs = {t.number: rung(t.last_step, p.min_steps, p.reduction) for t in running}
        if p.kind == "none":
            rungs = dict.fromkeys(rungs, 0)
        return weights(rungs, self.ledger.highest)

    def _first_weight(self, trial: FrozenTrial) -> float:
        """Return the initial weight of its job, the same if it is submitted again."""
        if book.WEIGHT not in trial.user_attrs:
            weight = self._weights([*self.ledger.running(), trial])[trial.number]
            if weight == self._s.job.weight:
                return weight
            self.ledger.note(trial, book.WEIGHT, weight)
            self._point("weight noted")
            return weight
        return float(trial.user_attrs[book.WEIGHT])

    def _update_weights(self) -> None:
        """Update the weights of the jobs, by the rungs of their trials."""
        running = [t for t in self.ledger.running() if book.JOB in t.user_attrs]
        now = self._weights(running)
        for trial in running:
            weight = now[trial.number]
            # Without a noted weight it was submitted with the weight in the sweep's description.
            if trial.user_attrs.get(book.WEIGHT, self._s.job.weight) != weight:
                self.jobs.weigh(trial.user_attrs[book.JOB], weight)
                self._point("weighed")
                self.ledger.note(trial, book.WEIGHT, weight)
