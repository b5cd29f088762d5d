"""Detects workers that are alive but no longer report, relative to the job's usual pauses.

A worker counts as hung when it is silent for ``PAUSE_RATIO`` times the job's longest pause so far,
and at least for ``jobs.hang_after``. The limit is higher if this daemon has observed too few pauses
and has to derive the usual pause from the workers' counts. Then the agents report the workers'
stacks, the owner is notified, and the workers are restarted if the owner wants that.
:mod:`malletrain.daemon.stuck` handles rounds that never finish a first step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from malletrain.config.units import format_duration
from malletrain.core.events import WorkersFailed
from malletrain.daemon.agents import LeasedAgent
from malletrain.daemon.core import Core
from malletrain.daemon.job_repository import ActiveJob
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.messages import ShowStacks, Stacks
from malletrain.protocol.stacks import MOST_WORKERS
from malletrain.rounds.interface import RoundStage

PAUSE_RATIO = 5
"""Ratio of the silence that counts as a hang to the longest pause between reports."""
MIN_REPORTS = 3
"""Minimum number of reports, or of pauses between steps, that show the usual pause."""
ANSWER_S = 5.0
"""Time that the agents have to report the workers' stacks, seconds."""
MAX_NODES_PER_CHECK = 64
"""Maximum number of nodes that are asked for stacks in one check; the others follow in the next
ones.
"""
MAX_STACKS = MAX_NODES_PER_CHECK * MOST_WORKERS
"""Maximum number of a job's workers whose whole stacks are kept. Of the others, only the innermost
frame is kept.
"""
STANDSTILL_S = 5.0
"""Time between two checks, seconds, from which the daemon itself stood still and the silence is its
own.
"""


class WorkerPlace(NamedTuple):
    """Stack of one worker."""

    node: str
    """Name of its node."""
    place: str
    """Its innermost frame, as words; state of the process if there is no stack."""
    pid: int
    """Id of the process."""
    text: str
    """The whole stack; empty if it is not kept."""


@dataclass
class _Rhythm:
    """Reports and pauses of the workers of one job."""

    generation: int = 0
    """Number of the round."""
    counts: dict[int, float] = field(default_factory=dict)
    """Rank → samples in its last report."""
    heard: dict[int, float] = field(default_factory=dict)
    """Rank → time of its last report."""
    reports: int = 0
    """Number of pauses between reports that have been observed."""
    pause: float = 0.0
    """Longest time between two reports of a worker, seconds."""
    request_at: float | None = None
    """Time of the last request for stacks; None if no worker hangs."""
    to_ask: tuple[str, ...] = ()
    """Nodes whose agents have not been asked yet."""
    recorded: bool = False
    """Whether the hang is in the audit log."""
    silent: tuple[int, ...] = ()
    """Ranks that exceed the limit."""
    ended: set[int] = field(default_factory=set)
    """Silent ranks without a process, while others continue."""
    stacks: dict[int, WorkerPlace] = field(default_factory=dict)
    """Rank → stack of the worker. Workers of unknown rank are numbered from -1 downwards."""

    def follow(self, run: ActiveJob, now: float) -> None:
        """Take over the job's newest reports."""
        if run.monitor.generation != self.generation:
            self.generation = run.monitor.generation
            self.counts, self.heard, self.ended = {}, {}, set()
            self.calm()
        for rank, samples in run.monitor.by_rank().items():
            if self.counts.get(rank) != samples:
                if rank in self.heard:
                    self.pause = max(self.pause, now - self.heard[rank])
                    self.reports += 1
                self.counts[rank], self.heard[rank] = samples, now
                self.ended.discard(rank)
                if rank in self.silent:
                    self.calm()

    def silent_for(self, limit: float, now: float) -> tuple[int, ...]:
        """Return the ranks that have not reported for longer than ``limit`` seconds."""
        late = (rank for rank, at in self.heard.items() if now - at > limit)
        return tuple(sorted(rank for rank in late if rank not in self.ended))

    def shift(self, seconds: float) -> None:
        """Move the times of the last reports by ``seconds``, in which no report could be
        received.
        """
        self.heard = {rank: at + seconds for rank, at in self.heard.items()}

    def calm(self) -> None:
        """Reset the state of a hang."""
        self.request_at, self.recorded, self.silent, self.stacks = None, False, (), {}
        self.to_ask = ()


