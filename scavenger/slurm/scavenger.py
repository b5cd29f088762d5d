"""The scavenger of Slurm: how Slurm is read, and what is specific to taking leases from it.

:class:`SlurmScavenger`: one poll is three commands (squeue, sinfo, scontrol show reservation), or
three calls of pyslurm if it can be used. The configuration (partitions, preemption, the backfill
cycle) is read every few minutes. :mod:`scavenger.slurm.state` interprets Slurm's states,
:mod:`scavenger.slurm.job` defines how a lease is requested, and :mod:`scavenger.slurm.due_jobs`
decides which nodes are left to main jobs that are about to start. Everything else is common to all
batch schedulers (:mod:`scavenger.batch`).

:class:`Hold` pauses lease requests while Slurm preempts leases for a job that it does not show yet.
A main job can need more nodes than those of the leases that it preempts. It counts on idle nodes
without marking them as planned (observed with Slurm 22.05). Within a second or two Slurm shows the
job. From then on only the nodes that it needs are left alone. Until then no lease is requested, and
pending ones are withdrawn. Each preempted lease counts separately, because several main jobs can
preempt at once, and Slurm can show one of them first.

:class:`StepWatch` detects the nodes of a block whose agent has ended while the job continues on
other nodes. A job with one node ends with its agent. In a block each agent is a separate step,
whose end does not end the job. It decides when Slurm is asked for steps, and whose step has ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace

from scavenger.batch.commands import Commands
from scavenger.batch.gap_memory import GapMemory
from scavenger.batch.groups import is_unknown, leases_in
from scavenger.batch.lease_ender import MovedLeases
from scavenger.batch.lease_ledger import LeaseJob, own_jobs
from scavenger.batch.poll_result import Finding, PollConclusions, SchedulerAnswer
from scavenger.batch.rules import NodeFacts
from scavenger.batch.scavenger import BatchScavenger
from scavenger.batch.settings import BatchSettings
from scavenger.batch.slots import LeasedSlot, slot_facts
from scavenger.batch.submission import LeaseSpec
from scavenger.interface import LeaseState, SchedulerError, host_of, kind_of
from scavenger.slurm.check import SlurmCheckInputs, findings
from scavenger.slurm.due_jobs import (
    MAX_DUE_S,
    MAX_LACK_S,
    claims,
    due_jobs,
    leave_by,
    slot_claims,
)
from scavenger.slurm.hosts import (
    HOSTS,
    NEIGHBOUR_FIELDS,
    NEIGHBOURS,
    read_hosts,
    with_neighbours,
    without_devices,
)
from scavenger.slurm.job import (
    RUNNING_STATES,
    SLURM,
    SlurmLeaseOptions,
    batch_script,
    host_script,
    in_slot,
    sbatch,
    sbatch_host,
    sbatch_shared,
    shared_script,
    split_by_lease,
    step_options,
)
from scavenger.slurm.limits import (
    AtLimit,
    LimitWatch,
    longest_lease,
    most_memory_mb,
    with_accounting,
)
from scavenger.slurm.parse import (
    OF_THIS_CLUSTER,
    STEP_FIELDS,
    SlurmJob,
    new_mark,
    planned_uses,
    read_steps,
)
from scavenger.slurm.site import SlurmSite, ask_site, on_this_clock
from scavenger.slurm.source import (
    Api,
    SlurmCommandSource,
    SlurmSource,
    SourceChoice,
    ask_of_missing,
    asking_environment,
    missing,
    submitting_environment,
)
from scavenger.slurm.state import ENDED_STATES, PENDING_STATES, ledger_entry, node_facts


class Hold:
    """Watches our jobs from poll to poll for ends before their time limit."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}
        """Lease id → time at which its job would end by its time limit, on Slurm's clock. On this
        host's it would change with each measurement of the difference.
        """
        self._alive: set[str] = set()
        self._open: dict[str, tuple[float, str]] = {}
        """Preempted lease whose node is not in use by others yet → (time of the observation,
        node).
        """
        self._seen: set[str] = set()

    def update(
        self,
        own: Mapping[str, SlurmJob],
        given_up: Container[str],
        facts: Mapping[str, NodeFacts],
        due_nodes: Container[str],
        hold_s: float,
        now: float,
        ahead_s: float = 0.0,
    ) -> str:
        """Update from a poll.

        Args:
            own: lease id → its job.
            given_up: leases that the daemon ends.
            facts: node → its facts.
            due_nodes: nodes on which the jobs count that Slurm shows as about to start.
            hold_s: pause in requests after a preempted lease, seconds.
            now: epoch seconds.
            ahead_s: by how much Slurm's clock is ahead of this host's, seconds, with which the
                times of ``own`` were converted.

        Returns:
            Why no lease may be requested now; empty if leases may be requested.
        """
        for lease_id, job in own.items():
            if lease_id in given_up or job.state in PENDING_STATES or job.end is None:
                continue
            end = job.end + ahead_s
            early = end < self._ends.setdefault(lease_id, end) - 1.0
            if (
                early
                and (job.state not in ENDED_STATES or lease_id in self._alive)
                and lease_id not in self._seen
            ):
                self._seen.add(lease_id)
                self._open[lease_id] = (now, job.node_list)
        self._seen &= own.keys()
        self._ends = {lease_id: end for lease_id, end in self._ends.items() if lease_id in own}
        self._alive = {lease_id for lease_id, job in own.items() if job.state not in ENDED_STATES}
        self._open = {
            lease_id: (since, node)
            for lease_id, (since, node) in self._open.items()
            if 0 <= now - since < hold_s
            and node not in due_nodes
            and (lease_id in self._alive or node not in facts or not _in_use(facts[node]))
        }
        if not self._open:
            return ""
        since = now - max(since for since, _ in self._open.values())
        return f"the main scheduler took leases back {since:.0f} s ago and may need more nodes"


