"""The scavenger of OpenPBS and PBS Professional: polls it, takes leases as one-host jobs of the preemptable queue, and gives them back.

One poll is two commands (qstat, pbsnodes), and a third now and then: pbs_rstat for reservations not known yet, or qstat for what became of
leases that are gone. Which node is a gap is :mod:`scavenger.rules`' decision, what PBS's words mean :mod:`scavenger.pbs_state`'s, how a
lease is asked for :mod:`scavenger.pbs_job`'s; this module brings them together and keeps the books between two polls.

PBS preempts by deleting, requeuing or suspending. Deleted and requeued leases get SIGTERM and the queue's kill_delay; a suspended one just
stands still, so it counts as lost and is deleted. A requeued lease must not begin again: it is deleted too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from scavenger.commands import CommandError, Commands
from scavenger.gap_memory import GapMemory
from scavenger.hold import TakenBack, hold_for
from scavenger.interface import Gap, Lease, LeaseRequest, LeaseState, SchedulerError, Snapshot
from scavenger.lease_script import forget_outputs, lease_script
from scavenger.pbs_job import limit_of, qsub, select_of
from scavenger.pbs_parse import Job, read_jobs
from scavenger.pbs_settings import PbsSettings
from scavenger.pbs_site import PbsSite, ask_site
from scavenger.pbs_source import Api, CommandSource, Reservations, Source, asking_environment, source_for, submitting_environment
from scavenger.pbs_state import (
    ENDED_STATES,
    Host,
    Reading,
    by_host,
    describe,
    ended_because,
    is_taken_back,
    lease_of,
    lost_because,
    own_jobs,
    terminated_by,
)
from scavenger.pbs_submit import PBS
from scavenger.rules import Choice, Explanations, GapRules, NodeFacts, choose, why_not
from scavenger.submission import LimitReachedError, Submitter, UnsureError

SITE_EVERY_S = 120.0
SUBMITTERS = 4
NO_MORE_FOR_S = 300.0
"""After PBS said that a limit on our jobs is reached."""
REMEMBERED_S = 3600.0
TURN_S = 30.0
"""Longest default turn. PBS's scheduler runs whenever a job ends, and not only every scheduler_iteration."""
HOLD_POLL_S = 2.0
ASKED_AT_ONCE = 50


class _View(NamedTuple):
    """One look at PBS. ``unwanted``: jobs of ours that have to be deleted."""

    time: float
    site: PbsSite
    hosts: Mapping[str, Host]
    rules: GapRules
    facts: Mapping[str, NodeFacts]
    leases: tuple[Lease, ...]
    unwanted: list[Job]
    choice: Choice


