"""The scavenger of a batch scheduler: polls it, takes leases as one-node jobs of its preemptable
part, and gives them back.

Everything that is the same for :mod:`scavenger.slurm` and :mod:`scavenger.pbs`, which say how their
scheduler is read and how a lease is asked for. Which node is a gap :mod:`scavenger.batch.rules`
decides, what becomes of a lease :mod:`scavenger.batch.lease_ledger`, how jobs are submitted and
cancelled :mod:`scavenger.batch.submission`; this module brings them together.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Generic

from scavenger.batch.answers import understood
from scavenger.batch.commands import Commands
from scavenger.batch.contact import contact, too_busy, too_old
from scavenger.batch.ending import LeaseEnder
from scavenger.batch.gap_memory import GapMemory
from scavenger.batch.groups import PartOf, is_part
from scavenger.batch.hold import hold_for
from scavenger.batch.lease_ledger import LeaseJob, LeaseLedger
from scavenger.batch.lease_script import forget_outputs
from scavenger.batch.lease_spec import lease_spec, not_yet, packed, refused
from scavenger.batch.leaving import must_leave
from scavenger.batch.look import Finding, LookResult, SchedulerAnswer, SiteT
from scavenger.batch.pace import RequestBudget, TokenBucket
from scavenger.batch.poll_pause import PollPause
from scavenger.batch.rules import Explanations, NodeFacts, choose
from scavenger.batch.settings import BatchSettings, OptionsT
from scavenger.batch.side_by_side import side_by_side
from scavenger.batch.submission import (
    Dialect,
    LeaseSpec,
    LimitReachedError,
    NotYetError,
    Submitter,
    UnsureError,
)
from scavenger.interface import (
    Contact,
    Gap,
    Lease,
    LeaseRequest,
    LeaseState,
    PollResult,
    SchedulerError,
)

_PENDING = LeaseState.PENDING
HOLD_POLL_S = 2.0
FRESH_S = 0.5
"""A look as old as this is still one: leases are taken right after a poll, which looked."""


class BatchScavenger(ABC, Generic[OptionsT, SiteT]):
    """A connection to one batch scheduler. One call at a time.

    Subclasses say how their scheduler is read and how a lease is asked for.
    """

    name: str
    title: str
    """The scheduler's name in sentences."""
    oldest: tuple[int, int]
    """The oldest release that will do."""
    when_silent: str
    """What to do when it cannot be asked."""
    site_every_s: float
    """How often it is asked what is configured, seconds."""
    limit_step_s: float
    """What time limits are a multiple of, seconds."""

    def __init__(
        self,
        settings: BatchSettings[OptionsT],
        commands: Commands,
        dialect: Dialect,
        submitting: Mapping[str, str],
        memory: GapMemory | None,
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.commands = commands
        self.memory = memory or GapMemory()
        self.clock = clock
        self.site: SiteT | None = None
        self.site_at = 0.0
        self.ledger = LeaseLedger(
            self.title, settings.start_within_s, settings.max_leases, settings.user
        )
        pace = TokenBucket(settings.submit_rate, settings.submit_burst)
        self.submitter = Submitter(
            dialect, settings.submit_as, settings.user, pace, commands, submitting
        )
        self.budget = RequestBudget(commands.calls, settings.request_rate, settings.poll_interval_s)
        self._pause = PollPause(settings.longest_pause_s)
        self.ender = LeaseEnder(self.ledger, self.submitter, self._steps)
        self._idle_since: dict[str, float] = {}
        self._gone: dict[str, Lease] = {}
        """Leases that were found to be gone since the last poll."""
        self._fresh: LookResult[SiteT] | None = None
        """The last look, until leases were taken on it."""

    # --- what differs ---

    @property
    @abstractmethod
    def source_name(self) -> str:
        """How it is read, in a word."""

    @abstractmethod
    def _ask_site(self) -> SiteT:
        """What is configured, and with it how the scheduler is read from now on. Raises
        SchedulerError.
        """

    @abstractmethod
    def _read(self, site: SiteT, hold_s: float, now: float) -> SchedulerAnswer:
        """Ask for nodes and jobs. Raises SchedulerError, having changed nothing. ``hold_s``: how
        long to hold after a preemption.
        """

    @abstractmethod
    def _left_idle_s(self, site: SiteT) -> float:
        """How long an idle node is left to the main scheduler."""

    @abstractmethod
    def _partitions(self, site: SiteT) -> Collection[str]:
        """Where leases run."""

    def _longest_s(self, site: SiteT) -> tuple[float | None, str]:
        """How long a job may be where leases run, seconds, and what says so; None: as long as it
        likes.
        """
        return None, ""

    @abstractmethod
    def _site_grace_s(self, site: SiteT) -> float:
        """Seconds that a preempted lease has, as the scheduler's configuration says."""

    @abstractmethod
    def _submission(self, spec: LeaseSpec, site: SiteT) -> tuple[list[str], bytes]:
        """The command that submits a lease, and its script. Raises SchedulerError."""

    def _shared_by(self, site: SiteT) -> int:
        """How many leases may share a job."""
        return 1

    def _shared_submission(
        self, pack: Sequence[LeaseSpec], view: LookResult[SiteT]
    ) -> tuple[list[str], bytes]:
        """The command that submits one job for several leases, and its script. Raises
        SchedulerError.
        """
        raise NotImplementedError

    @abstractmethod
    def _findings(self, site: SiteT) -> Iterator[Finding]:
        """(works, sentence) per thing tested of a scheduler that answers and is new enough."""

    def _usual_s(self, site: SiteT) -> float:
        """Seconds between two polls when nothing is urgent."""
        return self.settings.poll_interval_s

    def _ask_options(self, site: SiteT) -> Sequence[str]:
        """Options with which the command that cancels asks a lease to leave instead; none: a
        cancelled lease has its grace time anyway.
        """
        return ()

    def _steps(self, jobs: Collection[str]) -> Mapping[tuple[str, str], str]:
        """(job, node) → what runs there, of jobs that leases share. Raises SchedulerError."""
        return {}

    def check(self) -> list[Finding]:
        """(works, sentence) per thing tested; every sentence says what to change."""
        try:
            site = self.current_site()
        except SchedulerError as error:
            return [(False, f"{self.title} cannot be asked: {error} {self.when_silent}")]
        if site.version < self.oldest:
            return [(False, too_old(self.title, site, self.oldest))]
        sentence = f"{self.title} {site.called} answers; it is asked through {self.source_name}."
        return [(True, sentence), *self._findings(site)]

    # --- polling ---

    def poll(self) -> PollResult:
        """Gaps and leases now. Raises SchedulerError, having changed nothing, when the scheduler
        cannot be asked.
        """
        began = time.monotonic()
        view = self.look()
        grace_s = self.grace_s(view.site)
        self.ender.cancel(view.unwanted, grace_s, view.time)
        self.ender.ask(view.leave, self._ask_options(view.site), grace_s, view.time)
        forget_outputs(self.settings.output_dir)
        now, gone, self._gone = view.time, self._gone, {}
        return PollResult(
            time=now,
            gaps=tuple(
                Gap(
                    node.name,
                    self.memory.since.get(node.name, now),
                    self._horizon(node, now),
                    self.settings.class_of(node.features),
                )
                for node in view.choice.gaps
            ),
            leases=(*self.ender.mark_leaving(view.leases, grace_s), *gone.values()),
            total_nodes=len(view.answer.facts),
            idle_nodes=len(self.memory.since),
            foretold=self.memory.foretold,
            explanations=Explanations(view.answer.facts.values(), view.rules, view.choice, now),
            poll_again_s=self.poll_again_s(view, time.monotonic() - began),
            room=min(self.submitter.pace.whole, self.budget.room) * self._shared_by(view.site),
        )

    def look(self) -> LookResult[SiteT]:
        """Ask the scheduler and draw the conclusions. What is remembered changes only when all of
        it was understood.
        """
        now, self._fresh = self.clock(), None
        site = self.current_site()
        rules = self.settings.rules_at(self._left_idle_s(site), self._partitions(site))
        hold_s = self.settings.hold_s
        with understood(self.title):
            answer = self._read(site, hold_for(rules.idle_for_s) if hold_s is None else hold_s, now)
        rules = replace(
            rules,
            hold=answer.hold or too_busy(self.title, self.commands.calls),
            node_holds=answer.node_holds,
        )
        facts = answer.facts
        self._gone.update(answer.gone)
        self._idle_since = {
            f.name: f.idle_since for f in facts.values() if f.idle_since is not None
        }
        leases, unwanted = self.ledger.look(answer.jobs, answer.hold, answer.node_holds, now)
        running = {lease.id: lease.node for lease in leases if lease.state is LeaseState.RUNNING}
        leased = {*running.values()}
        free = (f.name for f in facts.values() if f.idle and not f.trouble and not f.reserved)
        self.memory.update([*free, *(facts.keys() & leased)], now, answer.requested)
        active = sum(lease.state is not LeaseState.ENDED for lease in leases)
        choice = choose(
            facts.values(),
            rules,
            now,
            lambda node: self._horizon(node, now),
            self.ledger.room(active, now, self.settings.owner),
        )
        self.ender.forget(running.keys(), now)
        grace_s, remaining_s = self.grace_s(site), rules.hours.remaining_s(now)
        notice_s = grace_s + self.settings.spare_s
        leave = must_leave(leases, facts, notice_s, now, remaining_s, grace_s)
        leave.update((lease, why) for lease, why in answer.leave.items() if lease in running)
        self._fresh = LookResult(now, site, answer, rules, leases, unwanted, leave, choice)
        return self._fresh

    def contact(self) -> Contact:
        """How it gets on with the scheduler."""
        return contact(self.commands.calls, self.ledger, self.budget, self.clock())

    def current_site(self) -> SiteT:
        """What is configured, asked for if it is not known yet. Raises SchedulerError."""
        now = self.clock()
        if self.site is None or not 0 <= now - self.site_at < self.site_every_s:
            try:
                with understood(self.title):
                    self.site = self._ask_site()
                self.site_at = now
            except SchedulerError:
                if self.site is None:
                    raise
        return self.site

    def poll_again_s(self, view: LookResult[SiteT], took_s: float) -> float:
        """At most a tenth of the time goes into asking, a third while nodes are taken back, unless
        the site's promises need more. The budget of requests puts off no such poll, only those
        that events ask for.
        """
        usual_s, share = self._usual_s(view.site), 10.0
        if view.answer.urgent:
            usual_s, share = min(usual_s, HOLD_POLL_S), 3.0
        again_s = self._pause.after(took_s, usual_s, share)
        return max(again_s, self.commands.calls.backoff_s())

    def _horizon(self, node: NodeFacts, now: float) -> float:
        """What the gaps of this site were like, and no longer than to the next known use."""
        expected = self.memory.horizon(node.name, now)
        return (
            expected if node.free_until is None else max(0.0, min(expected, node.free_until - now))
        )

    # --- taking and giving back ---

    def know(self, leases: Mapping[str, str], nodes: Mapping[str, str] | None = None) -> None:
        """Of leases that were taken before this process began: id → whose; empty: this process's
        user's; id → its node.
        """
        for lease_id, user in leases.items():
            whose = (self.settings.submit_as and user) or self.settings.user
            self.ledger.know(lease_id, whose, self.clock(), (nodes or {}).get(lease_id, ""))

    def take(self, requests: Sequence[LeaseRequest]) -> list[Lease]:
        """Look, unless that was just done, and ask for a lease on each node that is a gap still, as
        far as the pace allows. Jobs that many leases share come first.
        """
        if not requests:
            return []
        self.know(
            {request.id: request.owner or "" for request in requests},
            {request.id: request.node for request in requests},
        )  # so that a look knows their jobs, should there be any
        s, view, self._fresh = self.settings, self._fresh, None
        if view is None or not 0 <= self.clock() - view.time <= FRESH_S:
            view, self._fresh = self.look(), None
        grace_s, longest = self.grace_s(view.site), self._longest_s(view.site)
        busy = too_busy(self.title, self.commands.calls)
        first: dict[str, LeaseRequest] = {}
        for request in requests:
            first.setdefault(request.node, request)
        taken: dict[str, Lease] = {}
        specs = []
        for node, request in first.items():
            if (job := self.ledger.jobs.get(request.id)) is not None:
                taken[node] = job.lease
                continue
            try:
                step_s = self.limit_step_s
                one = lease_spec(request, view, s, self.ledger, step_s, grace_s, longest)
                if busy:
                    raise SchedulerError(busy)
                specs.append(one)
            except SchedulerError as error:
                taken[node] = refused(request.id, node, str(error))
        packs = sorted(packed(specs, self._shared_by(view.site)), key=len, reverse=True)
        for leases in side_by_side(lambda pack: self._take_pack(pack, view), packs):
            taken.update({lease.node: lease for lease in leases})
        return [
            refused(request.id, request.node, f"{request.node} is asked for with lease {one.id}")
            if one.id != request.id
            else one
            for request, one in ((request, taken[request.node]) for request in requests)
        ]

    def _take_pack(self, pack: Sequence[LeaseSpec], view: LookResult[SiteT]) -> list[Lease]:
        """Submit one job for these leases, or none yet. Where there may not be so many jobs: for
        the first half of them.
        """
        user = self.ledger.user_of(pack[0].lease)
        try:
            argv, script = (
                self._submission(pack[0], view.site)
                if len(pack) == 1
                else self._shared_submission(pack, view)
            )
            number = self.submitter.submit(argv, script, pack[0].owner)
        except NotYetError as error:
            return not_yet(pack, error)
        except SchedulerError as error:
            half = len(pack) // 2 if isinstance(error, LimitReachedError) else 0
            some = self._take_pack(pack[:half], view) if half else []
            if not half or any(lease.state is not LeaseState.ENDED for lease in some):
                self.ledger.not_taken(pack[half].lease, error, view.time)
            if isinstance(error, UnsureError):
                for one in pack:
                    self.ledger.give_up(one.lease, str(error), view.time)
            return [*some, *(refused(one.lease, one.node, str(error)) for one in pack[half:])]
        self.ledger.accepted(user, view.time)
        leases = []
        for one in pack:
            part = PartOf(number, one.node) if len(pack) > 1 else None
            lease = Lease(one.lease, part.id if part else number, LeaseState.PENDING, one.node)
            self.ledger.jobs[one.lease] = LeaseJob(lease, user, one.node, view.time, part=part)
            leases.append(lease)
        return leases

    def grace_s(self, site: SiteT) -> float:
        """Seconds a preempted lease has until it is killed: as configured, else as the scheduler
        says.
        """
        return self._site_grace_s(site) if self.settings.grace_s is None else self.settings.grace_s

    def give_back(self, leases: Sequence[Lease]) -> None:
        """Cancel the jobs of these leases. Raises CommandError when one may still be there."""
        jobs = []
        for lease in leases:
            self.ledger.give_up(lease.id, "given back", self.clock())
            job = self.ledger.jobs.get(lease.id)
            if job is None and lease.scheduler_id and not is_part(lease.scheduler_id):
                job = LeaseJob(
                    replace(lease, state=LeaseState.RUNNING), self.ledger.user_of(lease.id)
                )
            # What has not started of a job that is shared is withdrawn at the next poll, which sees
            # whether it has.
            shared = job is not None and job.part is not None
            if job is None or not job.alive or (shared and job.lease.state is _PENDING):
                continue
            jobs.append(job)
        # Before anything was asked of the scheduler its grace time is not known.
        grace_s = (self.settings.grace_s or 0.0) if self.site is None else self.grace_s(self.site)
        if error := self.ender.cancel(jobs, grace_s, self.clock()):
            raise error
