"""Detects workers that live and have stopped reporting, by the job's own rhythm.

A worker counts as hung when it is silent for several times the job's longest pause so far, and at
least for ``jobs.hang_after``; for longer where this daemon has not seen a rhythm and only the
worker's counts show one. Then its agent reports the worker's stack, the owner is notified, and the
workers are restarted if the owner wants that. :mod:`malletrain.daemon.stuck` handles rounds that
never make a first step.
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

PAUSES = 5
"""So many times the longest pause between reports is no pause any more."""
LEAST_REPORTS = 3
"""Fewer show no rhythm, nor do as many steps."""
ANSWER_S = 5.0
"""How long the agents may take to say where the workers stand."""
AT_ONCE = 64
"""Nodes that are asked at one look; the others at the next ones."""
MOST_TEXTS = AT_ONCE * MOST_WORKERS
"""Workers of a job whose whole stacks are kept; of the others, only where they stand."""
STANDSTILL_S = 5.0
"""Time between two looks after which it was the daemon that did not hear."""


class WorkerPlace(NamedTuple):
    """Where one worker stands."""

    node: str
    place: str
    pid: int
    text: str


@dataclass
class _Rhythm:
    """How the workers of one job report."""

    generation: int = 0
    counts: dict[int, float] = field(default_factory=dict)
    """Rank → samples, as of its last report."""
    heard: dict[int, float] = field(default_factory=dict)
    """Rank → when it last reported."""
    reports: int = 0
    pause: float = 0.0
    """The longest time between two reports of a worker."""
    request_at: float | None = None
    """When an agent was asked last; None: nobody hangs."""
    to_ask: tuple[str, ...] = ()
    """Nodes whose agents are still to be asked."""
    recorded: bool = False
    """The hang is in the audit log."""
    silent: tuple[int, ...] = ()
    ended: set[int] = field(default_factory=set)
    """Silent ranks of which no process was found while others went on."""
    stacks: dict[int, WorkerPlace] = field(default_factory=dict)
    """Rank → where it stands; workers of unknown rank from -1 downwards."""

    def follow(self, run: ActiveJob, now: float) -> None:
        """Take what the job has reported."""
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
        """The ranks that have said nothing for longer than ``limit`` seconds."""
        late = (rank for rank, at in self.heard.items() if now - at > limit)
        return tuple(sorted(rank for rank in late if rank not in self.ended))

    def shift(self, seconds: float) -> None:
        """Nobody could be heard for so long."""
        self.heard = {rank: at + seconds for rank, at in self.heard.items()}

    def calm(self) -> None:
        """Nobody hangs."""
        self.request_at, self.recorded, self.silent, self.stacks = None, False, (), {}
        self.to_ask = ()


class HungSteps:
    """Looks after the running rounds of all jobs."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._rhythms: dict[str, _Rhythm] = {}
        self._looked: float | None = None

    def look(self, now: float) -> None:
        """Call it every half second or so, while agents are heard."""
        core = self._core
        stood = now - self._looked if self._looked is not None else 0.0
        self._looked = now
        self._rhythms = {job: r for job, r in self._rhythms.items() if job in core.runs}
        for job, run in list(core.runs.items()):
            rhythm = self._rhythms.setdefault(job, _Rhythm())
            if stood > STANDSTILL_S:
                rhythm.shift(stood)
            rhythm.follow(run, now)
            if not self._at_work(run):
                rhythm.heard = dict.fromkeys(rhythm.heard, now)
                rhythm.calm()
            elif rhythm.request_at is None:
                self._judge(run, rhythm, now)
            elif rhythm.to_ask:
                self._ask(run, rhythm, now)
            elif not rhythm.recorded and now >= rhythm.request_at + ANSWER_S:
                self._tell(run, rhythm, now)

    def receive_stacks(self, agent: LeasedAgent, run: ActiveJob, message: Stacks) -> None:
        """Where a worker stands."""
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
                text if len(rhythm.stacks) < MOST_TEXTS else "",
            )

    def _at_work(self, run: ActiveJob) -> bool:
        """Whether steps are made, as far as the daemon can know."""
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

    def _judge(self, run: ActiveJob, rhythm: _Rhythm, now: float) -> None:
        rhythm.silent = rhythm.silent_for(self._limit(run, rhythm), now)
        if not rhythm.silent:
            return
        rhythm.to_ask = tuple(run.rounds.members)
        self._ask(run, rhythm, now)

    def _ask(self, run: ActiveJob, rhythm: _Rhythm, now: float) -> None:
        """Ask the next nodes."""
        rhythm.request_at = now
        for node in rhythm.to_ask[:AT_ONCE]:
            self._core.agents.tell(node, ShowStacks(run.row.id, rhythm.generation))
        rhythm.to_ask = rhythm.to_ask[AT_ONCE:]

    def _limit(self, run: ActiveJob, rhythm: _Rhythm) -> float:
        """Seconds of silence that are none any more. Who hangs as it begins, or while a daemon is
        started again, has shown its longest pause to nobody, but has counted its steps.
        """
        least = self._core.config.jobs.hang_after
        if rhythm.reports >= LEAST_REPORTS:
            return max(least, PAUSES * rhythm.pause)
        mean = run.monitor.mean_pause(LEAST_REPORTS + 1)
        return math.inf if mean is None else PAUSES * max(least, mean)

    def _before(self, run: ActiveJob, rhythm: _Rhythm) -> str:
        """What the limit went by."""
        what, pause = "the longest pause before was", rhythm.pause
        if rhythm.reports < LEAST_REPORTS:
            what = "the mean pause between two steps was, by the workers' own counts,"
            pause = run.monitor.mean_pause(LEAST_REPORTS + 1) or 0.0
        return f"{what} {format_duration(round(max(pause, 0.1), 1))}"

    def _tell(self, run: ActiveJob, rhythm: _Rhythm, now: float) -> None:
        """The agents had their time. A worker of which nothing is left has ended in order while
        others go on, which is no hang.
        """
        core, job, rhythm.recorded = self._core, run.row.id, True
        rhythm.silent = rhythm.silent_for(self._limit(run, rhythm), now)
        everybody = len(rhythm.silent) == len(rhythm.heard) - len(rhythm.ended)
        hung = [r for r in rhythm.silent if r in rhythm.stacks or everybody]
        if not hung:
            rhythm.ended.update(rhythm.silent)
            rhythm.calm()
            return
        silent = now - max(rhythm.heard[r] for r in hung)
        ranks = f"Rank {hung[0]}" if len(hung) == 1 else f"{len(hung)} workers"
        again = run.spec.on_hang == "restart"
        sentence = (
            f"{ranks} of round {rhythm.generation} {'has' if len(hung) == 1 else 'have'} reported "
            f"nothing for {format_duration(round(silent))}, though {self._before(run, rhythm)}: "
            f"{_places(rhythm)}."
        )
        end = (
            " The workers are started again."
            if again
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
            if again:
                core.rounds.act(run, run.rounds.give_up())
                core.feed(WorkersFailed(job, sentence))


def _places(rhythm: _Rhythm) -> str:
    """Where they stand, those at one place together."""
    places: dict[str, list[str]] = {}
    for rank, stands in sorted(rhythm.stacks.items()):
        who = f"rank {rank} on {stands.node}" if rank >= 0 else f"a worker on {stands.node}"
        places.setdefault(stands.place or "alive", []).append(who)
    if not places:
        return "no agent found a living worker"
    phrases = [
        f"{', '.join(who[:3])}{f' and {len(who) - 3} more' if len(who) > 3 else ''} "
        f"{'stand' if len(who) > 1 else 'stands'} {place}"
        for place, who in list(places.items())[:4]
    ]
    return "; ".join(phrases)


def innermost(text: str) -> str:
    """Where the main thread stands, of what faulthandler wrote: it comes last, its innermost frame
    first.
    """
    lines = text.splitlines()
    heads = [number for number, line in enumerate(lines) if "(most recent call first)" in line]
    frames = lines[heads[-1] + 1 :] if heads else []
    own = [line.strip() for line in frames if line.strip().startswith("File ")]
    if not own:
        return ""
    words = own[0].removeprefix("File ").replace('"', "")
    script = next((f for f in own if "site-packages" not in f and "/lib/python" not in f), "")
    called = script.removeprefix("File ").replace('"', "") if script and script != own[0] else ""
    return f"at {words}" + (f", called from {called}" if called else "")


def _texts(rhythm: _Rhythm) -> dict[str, str]:
    """What an event keeps: of each place one worker, as many as there is room for."""
    texts: dict[str, str] = {}
    seen: set[str] = set()
    for rank, stands in sorted(rhythm.stacks.items()):
        if stands.place not in seen and len(texts) < MOST_WORKERS:
            seen.add(stands.place)
            who = f"rank {rank}" if rank >= 0 else f"worker {stands.pid}"
            texts[f"{who} on {stands.node}"] = stands.text or stands.place
    return texts