class PbsScavenger:
    """A connection to one PBS. One call at a time."""

    name = "pbs"

    def __init__(
        self,
        settings: PbsSettings,
        commands: Commands | None = None,
        source: Source | None = None,
        memory: GapMemory | None = None,
        clock: Callable[[], float] = time.time,
        api: Api = "commands",
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.settings = settings
        self.commands = commands or Commands(environment=asking_environment(environment))
        self.api = api
        self.source = source or CommandSource(self.commands)
        """How PBS is read; settled when its server is known."""
        self._settled = source is not None or api == "commands"
        self.memory = memory or GapMemory()
        self.clock = clock
        self.site: PbsSite | None = None
        self._site_at = 0.0
        self.reservations = Reservations(self.commands)
        self._idle_since: dict[str, float] = {}
        self._jobs: dict[str, Job] = {}
        """Lease id → its job, of the last poll and of what was taken since."""
        self._given_up: dict[str, tuple[float, str]] = {}
        """Lease id → when we gave it up and why: should its job turn up, it is deleted."""
        self._ended: dict[str, Lease] = {}
        """Leases that are gone since the last poll."""
        self._taken = TakenBack()
        self._no_more: tuple[float, int, str] | None = None
        asking = self.commands.environment or {}
        own = submitting_environment(asking, environment)
        self._submitter = Submitter(PBS, settings.lease.submit_as, settings.user, settings.submit_rate, self.commands, own)

    # --- polling -----------------------------------------------------------------------------------------------------------------------

    def poll(self) -> Snapshot:
        """Gaps and leases now. Raises SchedulerError, having changed nothing, when PBS cannot be asked."""
        began = time.monotonic()
        view = self._look()
        if view.unwanted:
            self._submitter.cancel(view.unwanted)
        forget_outputs(self.settings.lease.output_dir)
        now = view.time
        ended, self._ended = self._ended, {}
        return Snapshot(
            time=now,
            gaps=tuple(
                Gap(node.name, self.memory.since.get(node.name, now), self._horizon(node, now), self._class_of(node.features))
                for node in view.choice.gaps
            ),
            leases=(*view.leases, *ended.values()),
            total_nodes=len(view.facts),
            idle_nodes=len(self.memory.since),
            explanations=Explanations(view.facts.values(), view.rules, view.choice, now),
            poll_again_s=self._interval(view, time.monotonic() - began),
        )

    def _look(self) -> _View:
        """Ask PBS and draw the conclusions. What is remembered changes only when all of it was understood."""
        now = self.clock()
        site = self._known_site(now)
        s = self.settings
        nodes, jobs = self.source.read(s.prefix)
        reservations = self.reservations.of(nodes, now)
        own = own_jobs(jobs.ours, s.prefix, "" if s.lease.submit_as else s.user)
        hosts = by_host(nodes)
        wants_features = bool(s.rules.features or s.node_classes)
        facts = describe(
            Reading(hosts, jobs.pending, own, reservations), site.queues_of(), self._idle_since, now, with_features=wants_features
        )
        self._ended.update(self._gone(own, now))
        rules = self._rules(site)
        rules = replace(rules, hold=self._hold(own, site, rules, now))
        self._jobs = own
        self._idle_since = {f.name: f.idle_since for f in facts.values() if f.idle_since is not None}
        leases, unwanted = self._leases(own, site, rules.hold, now)
        leased = {lease.node for lease in leases if lease.state is LeaseState.RUNNING}
        self.memory.update([f.name for f in facts.values() if (f.idle and not f.trouble and not f.reserved) or f.name in leased], now)
        active = sum(lease.state is not LeaseState.ENDED for lease in leases)
        choice = choose(facts.values(), rules, now, lambda node: self._horizon(node, now), self._room(active, now))
        return _View(now, site, hosts, rules, facts, leases, unwanted, choice)

    def known_site(self) -> PbsSite:
        """What is configured, asked for if it is not known yet. Raises SchedulerError."""
        return self._known_site(self.clock())

    def _known_site(self, now: float) -> PbsSite:
        if self.site is None or not 0 <= now - self._site_at < SITE_EVERY_S:
            try:
                self.site = ask_site(self.commands)
                self._site_at = now
            except SchedulerError:
                if self.site is None:
                    raise
        if not self._settled:
            self.source = source_for(self.api, self.commands, self.site.server)
            self._settled = True
        return self.site

    def _rules(self, site: PbsSite) -> GapRules:
        s = self.settings
        turn = min(site.iteration_s, TURN_S) if s.idle_for_s is None else s.idle_for_s
        queue = site.queues.get(s.lease.queue)
        named = [s.lease.queue] if queue is None or queue.execution else list(queue.destinations)
        partitions = s.rules.partitions or frozenset(filter(None, named))
        least = max(60.0, s.lease.time_min_s or 0.0) + s.spare_s
        return replace(
            s.rules, idle_for_s=turn, partitions=partitions, use_planned=s.rules.use_planned or s.backfill,
            min_free_s=max(least, s.rules.min_free_s),
        )  # fmt: skip

    def _gone(self, own: Mapping[str, Job], now: float) -> dict[str, Lease]:
        """Leases that were there at the last look and are no more, with what PBS remembers of them."""
        left = {lease: job for lease, job in self._jobs.items() if lease not in own and job.state not in ENDED_STATES}
        asked = [job.id for lease, job in left.items() if lease not in self._given_up][:ASKED_AT_ONCE]
        found: dict[str, Job] = {}
        if asked:
            try:
                result = self.commands.run(["qstat", "-x", "-f", "-F", "json", *asked])
                found = {job.id: job for job in read_jobs(result.stdout, self.settings.prefix).ours}
            except SchedulerError:
                pass  # a site without job_history_enable knows nothing of what has ended
        ended = {}
        for lease, job in left.items():
            last = found.get(job.id, job)
            reason = self._given_up[lease][1] if lease in self._given_up else ended_because(last)
            ended[lease] = Lease(lease, job.id, LeaseState.ENDED, job.host, reason)
            if lease not in self._given_up and (job.id not in found or terminated_by(last) == "Scheduler"):
                self._taken.mark(now)
        return ended

    def _hold(self, own: Mapping[str, Job], site: PbsSite, rules: GapRules, now: float) -> str:
        """Why no lease may be asked for now; empty when they may."""
        for lease_id, job in own.items():
            if lease_id not in self._given_up and job.state not in ENDED_STATES and is_taken_back(job):
                self._taken.mark(now)
        queue = self.settings.lease.queue
        known = site.queues.get(queue)
        if not site.scheduling:
            return "PBS starts no jobs at present (scheduling of its server is False)"
        if queue and known is None:
            return f"PBS has no queue {queue}"
        if known is not None and not (known.enabled and known.started):
            return f"queue {queue} is {'stopped' if known.enabled else 'disabled'}"
        return self._taken.why(hold_for(rules.idle_for_s) if self.settings.hold_s is None else self.settings.hold_s, now)

    def _interval(self, view: _View, took_s: float) -> float:
        """Every second or two while PBS takes nodes back. At most a tenth of the time goes into asking."""
        usual = self.settings.poll_interval_s
        return max(min(usual, HOLD_POLL_S) if view.rules.hold else usual, 10 * took_s)

    def _room(self, active: int, now: float) -> tuple[int, str] | None:
        """How many more leases there may be, if that is limited at all."""
        limits = []
        if self.settings.max_leases:
            limits.append((self.settings.max_leases - active, f"the configuration allows {self.settings.max_leases} leases"))
        if self._no_more is not None:
            until, count, words = self._no_more
            if now < until:
                limits.append((count - active, f"PBS refuses more jobs of ours than {count} for now: {words}"))
            else:
                self._no_more = None
        return min(limits) if limits else None

    def _class_of(self, features: Sequence[str]) -> str:
        return next((c for c in self.settings.node_classes if c in features), "default")

    def _horizon(self, node: NodeFacts, now: float) -> float:
        """What the gaps of this site were like, and no longer than to the next known use."""
        expected = self.memory.horizon(node.name, now)
        return expected if node.free_until is None else max(0.0, min(expected, node.free_until - now))

    # --- what PBS said -----------------------------------------------------------------------------------------------------------------

    def _leases(self, own: Mapping[str, Job], site: PbsSite, hold: str, now: float) -> tuple[tuple[Lease, ...], list[Job]]:
        """Every lease, and the jobs that have to be deleted: not started in time, suspended, requeued, or given up before."""
        leases, unwanted = [], []
        self._given_up = {k: t for k, t in self._given_up.items() if now - t[0] < REMEMBERED_S}
        grace_s = self.grace_s(site)
        for lease_id, job in own.items():
            lease = lease_of(lease_id, job, now, grace_s)
            if lease.state is not LeaseState.ENDED:
                reason = self._given_up[lease_id][1] if lease_id in self._given_up else lost_because(job)
                if not reason and lease.state is LeaseState.PENDING:
                    if hold:
                        reason = hold
                    elif now - (job.submitted or now) > self.settings.start_within_s:
                        reason = f"it did not start within {self.settings.start_within_s:g} s ({job.comment or 'no reason given'})"
                if reason:
                    self._given_up.setdefault(lease_id, (now, reason))
                    if job.state != "E":
                        unwanted.append(job)
                    lease = replace(lease, state=LeaseState.ENDED, reason=reason, leaving_by=None)
            leases.append(lease)
        return tuple(leases), unwanted

    # --- taking and giving back --------------------------------------------------------------------------------------------------------

    def take(self, requests: Sequence[LeaseRequest]) -> list[Lease]:
        """Look once more, and submit one job for each request whose node is still a gap: a few at once, not faster than the site allows."""
        if not requests:
            return []
        view = self._look()
        first = {request.node: request.id for request in reversed(requests)}
        with ThreadPoolExecutor(min(SUBMITTERS, len(requests)), thread_name_prefix="qsub") as pool:
            return list(pool.map(lambda request: self._take_safely(request, view, first[request.node]), requests))

    def _take_safely(self, request: LeaseRequest, view: _View, first: str) -> Lease:
        """``first``: of the leases asked for on this node."""
        try:
            if request.id != first:
                raise SchedulerError(f"{request.node} is asked for with lease {first}")
            return self._take_one(request, view)
        except SchedulerError as error:
            return Lease(request.id, "", LeaseState.ENDED, request.node, str(error))

    def _take_one(self, request: LeaseRequest, view: _View) -> Lease:
        s, site, now = self.settings, view.site, view.time
        grace_s = self.grace_s(site)
        if (known := self._jobs.get(request.id)) is not None:
            return lease_of(request.id, known, now, grace_s)
        facts = view.facts.get(request.node)
        if facts is None:
            raise SchedulerError(f"PBS knows no host {request.node}")
        if reason := why_not(facts, view.rules, view.choice, now):
            raise SchedulerError(f"{request.node} is no gap any more: {reason}")
        limit_s = self._limit(facts, request.duration_s, now)
        if limit_s is None:
            raise SchedulerError(f"the gap of {request.node} is too short for a lease by now")
        if self._no_more is not None and self._no_more[0] > now:
            raise SchedulerError(f"PBS refuses more jobs of ours for now: {self._no_more[2]}")
        output = s.lease.output_dir / f"{request.id}.out" if s.lease.output_dir is not None and request.owner is None else None
        env = {
            **request.env, "MALLETRAIN_LEASE": request.id, "MALLETRAIN_NODE": request.node, "MALLETRAIN_GRACE_S": f"{grace_s:g}",
            "MALLETRAIN_NODE_CLASS": self._class_of(facts.features), "MALLETRAIN_OUTPUT": str(output or "/dev/null"),
        }  # fmt: skip
        script = lease_script(s.template, request.argv, env)
        name = s.prefix + request.id
        rerunnable = site.requeues if s.lease.rerunnable is None else s.lease.rerunnable
        select = select_of(s.lease, request.node, view.hosts[request.node])
        argv = qsub(s.lease, name=name, select=select, limit_s=limit_s, rerunnable=rerunnable)
        try:
            number = self._submitter.submit(argv, script, request.owner)
        except LimitReachedError as error:
            held = sum(job.state not in ENDED_STATES for job in list(self._jobs.values()))
            self._no_more = (now + NO_MORE_FOR_S, held, str(error))
            raise
        except UnsureError as error:
            self._given_up[request.id] = (now, str(error))  # should its job turn up, it is deleted
            raise
        user = request.owner or s.user
        self._jobs[request.id] = Job(number, name, user, "Q", 10, s.lease.queue, now, None, (), (), request.node, "submitted", 0, None)
        return Lease(request.id, number, LeaseState.PENDING, request.node)

    def _limit(self, facts: NodeFacts, duration_s: float | None, now: float) -> float | None:
        """Time limit of a lease on a node that begins now: it ends before the next known use, and with the hours allowed."""
        free_s = None if facts.free_until is None else facts.free_until - now
        hours_s = self.settings.rules.hours.left_s(now)
        for other in (hours_s, duration_s):
            if other is not None:
                free_s = other + self.settings.spare_s if free_s is None else min(free_s, other + self.settings.spare_s)
        return limit_of(self.settings.lease, free_s, self.settings.spare_s)

    def grace_s(self, site: PbsSite) -> float:
        """Seconds a preempted lease has until it is killed: as configured, else as its queue says."""
        own = self.settings.lease.grace_s
        queue = site.queues.get(self.settings.lease.queue)
        return own if own is not None else queue.kill_delay_s if queue is not None else 10.0

    def give_back(self, leases: Sequence[Lease]) -> None:
        """Delete the jobs of these leases."""
        jobs = []
        for lease in leases:
            known = self._jobs.get(lease.id)
            self._given_up.setdefault(lease.id, (self.clock(), "given back"))
            if known is not None:
                if known.state not in ENDED_STATES:
                    jobs.append(known)
            elif lease.scheduler_id:
                s = self.settings
                name = s.prefix + lease.id
                jobs.append(Job(lease.scheduler_id, name, s.user, "R", 42, s.lease.queue, None, None, (), (), lease.node, "", 1, None))
        if error := self._submitter.cancel(jobs):
            raise error

    def submit(self, argv: Sequence[str], script: bytes) -> str:
        """Run qsub, as this process's user; the job's id. Raises SchedulerError."""
        return self._submitter.submit(argv, script, None)

    def delete(self, jobs: Sequence[Job]) -> CommandError | None:
        """Run qdel; what went wrong."""
        return self._submitter.cancel(jobs)

    def check(self) -> list[tuple[bool, str]]:
        """What works with this PBS and what does not, and what to change."""
        from scavenger.pbs_check import check

        return check(self)