def _in_use(node: NodeFacts) -> bool:
    return not node.idle and not node.state.startswith("completing")


QUERY_INTERVAL_S = 30.0
"""Interval at which Slurm is asked for the running steps while there are blocks, seconds."""
ENDED = "its agent has ended, and other leases of its job go on"


class StepWatch:
    """Watches the steps of blocks. Ignores a lease whose step was never seen."""

    def __init__(self) -> None:
        self._asked_at = 0.0
        self._seen: set[str] = set()
        """Leases whose step was seen running."""
        self._missed: set[str] = set()
        """Leases whose step was missing in the last answer."""
        self._ended: set[str] = set()

    def due(self, own: Mapping[str, SlurmJob], now: float) -> set[str]:
        """Return the jobs whose steps should be requested now.

        Args:
            own: lease id → its job.
            now: epoch seconds.
        """
        parts = {lease: part for lease, job in own.items() if (part := _in_block(job)) is not None}
        self._seen &= parts.keys()
        self._missed &= parts.keys()
        self._ended &= parts.keys()
        if not self._missed and 0 <= now - self._asked_at < QUERY_INTERVAL_S:
            return set()
        self._asked_at = now
        return {job for lease, (job, _) in parts.items() if lease not in self._ended}

    def answered(self, own: Mapping[str, SlurmJob], steps: Mapping[tuple[str, str], str]) -> None:
        """Note the steps of the jobs that were due: (job, node) → step."""
        running = {lease for lease, job in own.items() if _in_block(job) in steps}
        missing = self._seen - running
        self._seen |= running
        # Twice, because a restarted controller may not know its steps yet.
        self._ended |= missing & self._missed
        self._missed = missing - self._ended

    @property
    def ended(self) -> frozenset[str]:
        """The leases whose agent has ended."""
        return frozenset(self._ended)


def _in_block(job: SlurmJob) -> tuple[str, str] | None:
    """Return the job and node of a lease in a block; None if it is not in one."""
    part = job.part
    if part is None or not part.removable or job.state not in RUNNING_STATES:
        return None
    return part.job, part.node


TURN_WITHOUT_BACKFILL_S = 60.0


