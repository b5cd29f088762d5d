"""Rounds that make no step: looks whether the ways between their nodes are open, and acts on it.

Decides when a round is stuck and what is done. Where a way is blocked the job goes on without one
of its two ends; where all are open, workers that made steps before are started again, which uses up
a try; of a script that never reported a step the owner is told, and it is left alone: not every
script reports.
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


@dataclass
class _Watch:
    """How one job has come on."""

    samples: float
    since: float | None
    """When the first round began in which no step was made; None: steps are made."""
    works: int = 0
    """The newest round in which a step was made."""


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
        for job, run in core.runs.items():
            watch = self._watches.setdefault(job, _Watch(run.monitor.total, None))
            generation = run.rounds.generation
            if run.monitor.total > watch.samples:
                watch.samples, watch.since, watch.works = run.monitor.total, None, generation
            begun = run.rounds.stage in _BEGUN and run.spec.mode != "service"
            if not begun or watch.works == generation:
                watch.since = None
            elif watch.since is None:
                watch.since = now
            elif now - watch.since >= limit:
                watch.since = now
                self._examine(run, now)

    def _examine(self, run: ActiveJob, now: float) -> None:
        job, generation = run.row.id, run.rounds.generation
        members = run.rounds.members[:MOST_NODES]
        places = {node: self._core.rounds.address_of(node) for node in members}
        tries = tuple((a, b) for a in members for b in members if a != b)

        def done(results: Results) -> None:
            current = self._core.runs.get(job)
            if current is not None and not self._works(current, generation):
                self._act(current, results)

        if tries:
            self._probes.begin(places, tries, now, done)
        else:
            done({})

    def _works(self, run: ActiveJob, generation: int) -> bool:
        watch = self._watches.get(run.row.id)
        return watch is None or watch.works >= generation

    def _act(self, run: ActiveJob, results: Results) -> None:
        core, job = self._core, run.row.id
        shut = [(a, b, r.trouble) for (a, b), r in sorted(results.items()) if not r.reached]
        limit = format_duration(core.config.jobs.warmup_timeout)
        began = f"Round {run.rounds.generation} has made no step within {limit}"
        without = blocked.left_out(run.rounds.members, [(a, b) for a, b, _ in shut])
        with core.step():
            if without:
                why = f"{began}: {blocked.sentence(shut)}"
                for node in without:
                    text = f"{why} The job goes on without {node}."
                    core.audit.record(EventKind.ROUND_STUCK, text, job=job, node=node)
                    core.feed(NodeRejected(node))
                core.repository.notice(run, why)
                core.feed(RoundInterrupted(job))
            elif run.monitor.total > 0:
                text = f"{began}, though its nodes reach each other; its workers are started again."
                core.audit.record(EventKind.ROUND_STUCK, text, job=job)
                core.feed(WorkersFailed(job, text))
            else:
                text = (
                    f"{began}, though its nodes reach each other: it prepares for long, it hangs, "
                    "or its script does not call malletrain.report()."
                )
                core.repository.notice(run, text)
