"""The scavenger of OpenPBS and PBS Professional: how PBS is read, and what is specific to taking
leases from it.

One poll is two commands (qstat, pbsnodes), and sometimes a third: pbs_rstat for reservations that
are not known yet, or qstat for the end of leases that have disappeared. :mod:`scavenger.pbs.state`
interprets PBS's states, and :mod:`scavenger.pbs.job` defines how a lease is requested. Everything
else is common to all batch schedulers (:mod:`scavenger.batch`).

PBS preempts by deleting, requeuing or suspending a job. A deleted or requeued lease gets SIGTERM
and the queue's kill_delay. A suspended lease can do nothing, so it counts as lost and is killed. A
requeued lease must not start again, so it is deleted too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from scavenger.batch.commands import Commands, failure, shorten
from scavenger.batch.gap_memory import GapMemory
from scavenger.batch.lease_ender import MovedLeases
from scavenger.batch.lease_ledger import LeaseJob, own_jobs
from scavenger.batch.lease_request import PreemptionHold
from scavenger.batch.lease_script import Part, lease_script
from scavenger.batch.poll_result import Finding, SchedulerAnswer
from scavenger.batch.rules import NodeFacts
from scavenger.batch.scavenger import BatchScavenger
from scavenger.batch.settings import BatchSettings
from scavenger.batch.slots import ANY, LeasedSlot, slot_facts
from scavenger.batch.submission import LeaseSpec
from scavenger.interface import Lease, LeaseState, SchedulerError, host_of, kind_of
from scavenger.pbs.check import PbsCheckInputs, findings
from scavenger.pbs.hosts import read_hosts, slot_chunk
from scavenger.pbs.job import PBS, SHARED_PLACE, PbsLeaseOptions, chunk_of, qsub, select_of
from scavenger.pbs.parse import (
    DSV_MARK,
    PbsJob,
    PbsJobTable,
    RawNode,
    number_in,
    planned_uses,
    read_ended,
    read_unknown,
    text_of,
)
from scavenger.pbs.site import KILL_DELAY_S, PbsSite, ask_site
from scavenger.pbs.source import (
    Api,
    PbsCommandSource,
    PbsSource,
    Reservations,
    asking_environment,
    source_for,
    submitting_environment,
)
from scavenger.pbs.state import (
    ENDED_STATES,
    PENDING_STATES,
    HostVnodes,
    PbsSnapshot,
    by_host,
    end_reason,
    in_slot,
    is_preempted,
    ledger_entry,
    node_facts,
    terminated_by,
    without_cpus,
)

MAX_LEFT_IDLE_S = 30.0
"""Maximum default time for which an idle node is left to PBS, seconds. PBS's scheduler runs
whenever a job ends, not only every scheduler_iteration.
"""
IDS_PER_QUERY = 50


class PbsScavenger(BatchScavenger[PbsLeaseOptions, PbsSite]):
    """A connection to one PBS. One call at a time.

    Args:
        settings: settings of the site.
        commands: runs PBS's commands; None: with the settings' limits.
        source: reads PBS's state; None: the one that ``api`` selects.
        memory: history of the gaps; None: a new one.
        clock: returns epoch seconds.
        api: ``commands``, ``bindings`` or ``auto``.
        environment: this process's environment.
    """

    name = "pbs"
    title = "PBS"
    oldest = (
        18,
        1,
    )  # the first with JSON output of qstat and pbsnodes (openpbs pull request 249)
    when_silent = "Run MalleTrain where qstat works (/etc/pbs.conf must name the server)."
    site_every_s = 120.0
    limit_step_s = 1.0

    def __init__(
        self,
        settings: BatchSettings[PbsLeaseOptions],
        commands: Commands | None = None,
        source: PbsSource | None = None,
        memory: GapMemory | None = None,
        clock: Callable[[], float] = time.time,
        api: Api = "commands",
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        commands = commands or Commands(environment=asking_environment(environment))
        super().__init__(
            settings,
            commands,
            PBS,
            submitting_environment(commands.environment or {}, environment),
            memory,
            clock,
        )
        self.api = api
        self.source = source or PbsCommandSource(commands)
        """How PBS is read; chosen when its configuration is read first."""
        self._settled = source is not None or api == "commands"
        self.reservations = Reservations(commands)
        self._hosts: Mapping[str, HostVnodes] = {}
        self._without_cpus: Mapping[str, HostVnodes] = {}
        self._own: Mapping[str, PbsJob] = {}
        """From the last poll: the vnodes of each host with and without CPUs, and lease id → its
        job.
        """
        self._preemption_hold = PreemptionHold()
        self._moved = MovedLeases(self.title, "queue", "scheduler.pbs")

    @property
    def source_name(self) -> str:
        """How PBS is read: through its commands, or through its bindings."""
        return f"its {self.source.name}"

    def _ask_site(self) -> PbsSite:
        site = ask_site(self.commands, self.settings.lease.queue)
        if not self._settled:
            self.source = source_for(self.api, self.commands)
            self._settled = True
        return site

    def _read(self, site: PbsSite, hold_s: float, now: float) -> SchedulerAnswer:
        s = self.settings
        with_running = any(kind.beside != ANY for kind in s.slots)
        nodes, jobs = self.source.read(s.prefix, with_running)
        # PBS keeps the forecast of a job that it no longer plans (openpbs pull request 2695).
        oldest = now - site.estimates_every_s
        jobs = jobs._replace(pending=[job for job in jobs.pending if (job.start or 0.0) >= oldest])
        reservations = self.reservations.of(nodes, now)
        own = own_jobs(jobs.ours, s.prefix, self.ledger.user_of, PENDING_STATES, ENDED_STATES)
        ended = self._ask_of_missing(own)
        own = {lease: in_slot(job, self.ledger.node_of(lease)) for lease, job in own.items()}
        hosts = by_host(nodes)
        wants_features = bool(s.rules.features or s.node_classes)
        reading = PbsSnapshot(hosts, jobs.pending, own, reservations, jobs.suspended)
        facts = node_facts(
            reading, site.queues_of(), self._idle_since, now, with_features=wants_features
        )
        if s.slots:
            facts = self._slots(facts, hosts, nodes, jobs, own, now)
        vanished = self._find_gone(own, ended, now)
        given_up = self.ledger.given_up
        if any(
            is_preempted(job)
            for i, job in own.items()
            if i not in given_up and job.state not in ENDED_STATES
        ):
            self._preemption_hold.note(now)
        self._hosts, self._without_cpus, self._own = hosts, without_cpus(nodes), own
        grace_s = self.grace_s(site)
        lease_jobs = {
            lease_id: ledger_entry(lease_id, job, now, grace_s) for lease_id, job in own.items()
        }
        preempting = self._preemption_hold.reason(hold_s, now)
        queues = {lease: own[lease].queue for lease, job in lease_jobs.items() if job.alive}
        moved = self._moved.reasons_to_leave(queues, site.reached_from(s.lease.queue), now)
        leave = self._never_preempted(site, own) | moved
        return SchedulerAnswer(
            facts,
            lease_jobs,
            vanished,
            hold=self._closed(site) or self._moved.reason_to_pause(now) or preempting,
            leave=leave,
            urgent=bool(preempting),
        )

    def _slots(
        self,
        facts: Mapping[str, NodeFacts],
        hosts: Mapping[str, HostVnodes],
        nodes: Mapping[str, RawNode],
        jobs: PbsJobTable,
        own: Mapping[str, PbsJob],
        now: float,
    ) -> dict[str, NodeFacts]:
        """Return slot → its facts, and those of hosts without slots unchanged."""
        s = self.settings
        leased: dict[str, dict[str, LeasedSlot]] = {}
        for lease, job in own.items():
            if job.state not in ENDED_STATES and kind_of(job.host):
                slot = LeasedSlot(lease, job.state not in PENDING_STATES)
                leased.setdefault(host_of(job.host), {})[job.host] = slot
        use = read_hosts(hosts, nodes, jobs.running)
        planned = planned_uses(jobs.pending)
        slots: dict[str, NodeFacts] = {}
        for name, host in facts.items():
            if not any(kind.covers(name) for kind in s.slots):
                slots[name] = host
                continue
            starts = [planned[vnode] for vnode, _ in hosts[name] if vnode in planned]
            host = host._replace(planned=bool(starts), planned_at=min(starts, default=None))
            on_host = leased.get(name, {})
            for one in slot_facts(
                host, use[name], s.slots, on_host, self._idle_since, now, s.owner
            ):
                slots[one.name] = one
        return slots

    def _missing(self, own: Mapping[str, PbsJob]) -> dict[str, LeaseJob]:
        """Return the leases of the last poll that are not in ``own``."""
        jobs = self.ledger.jobs.items()
        return {lease: job for lease, job in jobs if lease not in own and job.alive}

    def _ask_of_missing(self, own: dict[str, PbsJob]) -> dict[str, PbsJob]:
        """Return job id → PBS's record of leases that have disappeared. Leases that PBS still has,
        because its answer was truncated, are added to ``own``.
        """
        given_up = self.ledger.given_up
        lost = {job.id: lease for lease, job in self._missing(own).items() if lease not in given_up}
        ids, remembered = list(lost), dict[str, PbsJob]()
        for start in range(0, len(ids), IDS_PER_QUERY):
            remembered |= self._remembered(ids[start : start + IDS_PER_QUERY])
        for job_id in [i for i, job in remembered.items() if job.state not in ENDED_STATES]:
            if lease := lost.get(job_id):
                job = remembered.pop(job_id)
                own[lease] = self._own.get(lease, job)
        return remembered

    def _remembered(self, ids: Sequence[str]) -> dict[str, PbsJob]:
        """Return PBS's records of these jobs. Raises SchedulerError if PBS neither shows a job nor
        reports that it does not know it, or shows one that goes on with another name. A finished
        job with another name counts as one that PBS does not know.
        """
        by_id: dict[str, PbsJob] = {}
        silent = list(ids)
        # Without job_history_enable, qstat -x succeeds and shows nothing, not even running jobs.
        for options in (["-x", "-f"], ["-f"]):
            result = self.commands.run(["qstat", *options, "-F", "dsv", "-D", DSV_MARK, *silent])
            shown = read_ended(result.stdout, prefix="").ours
            jobs = [job for job in shown if job.name.startswith(self.settings.prefix)]
            alive = (j for j in shown if j not in jobs and j.state not in ENDED_STATES)
            if other := next(alive, None):
                raise SchedulerError(
                    f"PBS's job {other.id} has the name {shorten(other.name, 60)}, and was "
                    f"submitted with one that begins with {self.settings.prefix}: a hook of the "
                    "site renames jobs. MalleTrain knows its leases by their names; let the hook "
                    "leave them."
                )
            by_id |= {job.id: job for job in jobs}
            answered = {number_in(job.id) for job in jobs} | read_unknown(result.stderr)
            silent = [job_id for job_id in silent if number_in(job_id) not in answered]
            if not silent:
                return by_id
            if result.status:
                break
        raise failure(result)

    def _find_gone(
        self, own: Mapping[str, PbsJob], remembered: Mapping[str, PbsJob], now: float
    ) -> dict[str, Lease]:
        """Return the leases of the last poll that have disappeared. ``remembered``: PBS's records
        of them.
        """
        given_up = self.ledger.given_up
        disappeared = {}
        for lease, job in self._missing(own).items():
            last = remembered.get(job.id) or self._own.get(lease)
            reason = (
                given_up[lease][1]
                if lease in given_up
                else self.ender.leave_requests[lease][1]
                if lease in self.ender.leave_requests
                else end_reason(last)
                if last is not None
                else "it ended"
            )
            disappeared[lease] = replace(
                job.lease,
                node=job.requested_node,
                state=LeaseState.ENDED,
                reason=reason,
                gone_at=None,
            )
            if (
                lease not in given_up
                and lease not in self.ender.leave_requests
                and (job.id not in remembered or terminated_by(remembered[job.id]) == "Scheduler")
            ):
                self._preemption_hold.note(now)
        return disappeared

    def _never_preempted(self, site: PbsSite, own: Mapping[str, PbsJob]) -> dict[str, str]:
        """Return lease → why PBS can no longer preempt it: its preempt_order was changed. A lease
        that PBS can preempt for a part of its time stays.
        """
        if not site.only_requeues or self.settings.lease.rerunnable != "auto":
            return {}
        reason = f"PBS preempts by requeuing only (preempt_order = {site.preempt_order})"
        return {
            lease: f"{reason} and this lease is not rerunnable"
            for lease, job in own.items()
            if not job.rerunnable
        }

    def _closed(self, site: PbsSite) -> str:
        """Return why PBS would start no lease; empty if it would."""
        if not site.scheduling:
            return "PBS starts no jobs at present (scheduling of its server is False)"
        name = self.settings.lease.queue
        queue = site.queues.get(name)
        if queue is None:
            return f"PBS has no queue {name}" if name else ""
        return (
            ""
            if queue.enabled and queue.started
            else f"queue {name} is {'stopped' if queue.enabled else 'disabled'}"
        )

    def _left_idle_s(self, site: PbsSite) -> float:
        """Return the length of one scheduling cycle, seconds."""
        return min(site.iteration_s, MAX_LEFT_IDLE_S)

    def _partitions(self, site: PbsSite) -> Collection[str]:
        """Return the queue of the leases, or those to which it routes."""
        queue = site.queues.get(self.settings.lease.queue)
        return (
            [self.settings.lease.queue] if queue is None or queue.execution else queue.destinations
        )

    def _max_lease_s(self, site: PbsSite) -> tuple[float | None, str]:
        queue = site.queues.get(self.settings.lease.queue)
        most = None if queue is None else queue.max_walltime_s
        return most, f"resources_max.walltime of queue {self.settings.lease.queue}"

    def _site_grace_s(self, site: PbsSite) -> float:
        queue = site.queues.get(self.settings.lease.queue)
        return KILL_DELAY_S if queue is None else queue.kill_delay_s

    def _submission(self, spec: LeaseSpec, site: PbsSite) -> tuple[list[str], bytes]:
        lease = self.settings.lease
        rerunnable = site.requeues if lease.rerunnable == "auto" else lease.rerunnable == "yes"
        env = {**spec.env, "MALLETRAIN_OUTPUT": str(spec.output or "/dev/null")}
        if spec.slot is None:
            free = [
                v for v in self._without_cpus.get(spec.node, ()) if text_of(v[1].state) == "free"
            ]
            select = select_of(lease, spec.node, [*self._hosts[spec.node], *free])
            place = ""
        else:
            amounts = spec.slot.amounts
            select, place = chunk_of(lease, spec.host, slot_chunk(amounts)), SHARED_PLACE
            gpus = amounts.get("gpu", 0)
            env |= {"MALLETRAIN_GPUS": str(gpus), **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})}
        argv = qsub(
            self.settings,
            name=spec.name,
            select=select,
            limit_s=spec.limit_s,
            rerunnable=rerunnable,
            place=place,
        )
        part = Part(spec.node, spec.argv, env, keep_at_home=spec.keep_at_home)
        return argv, lease_script(self.settings.template, part)

    def _findings(self, site: PbsSite) -> Iterator[Finding]:
        return findings(
            PbsCheckInputs(
                site,
                self.settings,
                self.grace_s(site),
                self.source,
                self.reservations,
                self.submitter,
                self.clock(),
            )
        )
