"""The scavenger of a batch scheduler: polls it, takes leases as one-node jobs in its preemptable
part, and gives them back.

Contains everything that :mod:`scavenger.slurm` and :mod:`scavenger.pbs` share. These define how
their scheduler is read and how a lease is requested. :mod:`scavenger.batch.rules` decides which
node is a gap, :mod:`scavenger.batch.lease_request` what a lease of it is,
:mod:`scavenger.batch.lease_ledger` tracks the leases, and :mod:`scavenger.batch.submission` submits
and cancels jobs. :class:`BatchScavenger` combines them.

:func:`contact` describes the condition of the connection to the main scheduler, from the calls and
the ledger. It decides only the sentences.
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Generic

from scavenger.batch.calls import CallLog, PollPause, RequestBudget, too_busy
from scavenger.batch.commands import Commands, raising_scheduler_error, side_by_side
from scavenger.batch.gap_memory import GapMemory
from scavenger.batch.groups import PartOf
from scavenger.batch.lease_ender import LeaseEnder, WholeJob, must_leave
from scavenger.batch.lease_ledger import LeaseJob, LeaseLedger
from scavenger.batch.lease_request import hold_for, lease_spec, not_yet, packed, refused
from scavenger.batch.lease_script import forget_outputs
from scavenger.batch.poll_result import (
    ConfiguredSite,
    Finding,
    PollConclusions,
    SchedulerAnswer,
    SiteT,
)
from scavenger.batch.rules import Explanations, NodeFacts, choose
from scavenger.batch.settings import BatchSettings, OptionsT
from scavenger.batch.slots import parts_of_hosts
from scavenger.batch.submission import (
    Dialect,
    LeaseSpec,
    LimitReachedError,
    NotYetError,
    Submitter,
    UnsureError,
)
from scavenger.horizon import GapForecast
from scavenger.interface import (
    Contact,
    Gap,
    Lease,
    LeaseRequest,
    LeaseState,
    PollResult,
    SchedulerError,
    host_of,
    kind_of,
)
from scavenger.token_bucket import TokenBucket


def contact(calls: CallLog, ledger: LeaseLedger, budget: RequestBudget, now: float) -> Contact:
    """Return the condition of the connection.

    Args:
        calls: log of the calls.
        ledger: the leases.
        budget: budget of requests.
        now: time on the ledger's clock, seconds.
    """
    return Contact(
        calls.counts(),
        calls.backoff_s(),
        ledger.backing_off_s(now),
        calls.busy,
        budget.poll_after_s,
    )


def too_old(title: str, site: ConfiguredSite, oldest: tuple[int, int]) -> str:
    """Return the sentence that this release is too old.

    Args:
        title: name of the scheduler.
        site: its configuration.
        oldest: the oldest supported release.
    """
    required = ".".join(str(part) for part in oldest)
    return (
        f"{title} {site.display_name} is older than {required}, the oldest that MalleTrain "
        f"supports; update {title}."
    )


_PENDING = LeaseState.PENDING
HOLD_POLL_S = 2.0
MAX_ARGUMENT_BYTES = 128 * 1024 - 1
"""Longest argument of a command that Linux accepts, execve(2)."""
MAX_REUSE_AGE_S = 0.5
"""Maximum age at which a poll is reused to take leases, seconds. Leases are usually taken right
after a poll.
"""
MAX_ID_AGE_S = 60.0
"""Maximum age of the answer in which a lease had its job id, seconds. A scheduler that has lost its
state numbers its jobs from the beginning, so that an older id may be that of a main job.
"""


class BatchScavenger(ABC, Generic[OptionsT, SiteT]):
    """A connection to one batch scheduler. One call at a time.

    Subclasses define how their scheduler is read and how a lease is requested.

    Args:
        settings: settings of the site.
        commands: runs the scheduler's commands.
        dialect: interprets the output of submissions.
        submitting: environment of submissions.
        memory: history of the gaps; None: a new one.
        clock: returns epoch seconds.
    """

    name: str
    title: str
    """The scheduler's name, for sentences."""
    oldest: tuple[int, int]
    """The oldest supported release."""
    when_silent: str
    """A sentence that says what to do if the scheduler does not answer."""
    site_every_s: float
    """Interval at which the scheduler's configuration is read, seconds."""
    limit_step_s: float
    """Time limits are multiples of this, seconds."""

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
        self._pause = PollPause(settings.max_pause_s)
        self.ender = LeaseEnder(self.ledger, self.submitter, self._steps)
        self._idle_since: dict[str, float] = {}
        self._ended_leases: dict[str, Lease] = {}
        """Leases whose jobs have disappeared since the last poll."""
        self._reusable_poll: PollConclusions[SiteT] | None = None
        """The last poll, until leases are taken from it."""
        self._answered_at = -math.inf
        """Time of the last answer that was understood, epoch seconds."""

    # --- scheduler-specific parts ---

    @property
    @abstractmethod
    def source_name(self) -> str:
        """How the scheduler is read, in a word."""

    @abstractmethod
    def _ask_site(self) -> SiteT:
        """Read the configuration, and choose how the scheduler is read from now on. Raises
        SchedulerError.
        """

    @abstractmethod
    def _read(self, site: SiteT, hold_s: float, now: float) -> SchedulerAnswer:
        """Read nodes and jobs. Raises SchedulerError, having changed nothing. ``hold_s``: pause in
        requests after a preemption, seconds.
        """

    @abstractmethod
    def _left_idle_s(self, site: SiteT) -> float:
        """Return the seconds for which an idle node is left to the main scheduler."""

    @abstractmethod
    def _partitions(self, site: SiteT) -> Collection[str]:
        """Return the partitions or queues in which leases run."""

    def _max_lease_s(self, site: SiteT) -> tuple[float | None, str]:
        """Return (maximum length of a job where leases run, seconds, or None; what sets it)."""
        return None, ""

    @abstractmethod
    def _site_grace_s(self, site: SiteT) -> float:
        """Return the grace time of a preempted lease in the scheduler's configuration, seconds."""

    @abstractmethod
    def _submission(self, spec: LeaseSpec, site: SiteT) -> tuple[list[str], bytes]:
        """Return the command that submits a lease, and its script. Raises SchedulerError."""

    def _shared_by(self, site: SiteT) -> int:
        """Return the maximum number of leases that can share a job."""
        return 1

    def _shared_submission(
        self, pack: Sequence[LeaseSpec], view: PollConclusions[SiteT]
    ) -> tuple[list[str], bytes]:
        """Return the command that submits one job for several leases, and its script. Raises
        SchedulerError.
        """
        raise NotImplementedError

    @abstractmethod
    def _findings(self, site: SiteT) -> Iterator[Finding]:
        """Yield (works, sentence) for each test of a scheduler that answers and is new enough."""

    def _poll_interval_s(self, site: SiteT) -> float:
        """Return the seconds between two polls if nothing is urgent."""
        return self.settings.poll_interval_s

    def _leave_options(self, site: SiteT) -> Sequence[str]:
        """Return the options with which the cancel command only asks a lease to leave. Empty if a
        cancelled lease has its grace time anyway.
        """
        return ()

    def _steps(self, jobs: Collection[str]) -> Mapping[tuple[str, str], str]:
        """Return (job, node) → step there, for jobs that leases share. Raises SchedulerError."""
        return {}

    def check(self) -> list[Finding]:
        """Return (works, sentence) for each test. Each sentence says what to change."""
        try:
            site = self.current_site()
        except SchedulerError as error:
            return [(False, f"{self.title} cannot be asked: {error} {self.when_silent}")]
        if site.version < self.oldest:
            return [(False, too_old(self.title, site, self.oldest))]
        sentence = (
            f"{self.title} {site.display_name} answers; it is asked through {self.source_name}."
        )
        return [(True, sentence), *self._findings(site)]

    # --- polling ---

    def poll(self) -> PollResult:
        """Return the present gaps and leases. Raises SchedulerError, having changed nothing, if the
        scheduler does not answer.
        """
        began = time.monotonic()
        view = self.read_state()
        grace_s = self.grace_s(view.site)
        self.ender.cancel(view.unwanted, grace_s, view.time)
        self.ender.ask(view.leave, self._leave_options(view.site), grace_s, view.time)
        trouble = forget_outputs(self.settings.output_dir)
        now, ended_leases, self._ended_leases = view.time, self._ended_leases, {}
        return PollResult(
            time=now,
            gaps=tuple(
                Gap(
                    node.name,
                    self.memory.since.get(node.name, now),
                    self._horizon(node, now),
                    self.settings.class_of(node),
                    host_of(node.name) if node.kind else None,
                )
                for node in view.choice.gaps
            ),
            leases=(
                *self.ender.mark_leaving(view.leases, grace_s, view.answer.leave_by),
                *ended_leases.values(),
            ),
            total_nodes=len(view.answer.facts),
            kind_parts=parts_of_hosts(view.answer.facts),
            idle_nodes=len(self.memory.since),
            forecasts=self._forecasts(view.answer.facts, now),
            explanations=Explanations(view.answer.facts.values(), view.rules, view.choice, now),
            poll_again_s=self.poll_again_s(view, time.monotonic() - began),
            trouble=trouble,
            max_new_leases=min(self.submitter.pace.available, self.budget.room)
            * self._shared_by(view.site),
        )

    def read_state(self) -> PollConclusions[SiteT]:
        """Read the scheduler and draw conclusions. The state of this object changes only if the
        whole answer was understood.
        """
        now, self._reusable_poll = self.clock(), None
        site = self.current_site()
        rules = self.settings.rules_at(self._left_idle_s(site), self._partitions(site))
        hold_s = self.settings.hold_s
        with raising_scheduler_error(self.title):
            answer = self._read(site, hold_for(rules.idle_for_s) if hold_s is None else hold_s, now)
        rules = replace(
            rules,
            hold=answer.hold or too_busy(self.title, self.commands.calls),
            node_holds=answer.node_holds,
        )
        facts = answer.facts
        self._ended_leases.update(answer.gone)
        self._idle_since = {
            f.name: f.idle_since for f in facts.values() if f.idle_since is not None
        }
        leases, unwanted = self.ledger.update(answer.jobs, answer.hold, answer.node_holds, now)
        running = {lease.id: lease.node for lease in leases if lease.state is LeaseState.RUNNING}
        leased = {*running.values()}
        idle_nodes = (f.name for f in facts.values() if f.idle and not f.trouble and not f.reserved)
        self.memory.update([*idle_nodes, *(facts.keys() & leased)], now)
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
        leave.update((lease, reason) for lease, reason in answer.leave.items() if lease in running)
        self._answered_at = now
        self._reusable_poll = PollConclusions(
            now, site, answer, rules, leases, unwanted, leave, choice
        )
        return self._reusable_poll

    def contact(self) -> Contact:
        """Return the condition of the connection to the scheduler."""
        return contact(self.commands.calls, self.ledger, self.budget, self.clock())

    def current_site(self) -> SiteT:
        """Return the scheduler's configuration, read again if it is not known or too old. Raises
        SchedulerError.
        """
        now = self.clock()
        if self.site is None or not 0 <= now - self.site_at < self.site_every_s:
            try:
                with raising_scheduler_error(self.title):
                    self.site = self._ask_site()
                self.site_at = now
            except SchedulerError:
                if self.site is None:
                    raise
        return self.site

    def poll_again_s(self, view: PollConclusions[SiteT], took_s: float) -> float:
        """Return the seconds until the next poll. At most a tenth of the time is spent on polling,
        a third while nodes are taken back, unless the guarantees to the site need more. The request
        budget does not delay these polls, only those that events trigger.
        """
        usual_s, pause_ratio = self._poll_interval_s(view.site), 10.0
        if view.answer.urgent:
            usual_s, pause_ratio = min(usual_s, HOLD_POLL_S), 3.0
        again_s = self._pause.after(took_s, usual_s, pause_ratio)
        return max(again_s, self.commands.calls.backoff_s())

    def _horizon(self, node: NodeFacts, now: float) -> float:
        """Return the expected remaining seconds of the node's gap, at most until its next known
        use.
        """
        expected = self.memory.horizon(node.name, now)
        return (
            expected if node.free_until is None else max(0.0, min(expected, node.free_until - now))
        )

    def _forecasts(self, facts: Mapping[str, NodeFacts], now: float) -> dict[str, GapForecast]:
        """Return the forecast of each gap, leased nodes included."""
        return {
            name: forecast
            if facts[name].free_until is None
            else forecast._replace(horizon_s=self._horizon(facts[name], now))
            for name, forecast in self.memory.forecasts(now).items()
        }

    # --- taking and giving back ---

    def know(
        self,
        leases: Mapping[str, str],
        nodes: Mapping[str, str] | None = None,
        jobs: Mapping[str, str] | None = None,
    ) -> None:
        """Register leases that were taken before this process began. ``leases``: lease id → its
        user; empty: this process's user. ``nodes``: lease id → its node. ``jobs``: lease id → its
        ``scheduler_id``, empty if it is not known.
        """
        for lease_id, user in leases.items():
            owner = (self.settings.submit_as and user) or self.settings.user
            self.ledger.know(lease_id, owner, self.clock(), (nodes or {}).get(lease_id, ""))
            if job_id := (jobs or {}).get(lease_id):
                self.ledger.submitted(lease_id, job_id)

    def take(self, requests: Sequence[LeaseRequest]) -> list[Lease]:
        """Request a lease on each node that is still a gap, as far as the submission rate allows.
        Polls first, unless a poll was just made. Jobs that many leases share come first.
        """
        if not requests:
            return []
        self.know(
            {request.id: request.owner or "" for request in requests},
            {request.id: request.node for request in requests},
        )  # so that a poll recognises their jobs, if they exist
        s, view, self._reusable_poll = self.settings, self._reusable_poll, None
        if view is None or not 0 <= self.clock() - view.time <= MAX_REUSE_AGE_S:
            view, self._reusable_poll = self.read_state(), None
        grace_s, max_length = self.grace_s(view.site), self._max_lease_s(view.site)
        overload = too_busy(self.title, self.commands.calls)
        request_by_node: dict[str, LeaseRequest] = {}
        for request in requests:
            request_by_node.setdefault(request.node, request)
        lease_by_node: dict[str, Lease] = {}
        specs = []
        kind_by_host: dict[str, str] = {}
        for node, request in request_by_node.items():
            if (job := self.ledger.jobs.get(request.id)) is not None:
                lease_by_node[node] = job.lease
                continue
            try:
                step_s = self.limit_step_s
                spec = lease_spec(request, view, s, self.ledger, step_s, grace_s, max_length)
                if overload:
                    raise SchedulerError(overload)
                if (kind := kind_by_host.setdefault(spec.host, kind_of(node))) != kind_of(node):
                    raise SchedulerError(
                        f"slots of kind {kind} were just requested on {spec.host}, and {node} may "
                        "need the same resources; the next poll shows what is left"
                    )
                specs.append(spec)
            except SchedulerError as error:
                lease_by_node[node] = refused(request.id, node, str(error))
        packs = sorted(packed(specs, self._shared_by(view.site)), key=len, reverse=True)
        in_packs = {spec.node for pack in packs for spec in pack}
        for spec in specs:
            if spec.node not in in_packs:
                reason = f"another job was just requested for {spec.host}"
                lease_by_node[spec.node] = refused(spec.lease, spec.node, reason)
        for leases in side_by_side(lambda pack: self._take_pack(pack, view), packs):
            lease_by_node.update({lease.node: lease for lease in leases})
        self.ledger.submissions_ended()
        return [
            refused(request.id, request.node, f"{request.node} is requested with lease {lease.id}")
            if lease.id != request.id
            else lease
            for request, lease in ((request, lease_by_node[request.node]) for request in requests)
        ]

    def _take_pack(self, pack: Sequence[LeaseSpec], view: PollConclusions[SiteT]) -> list[Lease]:
        """Submit one job for these leases, or none yet. If the user's job limit refuses it, submit
        one for the first half of them. If its command would name more nodes than an argument can
        hold, submit a job for each.
        """
        user = self.ledger.user_of(pack[0].lease)
        try:
            argv, script = (
                self._submission(pack[0], view.site)
                if len(pack) == 1
                else self._shared_submission(pack, view)
            )
            if len(pack) > 1 and any(len(os.fsencode(a)) > MAX_ARGUMENT_BYTES for a in argv):
                return [lease for spec in pack for lease in self._take_pack([spec], view)]
            job_id = self.submitter.submit(argv, script, pack[0].owner)
        except NotYetError as error:
            return not_yet(pack, error)
        except SchedulerError as error:
            can_halve = isinstance(error, LimitReachedError) and not pack[0].has_whole_host
            half = len(pack) // 2 if can_halve else 0
            half_leases = self._take_pack(pack[:half], view) if half else []
            if not half or any(lease.state is not LeaseState.ENDED for lease in half_leases):
                self.ledger.not_taken(pack[half].lease, error, view.time)
            if isinstance(error, UnsureError):
                for spec in pack:
                    self.ledger.give_up(spec.lease, str(error), view.time)
            return [
                *half_leases,
                *(refused(spec.lease, spec.node, str(error)) for spec in pack[half:]),
            ]
        self.ledger.accepted(user, view.time)
        leases = []
        for spec in pack:
            part = PartOf(job_id, spec.node) if len(pack) > 1 else None
            lease = Lease(spec.lease, part.id if part else job_id, LeaseState.PENDING, spec.node)
            self.ledger.jobs[spec.lease] = LeaseJob(lease, user, spec.node, view.time, part=part)
            self.ledger.submitted(spec.lease, job_id)
            leases.append(lease)
        return leases

    def grace_s(self, site: SiteT) -> float:
        """Return the seconds until a preempted lease is killed: as configured, otherwise as the
        scheduler reports.
        """
        return self._site_grace_s(site) if self.settings.grace_s is None else self.settings.grace_s

    def give_back(self, leases: Sequence[Lease]) -> None:
        """Cancel the jobs of these leases. Polls first if the last poll is too old, and cancels
        only jobs that the scheduler lists under the name of their lease. Raises SchedulerError if
        one may still exist; the next poll then cancels it.
        """
        if not leases:
            return
        for lease in leases:
            self.ledger.give_up(lease.id, "given back", self.clock())
        if self.site is None or not 0 <= self.clock() - self._answered_at < MAX_ID_AGE_S:
            self.read_state()
        assert self.site is not None, "the poll has read it"
        jobs = []
        for lease in leases:
            job = self.ledger.jobs.get(lease.id)
            # The next poll withdraws pending parts of a shared job: it shows whether they started.
            is_shared = job is not None and job.part is not None
            if job is None or not job.alive or (is_shared and job.lease.state is _PENDING):
                continue
            jobs.append(job)
        if error := self.ender.cancel(jobs, self.grace_s(self.site), self.clock()):
            raise error

    def cancel_submitted(self, lease: Lease) -> SchedulerError | None:
        """Cancel the job of a lease by the id that the scheduler returned when this process
        submitted it, without a poll. Only for a job submitted minutes ago: later the scheduler may
        have given the id to another one. Return the error, None if there is none.
        """
        if not self.ledger.job_of(lease.id):
            return SchedulerError(f"This process has submitted no job for lease {lease.id}.")
        job = WholeJob(lease.scheduler_id, self.ledger.user_of(lease.id))
        return self.submitter.cancel([job]).problem
