"""The scavenger of Slurm: polls it, takes leases as one-node jobs of the preemptable partition or QOS, and gives them back.

One poll is three commands (squeue, sinfo, scontrol show reservation), or three calls of pyslurm where it fits; what is configured
(partitions, preemption, the backfill cycle) is asked for every few minutes. Which node is a gap is :mod:`scavenger.rules`' decision, how a
lease is asked for :mod:`scavenger.slurm_job`'s; this module brings them together and keeps the books between two polls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from scavenger.commands import Commands
from scavenger.gap_memory import GapMemory
from scavenger.hold import hold_for
from scavenger.interface import Gap, Lease, LeaseRequest, LeaseState, SchedulerError, Snapshot
from scavenger.lease_script import forget_outputs
from scavenger.rules import Choice, Explanations, GapRules, NodeFacts, choose, why_not
from scavenger.slurm_due import BELIEVED_S, PATIENCE_S, claims, due_jobs
from scavenger.slurm_hold import Hold
from scavenger.slurm_job import batch_script, limit_of, sbatch
from scavenger.slurm_parse import Job
from scavenger.slurm_settings import SlurmSettings
from scavenger.slurm_site import SlurmSite, ask_site
from scavenger.slurm_source import Api, CommandSource, Source, asking_environment, source_for, submitting_environment
from scavenger.slurm_state import ENDED_STATES, describe, lease_of, own_jobs
from scavenger.slurm_submit import SLURM
from scavenger.submission import LimitReachedError, Submitter, UnsureError

SITE_EVERY_S = 300.0
SUBMITTERS = 4
NO_MORE_FOR_S = 300.0
"""After Slurm said that a limit on our jobs is reached."""
REMEMBERED_S = 3600.0
TURN_WITHOUT_BACKFILL_S = 60.0
HOLD_POLL_S = 2.0


class _View(NamedTuple):
    """One look at Slurm. ``unwanted``: jobs of ours that have to be cancelled; ``yielded``: leases to be asked to leave."""

    time: float
    site: SlurmSite
    rules: GapRules
    facts: Mapping[str, NodeFacts]
    leases: tuple[Lease, ...]
    unwanted: list[Job]
    yielded: list[str]
    choice: Choice


class SlurmScavenger:
    """A connection to one Slurm. One call at a time."""

    name = "slurm"

    def __init__(
        self,
        settings: SlurmSettings,
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
        """How Slurm is read; settled when its version is known."""
        self._settled = source is not None or api == "commands"
        self.memory = memory or GapMemory()
        self.clock = clock
        self.site: SlurmSite | None = None
        self._site_at = 0.0
        self._idle_since: dict[str, float] = {}
        self._jobs: dict[str, Job] = {}
        """Lease id → its job, of the last poll and of what was taken since."""
        self._given_up: dict[str, tuple[float, str]] = {}
        """Lease id → when we gave it up and why: should its job turn up, it is cancelled."""
        self._hold = Hold()
        self._yielded: dict[str, float] = {}
        """Lease id → when it was asked to leave for a job that lacked its node."""
        self._due_since: dict[str, float] = {}
        self._lacking_since: dict[str, float] = {}
        self._no_more: tuple[float, int, str] | None = None
        self._submitter = Submitter(
            SLURM, settings.lease.submit_as, settings.user, settings.submit_rate, self.commands, submitting_environment(environment)
        )

    # --- polling -----------------------------------------------------------------------------------------------------------------------

    def poll(self) -> Snapshot:
        """Gaps and leases now. Raises SchedulerError, having changed nothing, when Slurm cannot be asked."""
        began = time.monotonic()
        view = self._look()
        self._ask_to_leave(view)
        if view.unwanted:
            self._submitter.cancel(view.unwanted)
        forget_outputs(self.settings.lease.output_dir)
        now = view.time
        return Snapshot(
            time=now,
            gaps=tuple(
                Gap(node.name, self.memory.since.get(node.name, now), self._horizon(node, now), self._class_of(node.features))
                for node in view.choice.gaps
            ),
            leases=view.leases,
            total_nodes=len(view.facts),
            idle_nodes=len(self.memory.since),
            explanations=Explanations(view.facts.values(), view.rules, view.choice, now),
            poll_again_s=self._interval(view, time.monotonic() - began),
        )

    def _look(self) -> _View:
        """Ask Slurm and draw the conclusions. What is remembered changes only when all of it was understood."""
        now = self.clock()
        site = self._known_site(now)
        nodes, jobs, reservations = self.source.read(self.settings.prefix)
        own = own_jobs(jobs.ours, self.settings.prefix, "" if self.settings.lease.submit_as else self.settings.user)
        facts = describe(nodes, jobs.pending, reservations, own, self._idle_since, now)
        due = [] if self.settings.backfill else self._believed(due_jobs(jobs.pending, site, self.settings.partition, now), now)
        grace_s = self.grace_s(site)
        running = {i: s for i, job in own.items() if (s := lease_of(i, job, now, grace_s)).state is LeaseState.RUNNING}
        self._yielded = {lease: at for lease, at in self._yielded.items() if lease in running}
        leaving = {i for i, lease in running.items() if lease.leaving_by is not None or i in self._yielded or i in self._given_up}
        claimed = claims(due, facts, {i: lease.node for i, lease in running.items()}, leaving)
        rules = self._rules(site)
        hold = self._hold.look(own, self._given_up, facts, bool(claimed.kept or claimed.lacked), self._hold_s(rules), now)
        rules = replace(rules, hold=hold, kept=claimed.kept)
        self._jobs = own
        self._idle_since = {f.name: f.idle_since for f in facts.values() if f.idle_since is not None}
        leases, unwanted = self._leases(own, site, rules, now)
        self._lacking_since = {job: self._lacking_since.get(job, now) for job in claimed.lacked}
        yielded = [lease for job, some in claimed.lacked.items() if now - self._lacking_since[job] >= PATIENCE_S for lease in some]
        leased = {lease.node for lease in leases if lease.state is LeaseState.RUNNING}
        self.memory.update([f.name for f in facts.values() if (f.idle and not f.trouble and not f.reserved) or f.name in leased], now)
        active = sum(lease.state is not LeaseState.ENDED for lease in leases)
        choice = choose(facts.values(), rules, now, lambda node: self._horizon(node, now), self._room(active, now))
        return _View(now, site, rules, facts, leases, unwanted, yielded, choice)

    def _believed(self, due: Sequence[Job], now: float) -> list[Job]:
        """Those that have been about to start for a while at most."""
        self._due_since = {job.id: self._due_since.get(job.id, now) for job in due}
        return [job for job in due if now - self._due_since[job.id] <= BELIEVED_S]

    def known_site(self) -> SlurmSite:
        """What is configured, asked for if it is not known yet. Raises SchedulerError."""
        return self._known_site(self.clock())

    def _known_site(self, now: float) -> SlurmSite:
        if self.site is None or not 0 <= now - self._site_at < SITE_EVERY_S:
            try:
                self.site = ask_site(self.commands)
                self._site_at = now
            except SchedulerError:
                if self.site is None:
                    raise
        if not self._settled:
            self.source = source_for(self.api, self.commands, self.site.version)
            self._settled = True
        return self.site

    def _rules(self, site: SlurmSite) -> GapRules:
        s = self.settings
        turn = s.idle_for_s
        if turn is None:
            turn = TURN_WITHOUT_BACKFILL_S if site.backfill_cycle_s is None else site.backfill_cycle_s
        partitions = s.rules.partitions or frozenset(filter(None, s.lease.partition.split(",")))
        least = max(60.0, s.lease.time_min_s or 0.0) + s.spare_s
        return replace(
            s.rules, idle_for_s=turn, partitions=partitions, use_planned=s.rules.use_planned or s.backfill,
            min_free_s=max(least, s.rules.min_free_s),
        )  # fmt: skip

    def _hold_s(self, rules: GapRules) -> float:
        return hold_for(rules.idle_for_s) if self.settings.hold_s is None else self.settings.hold_s

    def _interval(self, view: _View, took_s: float) -> float:
        """Several polls in a backfill cycle, so that a gap is seen soon after its turn; every second or two while Slurm takes nodes back.
        At most a tenth of the time goes into asking, then at most a third."""
        cycle = view.site.backfill_cycle_s or TURN_WITHOUT_BACKFILL_S
        usual = max(self.settings.poll_interval_s, min(cycle / 4, 30.0))
        if view.rules.hold or self._lacking_since:
            return max(min(usual, HOLD_POLL_S), 3 * took_s)
        return max(usual, 10 * took_s)

    def _room(self, active: int, now: float) -> tuple[int, str] | None:
        """How many more leases there may be, if that is limited at all."""
        limits = []
        if self.settings.max_leases:
            limits.append((self.settings.max_leases - active, f"the configuration allows {self.settings.max_leases} leases"))
        if self._no_more is not None:
            until, count, words = self._no_more
            if now < until:
                limits.append((count - active, f"Slurm refuses more jobs of ours than {count} for now: {words}"))
            else:
                self._no_more = None
        return min(limits) if limits else None

    def _class_of(self, features: Sequence[str]) -> str:
        return next((c for c in self.settings.node_classes if c in features), "default")

    def _horizon(self, node: NodeFacts, now: float) -> float:
        """What the gaps of this site were like, and no longer than to the next known use."""
        expected = self.memory.horizon(node.name, now)
        return expected if node.free_until is None else max(0.0, min(expected, node.free_until - now))

    # --- what Slurm said ---------------------------------------------------------------------------------------------------------------

    def _leases(self, own: Mapping[str, Job], site: SlurmSite, rules: GapRules, now: float) -> tuple[tuple[Lease, ...], list[Job]]:
        """Every lease, and the jobs that have to be cancelled: not started in time, suspended, or given up before."""
        leases, unwanted = [], []
        self._given_up = {k: t for k, t in self._given_up.items() if now - t[0] < REMEMBERED_S}
        grace_s = self.grace_s(site)
        for lease_id, job in own.items():
            lease = lease_of(lease_id, job, now, grace_s)
            if lease.state is not LeaseState.ENDED:
                reason = ""
                if lease_id in self._given_up:
                    reason = self._given_up[lease_id][1]
                elif job.state == "SUSPENDED":
                    reason = "the main scheduler suspended it"
                elif lease.state is LeaseState.PENDING and (needed := rules.hold or rules.kept.get(job.wanted, "")):
                    reason = needed
                elif lease.state is LeaseState.PENDING and now - (job.submitted or now) > self.settings.start_within_s:
                    reason = f"it did not start within {self.settings.start_within_s:g} s ({job.reason})"
                if reason:
                    self._given_up.setdefault(lease_id, (now, reason))
                    if job.state != "COMPLETING":
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
        with ThreadPoolExecutor(min(SUBMITTERS, len(requests)), thread_name_prefix="sbatch") as pool:
            return list(pool.map(lambda request: self._take_safely(request, view), requests))

    def _take_safely(self, request: LeaseRequest, view: _View) -> Lease:
        try:
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
            raise SchedulerError(f"Slurm knows no node {request.node}")
        if reason := why_not(facts, view.rules, view.choice, now):
            raise SchedulerError(f"{request.node} is no gap any more: {reason}")
        limit_s = self._limit(facts, request.duration_s, now)
        if limit_s is None:
            raise SchedulerError(f"the gap of {request.node} is too short for a lease by now")
        if self._no_more is not None and self._no_more[0] > now:
            raise SchedulerError(f"Slurm refuses more jobs of ours for now: {self._no_more[2]}")
        step = self._as_step(site)
        env = {
            **request.env, "MALLETRAIN_LEASE": request.id, "MALLETRAIN_GRACE_S": f"{grace_s:g}",
            "MALLETRAIN_NODE_CLASS": self._class_of(facts.features),
        }  # fmt: skip
        script = batch_script(s.template, request.argv, env, step)
        name = s.prefix + request.id
        argv = sbatch(
            s.lease, name=name, node=request.node, lease=request.id, limit_s=limit_s, start_within_s=s.start_within_s, grace_s=grace_s,
            step=step, log=request.owner is None,
        )  # fmt: skip
        try:
            number = self._submitter.submit(argv, script, request.owner)
        except LimitReachedError as error:
            held = sum(job.state not in ENDED_STATES for job in list(self._jobs.values()))
            self._no_more = (now + NO_MORE_FOR_S, held, str(error))
            raise
        except UnsureError as error:
            self._given_up[request.id] = (now, str(error))  # should its job turn up, it is cancelled
            raise
        self._jobs[request.id] = Job(
            "PENDING", number, request.owner or s.user, s.partition, 1, now, None, None, "", request.node, "", "submitted", name
        )
        return Lease(request.id, number, LeaseState.PENDING, request.node)

    def _as_step(self, site: SlurmSite) -> bool:
        """Whether agents run as a job step: where a preemption's signal would reach the batch script too late."""
        return self.settings.lease.launch == "step" or (self.settings.lease.launch == "auto" and not site.user_signal)

    def _limit(self, facts: NodeFacts, duration_s: float | None, now: float) -> float | None:
        """Time limit of a lease on a node that begins now: it ends before the next known use, and with the hours allowed."""
        free_s = None if facts.free_until is None else facts.free_until - now
        hours_s = self.settings.rules.hours.left_s(now)
        for other in (hours_s, duration_s):
            if other is not None:
                free_s = other + self.settings.spare_s if free_s is None else min(free_s, other + self.settings.spare_s)
        return limit_of(self.settings.lease, free_s, self.settings.spare_s)

    def grace_s(self, site: SlurmSite) -> float:
        """Seconds a preempted lease has until it is killed: as configured, else as Slurm says."""
        own = self.settings.lease.grace_s
        return site.grace_of(self.settings.partition) if own is None else own

    def give_back(self, leases: Sequence[Lease]) -> None:
        """Cancel the jobs of these leases."""
        jobs = []
        for lease in leases:
            known = self._jobs.get(lease.id)
            self._given_up.setdefault(lease.id, (self.clock(), "given back"))
            if known is not None:
                if known.state not in ENDED_STATES:
                    jobs.append(known)
            elif lease.scheduler_id:
                name = self.settings.prefix + lease.id
                user, partition = self.settings.user, self.settings.partition
                jobs.append(Job("RUNNING", lease.scheduler_id, user, partition, 1, None, None, None, lease.node, "", "", "", name))
        if error := self._submitter.cancel(jobs):
            raise error

    def _ask_to_leave(self, view: _View) -> None:
        """Send leases the signal that a preemption would; one that does not leave within the grace time is cancelled."""
        grace_s = self.grace_s(view.site)
        late = [self._jobs[i] for i, at in self._yielded.items() if view.time - at > grace_s and self._jobs[i].state != "COMPLETING"]
        if late:
            self._submitter.cancel(late)
        jobs = [self._jobs[lease] for lease in view.yielded]
        if jobs and self._submitter.cancel(jobs, ("--signal=TERM", *(() if self._as_step(view.site) else ("--batch",)))) is None:
            self._yielded.update(dict.fromkeys(view.yielded, view.time))

    def check(self) -> list[tuple[bool, str]]:
        """What works with this Slurm and what does not, and what to change."""
        from scavenger.slurm_check import check

        return check(self)
