"""The controller's half of profiling: carries out what the advisor answers, on the controller's own
records.

A part of :class:`malletrain.core.controller.Controller` in a file of its own; nobody else makes
one. Decides which nodes a profile's steps take and leave, what a crash at one size counts, and what
is announced and stored. What is measured, and when, is decided by :mod:`malletrain.core.profiling`
and the advisor. With ``ControllerSettings.profiling`` None it does nothing at all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from jpa import AdvisorAnswer, PointMeasured, ProfileFinished, ProfileResult, SetSize, Waiting
from jpa.costs import KINDS
from malletrain.core.events import (
    Announce,
    Command,
    JobState,
    KeepScalingModel,
    PriorSuggested,
    Progressed,
    Rescale,
    RescaleCosted,
    RoundFormed,
    Start,
)
from malletrain.core.profiling import Machine, Observed, Profiler
from malletrain.core.scaling_model import ScalingModel

if TYPE_CHECKING:
    from malletrain.core.controller import Controller
    from malletrain.core.state import JobRecord

WORTH_A_PLAN = 0.1
"""An ordinary observation that moves the belief by more than this, relative, is a reason to plan
anew.
"""


class ProfileRunner:
    """Profiles of one controller's jobs."""

    def __init__(self, controller: Controller) -> None:
        self._of = controller
        settings = controller.settings
        self.profiler = (
            Profiler(settings.profiling, settings.planning.cost) if settings.profiling else None
        )

    # --- reading ---

    def holds(self, job: JobRecord) -> bool:
        """Whether the job is being profiled: it stays at the size asked for."""
        return self.profiler is not None and self.profiler.profiling == job.submitted.job

    def next_wakeup(self) -> float | None:
        """When :meth:`review` is due."""
        return self.profiler.tick_at if self.profiler else None

    # --- what the controller tells ---

    def submitted(self, job: JobRecord, learned: ScalingModel | None) -> None:
        """A new job."""
        if self.profiler is not None:
            job.learned = self.profiler.begin(learned)
            self._believe(job)

    def review(self, jobs: list[JobRecord], coming: bool, now: float) -> list[Command]:
        """Bring the advisor up to date; ``jobs``: those that may run. Call it before every plan and
        when :meth:`next_wakeup` says so.
        """
        if self.profiler is None:
            return []
        c = self._of
        for other in jobs:
            curve = self.profiler.of_its_kind(other)
            if curve is not other.learned.curve and not self.holds(other):
                other.learned = replace(other.learned, curve=curve)
                self._believe(other)
        machine = Machine(c._usable, c._idle, coming, c.settings.min_interval_s)
        commands = self._obey(self.profiler.review(jobs, machine, now), now)
        job = c._unfinished.get(self.profiler.profiling or "")
        if job is not None and job.broken and job.nodes and all(n in c._usable for n in job.nodes):
            commands += self._seat(
                job, job.nodes, now
            )  # its workers are to be started again, where they were
        return commands

    def ended(self, job: JobRecord, now: float) -> list[Command]:
        """The job ends."""
        return self._obey(self.profiler.gone(job.submitted.job, now), now) if self.profiler else []

    def rescaled(self, job: JobRecord, now: float) -> list[Command]:
        """The job processes samples at its newest scale."""
        if self.profiler is None or job.broken:
            return []
        return self._obey(self.profiler.scaled(job.submitted.job, len(job.nodes), now), now)

    def crashed(self, job: JobRecord, now: float) -> list[Command] | None:
        """The job's script failed while it was profiled: the size is to blame, not the job, once
        another size has worked.

        None when the job is not being profiled.
        """
        if self.profiler is None or not self.holds(job):
            return None
        return self._obey(self.profiler.crashed(job.submitted.job, len(job.nodes), now), now)

    @staticmethod
    def worked_elsewhere(job: JobRecord) -> bool:
        """Whether the script is known to run at another size than the present one."""
        return any(
            p.rate > 0 and p.nodes != len(job.nodes) for p in job.learned.curve.current.points
        )

    # --- events ---

    def progressed(self, event: Progressed, now: float) -> list[Command]:
        """Ordinary progress: the profile's measurement, or a window more of the running job."""
        job = self._of._unfinished.get(event.job)
        if (
            self.profiler is None
            or job is None
            or job.rescaling
            or job.broken
            or not job.nodes
            or event.nodes != len(job.nodes)
        ):
            return []
        if not all(math.isfinite(x) and x >= 0 for x in (event.time, event.samples, event.batch)):
            return []
        return self._obey(self.profiler.progressed(job, event, now), now)

    def formed(self, event: RoundFormed, now: float) -> list[Command]:
        """All workers have been started."""
        if self.profiler is not None:
            self.profiler.formed(event.job, now)
        return []

    def costed(self, event: RescaleCosted, now: float) -> list[Command]:
        """What a rescale cost: a belief for the next plans."""
        job = self._of._unfinished.get(event.job)
        if (
            self.profiler is None
            or job is None
            or event.kind not in KINDS
            or not (math.isfinite(event.seconds) and event.seconds >= 0)
        ):
            return []
        costs = job.learned.costs.observe(event.kind, event.seconds)
        return self._learn(job, replace(job.learned, costs=costs))

    def believed(self, event: PriorSuggested, now: float) -> list[Command]:
        """Other jobs suggest something of this one's scaling."""
        job = self._of._unfinished.get(event.job)
        prior = event.learned.curve.current.prior
        if self.profiler is None or job is None or prior is None or job.learned.profiled:
            return []
        curve = job.learned.curve.with_prior(prior)
        if curve is job.learned.curve:
            return []
        answers = self.profiler.believed(job, prior, now)
        commands = self._learn(job, replace(job.learned, curve=curve))
        self._of._plan_soon(now + self._of.settings.settle_s)
        return commands + self._obey(answers, now)

    # --- carrying out ---

    def _obey(self, answers: Iterable[AdvisorAnswer | Observed], now: float) -> list[Command]:
        commands: list[Command] = []
        todo = deque(answers)
        while todo:
            answer = todo.popleft()
            job = self._of.jobs[answer.job]
            if isinstance(answer, SetSize):
                moves, more = self._resize(job, answer, now)
                commands += moves
                todo.extend(more)
            elif isinstance(answer, PointMeasured):
                commands += self._measured(job, answer)
            elif isinstance(answer, ProfileFinished):
                commands += self._finished(job, answer, now)
            elif isinstance(answer, Waiting):
                if job.state is JobState.PROFILING:
                    job.state = JobState.RUNNING
                    self._of._plan_soon(now)
                commands.append(Announce(answer.job, "profile-waiting", answer.reason))
            else:
                commands += self._observed(job, answer, now)
        return commands

    def _resize(
        self, job: JobRecord, answer: SetSize, now: float
    ) -> tuple[list[Command], list[AdvisorAnswer]]:
        """Move the profiled job, its donor first. What cannot be carried out any more is told the
        advisor as a loss.
        """
        c, profiler = self._of, self.profiler
        assert profiler is not None
        old = tuple(n for n in job.nodes if n in c._usable)
        node_class = c._usable[old[0]].node_class if old else profiler.class_of(answer.job)
        donor = c.jobs[answer.donor] if answer.donor else None
        given: tuple[str, ...] = ()
        if donor is not None:
            sound = (
                not donor.rescaling
                and not donor.broken
                and all(n in c._usable for n in donor.nodes)
            )
            given = (
                donor.nodes[-answer.take :]
                if sound and donor.accepts(len(donor.nodes) - answer.take)
                else ()
            )
        idle = sorted(
            (n for n in c._idle if c._usable[n].node_class == node_class), key=self._longest_first
        )
        new = (*old, *idle, *given)[: answer.nodes]
        if len(new) < answer.nodes:
            return [], profiler.lacks(answer.job, len(old), now)
        commands: list[Command] = []
        if job.state is not JobState.PROFILING:
            data = {
                "nodes": answer.nodes,
                "before": len(old),
                "donor": answer.donor or "",
                "taken": len(given),
            }
            commands.append(Announce(answer.job, "profile-started", answer.reason, data))
            job.state = JobState.PROFILING
        if donor is not None and given:
            left = len(donor.nodes) - len(given)
            sentence = (
                f"It gives {len(given)} of its {len(donor.nodes)} nodes to the profile "
                f"of job {answer.job}."
            )
            data = {"by": answer.job, "before": len(donor.nodes), "nodes": left}
            commands.append(Announce(donor.submitted.job, "job-interrupted", sentence, data))
            donor.interrupted_at = now
            c._free(given, now)
            donor.nodes, donor.rescaling, donor.forced, donor.planned = (
                donor.nodes[:left],
                True,
                False,
                c.plans,
            )
            commands.append(Rescale(donor.submitted.job, donor.nodes))
        if new == job.nodes and not job.broken:
            return commands, [] if job.rescaling else profiler.scaled(answer.job, len(new), now)
        return commands + self._seat(job, new, now), []

    def _longest_first(self, node: str) -> tuple[bool, float, str]:
        horizon = self._of._usable[node].horizon_s
        return horizon is not None, -(horizon or 0.0), node

    def _seat(self, job: JobRecord, new: tuple[str, ...], now: float) -> list[Command]:
        """Move the profiled job to exactly ``new``; what it leaves is free for others."""
        c, name = self._of, job.submitted.job
        within = c._deadline(job.nodes, now)
        command: Command = Rescale(name, new, within) if job.nodes else Start(name, new)
        left = [n for n in job.nodes if n not in new]
        c._free(left, now)
        for node in new:
            c.nodes[node].job = name
            c._idle.discard(node)
        job.nodes, job.rescaling, job.broken, job.starving, job.planned = (
            new,
            True,
            False,
            False,
            c.plans,
        )
        job.forced = within is not None
        c._at_work[name] = job
        c._leases_due = True
        if left:
            c._plan_soon(now + c.settings.settle_s)
        assert self.profiler is not None
        self.profiler.moved(name)
        return [command]

    def _measured(self, job: JobRecord, answer: PointMeasured) -> list[Command]:
        m = answer.measurement
        job.tries = 0  # the script runs: what failed before was its size
        known = math.isfinite(m.half_width)
        spread = f"± {m.half_width:.2g}" if known else "± unknown"
        sentence = f"{m.nodes} nodes: {m.rate:.4g} {spread} samples/s, from {m.seconds:.1f} s."
        data = {
            "nodes": m.nodes,
            "rate": m.rate,
            "spread": m.half_width if known else None,
            "seconds": m.seconds,
            "stable": m.stable,
        }
        commands = self._learn(job, replace(job.learned, curve=answer.curve))
        return [Announce(answer.job, "profile-point", sentence, data), *commands]

    def _finished(self, job: JobRecord, answer: ProfileFinished, now: float) -> list[Command]:
        assert self.profiler is not None
        self.profiler.forget_wish(answer.job)
        self.profiler.remember(job, answer.curve)
        result = answer.result.value
        learned = replace(
            job.learned,
            curve=answer.curve,
            profiled=answer.result is not ProfileResult.GONE,
            result=result,
            reason=answer.reason,
            ended=now,
        )
        if job.state is JobState.PROFILING:
            job.state = JobState.RUNNING
        job.rescaled_at = -math.inf  # it stands at its smallest size: the plan may move it at once
        self._of._plan_soon(now)
        visited = ", ".join(str(k) for k in answer.visited) or "none"
        sentence = (
            f"{answer.reason} Sizes visited: {visited}; {answer.scale_ups} up, "
            f"{answer.scale_downs} down, {answer.seconds:.0f} s."
        )
        data = {
            "result": result,
            "visited": list(answer.visited),
            "scale_ups": answer.scale_ups,
            "scale_downs": answer.scale_downs,
            "seconds": answer.seconds,
        }
        return [
            *self._learn(job, learned),
            Announce(answer.job, "profile-finished", sentence, data),
        ]

    def _observed(self, job: JobRecord, seen: Observed, now: float) -> list[Command]:
        commands = self._learn(job, seen.learned)
        if seen.change is not None:
            change = seen.change
            data = {
                "change": change.kind,
                "nodes": change.nodes,
                "before": change.before,
                "after": change.after,
                "phase": change.phase,
            }
            commands.append(Announce(seen.job, "curve-changed", change.sentence, data))
        if seen.change is not None or seen.surprise > WORTH_A_PLAN:
            self._of._plan_soon(now + self._of.settings.settle_s)
        return commands

    def _learn(self, job: JobRecord, learned: ScalingModel) -> list[Command]:
        if learned.curve.unusable != job.learned.curve.unusable:
            self._of._line.changed(job)  # it may need more nodes than before to run at all
        job.learned = learned
        self._believe(job)
        return [KeepScalingModel(job.submitted.job, learned)]

    def _believe(self, job: JobRecord) -> None:
        """The bids are made from what is known now; a curve that the user gave stays."""
        assert self.profiler is not None
        spec = job.submitted
        job.cost = job.learned.cost
        if spec.curve is None:
            sizes = job.sizes or range(spec.min_nodes, spec.max_nodes + 1)
            job.curve = job.learned.bid_curve(sizes, self.profiler.settings.kappa)