class SlurmScavenger(BatchScavenger[SlurmLeaseOptions, SlurmSite]):
    """A connection to one Slurm. One call at a time.

    Args:
        settings: settings of the site.
        commands: runs Slurm's commands; None: with the settings' limits.
        source: reads Slurm's state; None: the one that ``api`` selects.
        memory: history of the gaps; None: a new one.
        clock: returns epoch seconds.
        api: ``commands``, ``pyslurm`` or ``auto``.
        environment: this process's environment.
    """

    name = "slurm"
    title = "Slurm"
    oldest = (20, 11)
    when_silent = "Run MalleTrain where sinfo works (SLURM_CONF may name its configuration)."
    site_every_s = 300.0
    limit_step_s = 60.0

    def __init__(
        self,
        settings: BatchSettings[SlurmLeaseOptions],
        commands: Commands | None = None,
        source: SlurmSource | None = None,
        memory: GapMemory | None = None,
        clock: Callable[[], float] = time.time,
        api: Api = "commands",
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        commands = commands or Commands(environment=asking_environment(environment))
        super().__init__(
            settings, commands, SLURM, submitting_environment(environment), memory, clock
        )
        self.source = source or SlurmCommandSource(commands)
        """How Slurm is read; chosen when its version is known."""
        chooses = source is None and api != "commands"
        self._source_choice = SourceChoice(api, commands, clock) if chooses else None
        self._hold = Hold()
        self._limits = LimitWatch()
        self._moved = MovedLeases(self.title, "partition", "scheduler.slurm")
        self._step_watch = StepWatch()
        self._due_since: dict[str, float] = {}
        self._needed_leases: dict[str, tuple[float, list[str]]] = {}
        """Job that lacks nodes → (since when, the leases on these nodes)."""
        self._leave_by: dict[str, float] = {}
        """Lease that leaves → time by which it should have left, epoch seconds."""

    @property
    def source_name(self) -> str:
        """How Slurm is read: through its commands, or through pyslurm; with the reason if pyslurm
        is installed and not used.
        """
        name, reason = self.source.name, self.source.reason
        return f"{name}, because {reason}" if reason else name

    def _ask_site(self) -> SlurmSite:
        before_s = 0.0 if self.site is None else self.site.clock_ahead_s
        site = ask_site(self.commands, self.clock, before_s)
        site = with_accounting(self.commands, site, self.settings, self.site)
        if self._source_choice is not None:
            self.source = self._source_choice.source(site.version)
        return site

    def _read(self, site: SlurmSite, hold_s: float, now: float) -> SchedulerAnswer:
        s = self.settings
        nodes, jobs, reservations = self.source.read(s.prefix)
        if site.clock_ahead_s:
            jobs, reservations = on_this_clock(jobs, reservations, site.clock_ahead_s)
        # Slurm sets the expected start of a job that lacks a node to the present of each cycle.
        answered_at = self.clock()
        named = [job for job in jobs.ours if not job.renamed or self._has_submitted(job)]
        ours = split_by_lease(named, s.prefix, self.ledger.node_of, self.ledger.users)
        own = own_jobs(ours, s.prefix, self._user_of(ours), PENDING_STATES, ENDED_STATES)
        own_ids = {job.id for job in own.values()}
        jobs = jobs._replace(
            pending=[job for job in jobs.pending if job.id not in own_ids],
            suspended=[job for job in jobs.suspended if job.id not in own_ids],
        )
        expected_ids = self.ledger.jobs.keys() - self.ledger.given_up.keys()
        expected = {lease: self.ledger.jobs[lease] for lease in expected_ids}
        listed = {job.id for job in jobs.ours}
        ask_of_missing(self.commands, s.prefix, missing(expected, own, listed))
        own = {lease: in_slot(job, self.ledger.node_of(lease)) for lease, job in own.items()}
        facts = node_facts(nodes, jobs, reservations, own, self._idle_since, now)
        if s.slots:
            facts = self._slots(site, facts, jobs.pending, own, now)
        due = (
            []
            if s.backfill
            else self._recently_due(
                due_jobs(jobs.pending, site, s.lease.main_partition, answered_at, self._due_since),
                now,
            )
        )
        grace_s = self.grace_s(site)
        lease_jobs = {
            lease_id: ledger_entry(lease_id, job, now, grace_s) for lease_id, job in own.items()
        }
        for lease_id in self._agents_ended(own, now):
            lease_jobs[lease_id] = lease_jobs[lease_id]._replace(
                lost=lease_jobs[lease_id].lost or ENDED
            )
        running = {
            i: job.lease for i, job in lease_jobs.items() if job.lease.state is LeaseState.RUNNING
        }
        given_up = self.ledger.given_up.keys()
        unused_slots = self._unused_slots(lease_jobs)
        running = {i: lease for i, lease in running.items() if i not in unused_slots}
        leaving = {
            i
            for i, lease in running.items()
            if lease.gone_at is not None or i in self.ender.leave_requests or i in given_up
        }
        claim = slot_claims if s.slots else claims
        claimed = claim(due, facts, {i: lease.node for i, lease in running.items()}, leaving)
        limited = (
            self._limits.update(
                jobs.pending,
                {lease: job for lease, job in own.items() if lease not in unused_slots},
                s.lease,
                s.owner,
                now,
            )
            if s.lease.leave_at_limits
            else AtLimit("", {})
        )
        self._needed_leases = {
            job: (self._needed_leases.get(job, (now,))[0], leases)
            for job, leases in {**limited.needed_leases, **claimed.needed_leases}.items()
        }
        self._leave_by = leave_by(
            due,
            self._due_since,
            claimed.needed_leases,
            {i: running[i].node for i in leaving},
            grace_s,
            self._leave_by,
        )
        hold = self._hold.update(
            own, given_up, facts, claimed.nodes, hold_s, now, site.clock_ahead_s
        )
        partitions = {i: own[i].partition for i, job in lease_jobs.items() if job.alive}
        moved = self._moved.reasons_to_leave(partitions, s.lease.partitions, now)
        leave = moved | {
            lease: f"job {job} waits at a limit against which it counts"
            if job in limited.needed_leases
            else f"Slurm lacks its node to start job {job}"
            for job, (since, leases) in self._needed_leases.items()
            if now - since >= MAX_LACK_S
            for lease in leases
        }
        return SchedulerAnswer(
            facts,
            lease_jobs,
            hold=self._moved.reason_to_pause(now) or hold or limited.hold,
            node_holds=claimed.node_holds,
            leave=leave,
            leave_by=self._leave_by,
            urgent=bool(hold or self._needed_leases),
        )

    def _slots(
        self,
        site: SlurmSite,
        hosts: Mapping[str, NodeFacts],
        pending: Sequence[SlurmJob],
        own: Mapping[str, SlurmJob],
        now: float,
    ) -> dict[str, NodeFacts]:
        """Return slot → its facts, and those of hosts without slots unchanged. Raises
        SchedulerError.
        """
        kinds = self.settings.slots
        use = read_hosts(self.commands.ask([*HOSTS]))
        if site.why_all_nodes_are_whole:
            use = without_devices(use)
        if any(kind.needs_neighbours for kind in kinds):
            mark = new_mark()
            jobs = self.commands.ask([*NEIGHBOURS, f"{mark}|{NEIGHBOUR_FIELDS}"])
            use = with_neighbours(use, jobs, mark, {job.id for job in own.values()})
        leased: dict[str, dict[str, LeasedSlot]] = {}
        for lease, job in own.items():
            if job.state not in ENDED_STATES and kind_of(
                slot := job.node_list or job.requested_nodes
            ):
                state = LeasedSlot(lease, job.state not in PENDING_STATES)
                leased.setdefault(host_of(slot), {})[slot] = state
        planned = planned_uses(pending)
        facts: dict[str, NodeFacts] = {}
        for name, host in hosts.items():
            if not any(kind.covers(name) for kind in kinds):
                facts[name] = host
                continue
            if name not in use:
                raise SchedulerError(f"scontrol show node does not list {name}, which sinfo lists.")
            host = host._replace(planned_at=planned.get(name))
            memory_mb = most_memory_mb(site, self.settings.lease) or None
            resources = replace(use[name], job_memory_mb=memory_mb)
            named = self.settings.lease.partitions
            if why := site.why_whole_nodes(named, name):
                resources = replace(resources, closed=f"where {why}")
            for one in slot_facts(
                host,
                resources,
                kinds,
                leased.get(name, {}),
                self._idle_since,
                now,
                self.settings.owner,
            ):
                facts[one.name] = one
        return facts

    def _agents_ended(self, own: Mapping[str, SlurmJob], now: float) -> Collection[str]:
        """Return the leases whose agent has ended although their job continues."""
        if jobs := self._step_watch.due(own, now):
            try:
                self._step_watch.answered(own, self._steps(jobs))
            except SchedulerError:
                pass  # Slurm is asked again later
        return self._step_watch.ended

    def _unused_slots(self, lease_jobs: Mapping[str, LeaseJob]) -> set[str]:
        """Return the leases of slots that were given up while their job has the host for
        others.
        """
        in_use = {
            job.part.job
            for lease, job in lease_jobs.items()
            if job.part is not None and job.alive and lease not in self.ledger.given_up
        }
        return {
            lease
            for lease, job in lease_jobs.items()
            if lease in self.ledger.given_up
            and job.part is not None
            and kind_of(job.part.node)
            and job.part.job in in_use
        }

    def _has_submitted(self, job: SlurmJob) -> bool:
        """Return whether the job has the id that sbatch returned for a lease in its name."""
        name = job.name[len(self.settings.prefix) :]
        job_ids = {self.ledger.job_of(lease) for lease in leases_in(name) or (name,)}
        return job.id.partition("_")[0] in {job_id.partition("_")[0] for job_id in job_ids}

    def _user_of(self, ours: Sequence[SlurmJob]) -> Callable[[str], str]:
        """Return a function from a lease to its user. An unknown lease belongs to the user of its
        job, if we may end it.
        """
        s, prefix = self.settings, len(self.settings.prefix)
        user_of_unknown = {
            lease: job.user
            for job in ours
            if job.part is not None
            and is_unknown(lease := job.name[prefix:])
            and (s.submit_as or job.user == s.user)
        }
        return lambda lease: user_of_unknown.get(lease) or self.ledger.user_of(lease)

    def _recently_due(self, due: Sequence[SlurmJob], now: float) -> list[SlurmJob]:
        """Return the due jobs that have counted as about to start for less than the maximum
        time.
        """
        self._due_since = {job.id: self._due_since.get(job.id, now) for job in due}
        return [job for job in due if now - self._due_since[job.id] <= MAX_DUE_S]

    def _leave_options(self, site: SlurmSite) -> Sequence[str]:
        """Return the options that send the signal of a preemption."""
        return ("--signal=TERM", *(() if self._as_step(site) else ("--batch",)))

    def _left_idle_s(self, site: SlurmSite) -> float:
        """Return the length of one backfill cycle, seconds."""
        return TURN_WITHOUT_BACKFILL_S if site.backfill_cycle_s is None else site.backfill_cycle_s

    def _poll_interval_s(self, site: SlurmSite) -> float:
        """Return an interval with several polls per backfill cycle, so that a gap is found soon
        after the cycle.
        """
        return max(
            self.settings.poll_interval_s,
            min((site.backfill_cycle_s or TURN_WITHOUT_BACKFILL_S) / 4, 30.0),
        )

    def _partitions(self, site: SlurmSite) -> Collection[str]:
        return self.settings.lease.partitions

    def _max_lease_s(self, site: SlurmSite) -> tuple[float | None, str]:
        return longest_lease(site, self.settings.lease)

    def _site_grace_s(self, site: SlurmSite) -> float:
        return site.grace_of(self.settings.lease.main_partition)

    def _as_step(self, site: SlurmSite) -> bool:
        """Return whether agents run as job steps: if a preemption's signal would reach the batch
        script too late, in blocks, and if jobs have whole hosts for several slots.
        """
        launch = self.settings.lease.launch
        too_late = launch == "auto" and not site.user_signal
        several = self.settings.shape == "block" or any(k.whole_host for k in self.settings.slots)
        return launch == "step" or too_late or several

    def _submission(self, spec: LeaseSpec, site: SlurmSite) -> tuple[list[str], bytes]:
        if spec.has_whole_host:
            return self._host_submission([spec], site)
        step = self._as_step(site)
        memory_mb = most_memory_mb(site, self.settings.lease)
        return sbatch(self.settings, spec, step, memory_mb, site.cluster), batch_script(
            self.settings.template, spec.argv, spec.env, step, spec.keep_at_home
        )

    def _shared_by(self, site: SlurmSite) -> int:
        s = self.settings
        if s.shape == "single":
            return 1
        return min(s.shared_by, site.array_size) if s.shape == "array" else s.shared_by

    def _shared_submission(
        self, pack: Sequence[LeaseSpec], view: PollConclusions[SlurmSite]
    ) -> tuple[list[str], bytes]:
        if pack[0].has_whole_host:
            return self._host_submission(pack, view.site)
        step, nodes = self._as_step(view.site), {spec.node for spec in pack}
        partitions = view.rules.partitions
        other_nodes = [
            name
            for name, facts in view.answer.facts.items()
            if name not in nodes and (not partitions or not partitions.isdisjoint(facts.partitions))
        ]
        return (
            sbatch_shared(
                self.settings,
                pack,
                other_nodes,
                step,
                most_memory_mb(view.site, self.settings.lease),
                view.site.cluster,
            ),
            shared_script(self.settings, pack, step),
        )

    def _host_submission(
        self, pack: Sequence[LeaseSpec], site: SlurmSite
    ) -> tuple[list[str], bytes]:
        memory_mb = most_memory_mb(site, self.settings.lease)
        kind = pack[0].slot
        assert kind is not None, "only slots share a host"
        return (
            sbatch_host(self.settings, pack, memory_mb, site.cluster),
            host_script(
                self.settings.template,
                step_options(kind.amounts),
                [one.part for one in pack],
            ),
        )

    def _steps(self, jobs: Collection[str]) -> Mapping[tuple[str, str], str]:
        argv = ["squeue", "-h", *OF_THIS_CLUSTER, "-s", "-j", ",".join(sorted(jobs))]
        return read_steps(self.commands.ask([*argv, "-o", STEP_FIELDS]))

    def _findings(self, site: SlurmSite) -> Iterator[Finding]:
        return findings(
            SlurmCheckInputs(site, self.settings, self.grace_s(site), self.source, self.commands)
        )