class HungSteps:
    """Watches the running rounds of all jobs."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._rhythms: dict[str, _Rhythm] = {}
        self._last_check_at: float | None = None

    def look(self, now: float) -> None:
        """Check all jobs. Call it about every half second, while agents can be heard."""
        core = self._core
        elapsed_s = now - self._last_check_at if self._last_check_at is not None else 0.0
        self._last_check_at = now
        self._rhythms = {job: r for job, r in self._rhythms.items() if job in core.runs}
        for job, run in list(core.runs.items()):
            rhythm = self._rhythms.setdefault(job, _Rhythm())
            if elapsed_s > STANDSTILL_S:
                rhythm.shift(elapsed_s)
            rhythm.follow(run, now)
            if not self._should_step(run):
                rhythm.heard = dict.fromkeys(rhythm.heard, now)
                rhythm.calm()
            elif rhythm.request_at is None:
                self._check_silence(run, rhythm, now)
            elif rhythm.to_ask:
                self._ask(run, rhythm, now)
            elif not rhythm.recorded and now >= rhythm.request_at + ANSWER_S:
                self._report_hang(run, rhythm, now)

    def receive_stacks(self, agent: LeasedAgent, run: ActiveJob, message: Stacks) -> None:
        """Record the stack of a worker.

        Args:
            agent: agent of the worker's node.
            run: job of the worker.
            message: the stack.
        """
        rhythm = self._rhythms.get(run.row.id)
        if rhythm is None or rhythm.request_at is None or message.generation != rhythm.generation:
            return
        rank = message.rank if message.rank >= 0 else min([0, *rhythm.stacks]) - 1
        if rank in rhythm.stacks or len(rhythm.stacks) < len(run.rounds.members) * MOST_WORKERS:
            text = message.text or message.state
            rhythm.stacks[rank] = WorkerPlace(
                agent.node,
                innermost(message.text) or message.state,
                message.pid,
                text if len(rhythm.stacks) < MAX_STACKS else "",
            )

    def _should_step(self, run: ActiveJob) -> bool:
        """Whether the job should be stepping, as far as the daemon can know."""
        agents = [self._core.agents.on(node) for node in run.rounds.members]
        return (
            run.spec.mode != "service"
            and run.rounds.stage is RoundStage.RUNNING
            and not run.rounds.finishing
            and run.monitor.pending is None
            and run.starting_until is None
            and run.monitor.generation == run.rounds.generation
            and all(a is not None and a.unreachable_since is None for a in agents)
        )

    def _check_silence(self, run: ActiveJob, rhythm: _Rhythm, now: float) -> None:
        rhythm.silent = rhythm.silent_for(self._limit(run, rhythm), now)
        if not rhythm.silent:
            return
        rhythm.to_ask = tuple(run.rounds.members)
        self._ask(run, rhythm, now)

    def _ask(self, run: ActiveJob, rhythm: _Rhythm, now: float) -> None:
        """Ask the agents of the next nodes for stacks."""
        rhythm.request_at = now
        for node in rhythm.to_ask[:MAX_NODES_PER_CHECK]:
            self._core.agents.tell(node, ShowStacks(run.row.id, rhythm.generation))
        rhythm.to_ask = rhythm.to_ask[MAX_NODES_PER_CHECK:]

    def _limit(self, run: ActiveJob, rhythm: _Rhythm) -> float:
        """Return the seconds of silence after which a worker counts as hung. If too few pauses were
        observed (the job hangs soon after its start, or while the daemon restarts), the limit
        follows from the workers' counts of steps.
        """
        hang_after_s = self._core.config.jobs.hang_after
        if rhythm.reports >= MIN_REPORTS:
            return max(hang_after_s, PAUSE_RATIO * rhythm.pause)
        mean = run.monitor.mean_pause(MIN_REPORTS + 1)
        return math.inf if mean is None else PAUSE_RATIO * max(hang_after_s, mean)

    def _pause_description(self, run: ActiveJob, rhythm: _Rhythm) -> str:
        """Return the pause from which the limit was derived, as words."""
        description, pause = "the longest pause before was", rhythm.pause
        if rhythm.reports < MIN_REPORTS:
            description = "the mean pause between two steps was, by the workers' own counts,"
            pause = run.monitor.mean_pause(MIN_REPORTS + 1) or 0.0
        return f"{description} {format_duration(round(max(pause, 0.1), 1))}"

    def _report_hang(self, run: ActiveJob, rhythm: _Rhythm, now: float) -> None:
        """Report the hang after the agents' time is over. A silent worker without a process, while
        others continue, has ended in order and does not hang.
        """
        core, job, rhythm.recorded = self._core, run.row.id, True
        rhythm.silent = rhythm.silent_for(self._limit(run, rhythm), now)
        all_are_silent = len(rhythm.silent) == len(rhythm.heard) - len(rhythm.ended)
        hung = [r for r in rhythm.silent if r in rhythm.stacks or all_are_silent]
        if not hung:
            rhythm.ended.update(rhythm.silent)
            rhythm.calm()
            return
        silent_s = now - max(rhythm.heard[r] for r in hung)
        ranks = f"Rank {hung[0]}" if len(hung) == 1 else f"{len(hung)} workers"
        restarts = run.spec.on_hang == "restart"
        sentence = (
            f"{ranks} of round {rhythm.generation} {'has' if len(hung) == 1 else 'have'} reported "
            f"nothing for {format_duration(round(silent_s))}, though "
            f"{self._pause_description(run, rhythm)}: "
            f"{_places(rhythm)}."
        )
        end = (
            " The workers are started again."
            if restarts
            else " With --on-hang restart the workers would be started again."
        )
        with core.transaction():
            core.audit.record(
                EventKind.JOB_HUNG,
                sentence + end,
                job=job,
                generation=rhythm.generation,
                ranks=hung[:100],
                stacks=_texts(rhythm),
            )
            core.repository.notice(run, sentence + end)
            if restarts:
                core.rounds.act(run, run.rounds.give_up())
                core.feed(WorkersFailed(job, sentence))


def _places(rhythm: _Rhythm) -> str:
    """Return the places of the workers as words, grouped by place."""
    places: dict[str, list[str]] = {}
    for rank, stack in sorted(rhythm.stacks.items()):
        who = f"rank {rank} on {stack.node}" if rank >= 0 else f"a worker on {stack.node}"
        places.setdefault(stack.place or "alive", []).append(who)
    if not places:
        return "no agent found a living worker"
    phrases = [
        f"{', '.join(who[:3])}{f' and {len(who) - 3} more' if len(who) > 3 else ''} "
        f"{'stand' if len(who) > 1 else 'stands'} {place}"
        for place, who in list(places.items())[:4]
    ]
    return "; ".join(phrases)


def innermost(text: str) -> str:
    """Return the place of the main thread in the output of faulthandler; empty if there is none.
    The main thread comes last, its innermost frame first.
    """
    lines = text.splitlines()
    heads = [number for number, line in enumerate(lines) if "(most recent call first)" in line]
    frames = lines[heads[-1] + 1 :] if heads else []
    file_lines = [line.strip() for line in frames if line.strip().startswith("File ")]
    if not file_lines:
        return ""
    words = file_lines[0].removeprefix("File ").replace('"', "")
    script = next(
        (f for f in file_lines if "site-packages" not in f and "/lib/python" not in f), ""
    )
    called = (
        script.removeprefix("File ").replace('"', "") if script and script != file_lines[0] else ""
    )
    return f"at {words}" + (f", called from {called}" if called else "")


def _texts(rhythm: _Rhythm) -> dict[str, str]:
    """Return the stacks to store with the event: one worker of each place, ``MOST_WORKERS`` at
    most.
    """
    texts: dict[str, str] = {}
    places: set[str] = set()
    for rank, stack in sorted(rhythm.stacks.items()):
        if stack.place not in places and len(texts) < MOST_WORKERS:
            places.add(stack.place)
            who = f"rank {rank}" if rank >= 0 else f"worker {stack.pid}"
            texts[f"{who} on {stack.node}"] = stack.text or stack.place
    return texts
