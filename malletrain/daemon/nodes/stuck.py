"""Detects workers that are alive and no longer report, and rounds that finish no step.

A worker counts as hung when it is silent for ``PAUSE_RATIO`` times the job's longest pause so far,
and at least for ``jobs.hang_after``. The limit is higher if this daemon has observed too few pauses
and has to derive the usual pause from the workers' counts. Then the agents report the workers'
stacks, the owner is notified, and the workers are restarted if the owner wants that.

A round whose workers failed because they could not reach a peer is tested at once: the network
between its nodes is measured. If a connection is blocked, the job continues without one of its two
nodes. If all connections work and the workers have been silent for much longer than ever between
two reports, they are restarted, which uses up a try. If the script has never reported, only the
owner is notified: not every script reports.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from malletrain.config.units import format_duration
from malletrain.core import slow_nodes
from malletrain.core.events import NodeRejected, RoundInterrupted, WorkersFailed
from malletrain.daemon.engine.agents import LeasedAgent
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Transactions
from malletrain.daemon.jobs.repository import ActiveJob
from malletrain.daemon.nodes.probes import MAX_TEST_NODES, Probes, Results
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.messages import MAX_STACK_WORKERS, ShowStacks, Stacks
from malletrain.rounds.interface import RoundStage
from scavenger.hostlist import named

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
MAX_STACKS = MAX_NODES_PER_CHECK * MAX_STACK_WORKERS
"""Maximum number of a job's workers whose whole stacks are kept. Of the others, only the innermost
frame is kept.
"""
STANDSTILL_S = 5.0
"""Time between two checks, seconds, from which the daemon itself stood still and the silence is its
own.
"""
MAX_RANGES = 12
"""Maximum number of ranges of ranks in a sentence."""


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

    def __init__(self, state: SiteState, transactions: Transactions) -> None:
        self._state = state
        self._transactions = transactions
        self._rhythms: dict[str, _Rhythm] = {}
        self._last_check_at: float | None = None

    def check(self, now: float) -> None:
        """Check all jobs. Call it about every half second, while agents can be heard."""
        state = self._state
        elapsed_s = now - self._last_check_at if self._last_check_at is not None else 0.0
        self._last_check_at = now
        self._rhythms = {job: r for job, r in self._rhythms.items() if job in state.runs}
        for job, run in list(state.runs.items()):
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
        if (
            rank in rhythm.stacks
            or len(rhythm.stacks) < len(run.rounds.members) * MAX_STACK_WORKERS
        ):
            text = message.text or message.state
            rhythm.stacks[rank] = WorkerPlace(
                agent.node,
                innermost(message.text) or message.state,
                message.pid,
                text if len(rhythm.stacks) < MAX_STACKS else "",
            )

    def _should_step(self, run: ActiveJob) -> bool:
        """Whether the job should be stepping, as far as the daemon can know."""
        agents = [self._state.agents.on(node) for node in run.rounds.members]
        return (
            run.spec.trains
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
            self._state.agents.tell(node, ShowStacks(run.row.id, rhythm.generation))
        rhythm.to_ask = rhythm.to_ask[MAX_NODES_PER_CHECK:]

    def _limit(self, run: ActiveJob, rhythm: _Rhythm) -> float:
        """Return the seconds of silence after which a worker counts as hung. If too few pauses were
        observed (the job hangs soon after its start, or while the daemon restarts), the limit
        follows from the workers' counts of steps.
        """
        hang_after_s = self._state.config.jobs.hang_after
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
        state, job, rhythm.recorded = self._state, run.row.id, True
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
        with self._transactions.begin():
            state.audit.record(
                EventKind.JOB_HUNG,
                sentence + end,
                job=job,
                generation=rhythm.generation,
                ranks=hung[:100],
                stacks=_texts(rhythm),
            )
            state.repository.notice(run, sentence + end)
            if restarts:
                state.rounds.act(run, run.rounds.give_up())
                self._transactions.feed(WorkersFailed(job, sentence))


def _places(rhythm: _Rhythm) -> str:
    """Return the places of the workers as words, grouped by place."""
    places: dict[str, list[tuple[int, str]]] = {}
    for rank, stack in sorted(rhythm.stacks.items()):
        places.setdefault(stack.place or "alive", []).append((rank, stack.node))
    if not places:
        return "no agent found a living worker"
    phrases = [
        f"{_workers(workers)} {'stand' if len(workers) > 1 else 'stands'} {place}"
        for place, workers in list(places.items())[:4]
    ]
    return "; ".join(phrases)


def _workers(workers: Sequence[tuple[int, str]]) -> str:
    """Return workers as words, such as ``ranks 0-7 on n[1-2]``. ``workers``: (rank, node); a
    negative rank is not known.
    """
    ranks = [rank for rank, _ in workers if rank >= 0]
    unknown = len(workers) - len(ranks)
    phrases = []
    if ranks:
        words = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_ranges(ranks)}"
        phrases.append(f"{words} on {named(node for rank, node in workers if rank >= 0)}")
    if unknown:
        words = "a worker" if unknown == 1 else f"{unknown} workers"
        phrases.append(f"{words} on {named(node for rank, node in workers if rank < 0)}")
    return " and ".join(phrases)


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers for a sentence, such as ``0-7, 9``; at most MAX_RANGES ranges."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    words = [f"{low}" if low == high else f"{low}-{high}" for low, high in ranges[:MAX_RANGES]]
    omitted = sum(high - low + 1 for low, high in ranges[MAX_RANGES:])
    return ", ".join(words) + (f" and {omitted} more" if omitted else "")


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
    """Return the stacks to store with the event: one worker of each place, ``MAX_STACK_WORKERS`` at
    most.
    """
    texts: dict[str, str] = {}
    places: set[str] = set()
    for rank, stack in sorted(rhythm.stacks.items()):
        if stack.place not in places and len(texts) < MAX_STACK_WORKERS:
            places.add(stack.place)
            who = f"rank {rank}" if rank >= 0 else f"worker {stack.pid}"
            texts[f"{who} on {stack.node}"] = stack.text or stack.place
    return texts


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

    def __init__(self, state: SiteState, transactions: Transactions, probes: Probes) -> None:
        self._state = state
        self._transactions = transactions
        self._probes = probes
        self._watches: dict[str, _Watch] = {}

    def check(self, now: float) -> None:
        """Check the rounds of all jobs. Call it about every half second, while agents can be
        heard.
        """
        state = self._state
        self._watches = {job: w for job, w in self._watches.items() if job in state.runs}
        limit = state.config.jobs.warmup_timeout
        for job, run in list(state.runs.items()):
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
        places = {node: self._state.rounds.place(run, node)[1] for node in members}
        tries = tuple((a, b) for a in members for b in members if a != b)

        def done(results: Results) -> None:
            current, watch = self._state.runs.get(job), self._watches.get(job)
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
        limit = format_duration(self._state.config.jobs.warmup_timeout)
        return f"Round {run.rounds.generation} has made no step within {limit}"

    def _exclude_nodes(self, run: ActiveJob, results: Results, barred: bool) -> None:
        """Continue the job without nodes behind blocked connections."""
        state, job = self._state, run.row.id
        blocked_connections = [
            (a, b, r.trouble) for (a, b), r in sorted(results.items()) if not r.reached
        ]
        failed = f"The workers of round {run.rounds.generation} failed before their first step"
        problem = failed if barred else self._no_step_phrase(run)
        why = f"{problem}: {slow_nodes.describe_blocked(blocked_connections)}"
        with self._transactions.begin():
            for node in slow_nodes.left_out(
                run.rounds.members, [(a, b) for a, b, _ in blocked_connections]
            ):
                text = f"{why} The job continues without {node}."
                state.audit.record(EventKind.ROUND_STUCK, text, job=job, node=node)
                self._transactions.feed(NodeRejected(node))
            state.repository.notice(run, why)
            self._transactions.feed(RoundInterrupted(job))

    def _handle_open_network(
        self, run: ActiveJob, watch: _Watch, silent: float, reported: bool
    ) -> None:
        """Handle a stuck round without a blocked connection. ``silent``: seconds without a step.
        ``reported``: whether all connections were tested.
        """
        state, job, began = self._state, run.row.id, self._no_step_phrase(run)
        with self._transactions.begin():
            if not reported:
                text = (
                    f"{began}, and the network between its nodes could not be tested: not all of "
                    "their agents answered."
                )
                state.repository.notice(run, text)
            elif not watch.pause:
                text = (
                    f"{began}, though its nodes reach each other: its preparation takes long, it "
                    "hangs, or its script does not call malletrain.report()."
                )
                state.repository.notice(run, text)
            elif silent >= _PAUSE_RATIO * watch.pause:
                text = f"{began}, though its nodes reach each other; its workers are restarted."
                state.audit.record(EventKind.ROUND_STUCK, text, job=job)
                state.rounds.act(run, run.rounds.give_up())
                self._transactions.feed(WorkersFailed(job, text))


def _has_started(run: ActiveJob) -> bool:
    begun = run.rounds.stage in _STARTED_STAGES and run.spec.trains
    return begun and not run.rounds.finishing


def _running_round(run: ActiveJob) -> int:
    """Return the round that was running when the daemon started; 0 if there was none. Its steps may
    have been reported before.
    """
    is_running = run.rounds.stage is RoundStage.RUNNING and run.monitor.pending is None
    return run.rounds.generation if is_running else 0


def warn_of_silence(
    state: SiteState, transactions: Transactions, run: ActiveJob, now: float
) -> None:
    """Notify the owner of a job that has not reported progress for long.

    Args:
        state: the daemon's state.
        transactions: saves decisions, and sends messages after that.
        run: the job.
        now: time, seconds.
    """
    limit = state.config.jobs.no_progress_warning
    if (
        run.spec.trains
        and run.rounds.stage is RoundStage.RUNNING
        and run.monitor.silent_for(now) > limit
        and not run.rounds.finishing
    ):
        sentence = (
            f"The job has reported no progress for more than {limit:g} s: it hangs, or its "
            "script does not call malletrain.report(). "
            "Without it MalleTrain cannot know how the job scales."
        )
        with transactions.begin():
            state.repository.notice(run, sentence)
