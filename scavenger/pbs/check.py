"""Tests a live PBS for ``malletrain check``. Each finding is a sentence that says what to change.

Nothing remains after the checks. PBS has no trial submission, so the permission to submit a lease
is tested with a held job (``-h``) that is deleted at once. Settings that exist only in the
scheduler's own file (``preemptive_sched`` in sched_config) cannot be read; the findings say so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from scavenger.batch.check import job_limit, preemption_grace
from scavenger.batch.lease_ledger import LeaseJob
from scavenger.batch.lease_script import Part, lease_script
from scavenger.batch.poll_result import Finding
from scavenger.batch.settings import BatchSettings
from scavenger.batch.slots import kind_finding
from scavenger.batch.submission import Submitter
from scavenger.interface import Lease, LeaseState, SchedulerError
from scavenger.pbs.hosts import EXCLUSIVE_SHARING, read_hosts, slot_chunk
from scavenger.pbs.job import PLAIN_SHELL, SHARED_PLACE, PbsLeaseOptions, qsub, sum_of
from scavenger.pbs.parse import RawNode, number_of
from scavenger.pbs.site import PREEMPT_METHODS, PbsSite, limit_of
from scavenger.pbs.source import PbsSource, Reservations
from scavenger.pbs.state import HostVnodes, by_host


@dataclass(frozen=True)
class PbsCheckInputs:
    """The inputs of the checks."""

    site: PbsSite
    """Configuration of PBS."""
    settings: BatchSettings[PbsLeaseOptions]
    """Settings of the site."""
    grace_s: float
    """Grace time of a preempted lease, seconds."""
    source: PbsSource
    """How PBS is read."""
    reservations: Reservations
    """Reservations of PBS."""
    submitter: Submitter
    """Submits and deletes the trial job."""
    now: float
    """Time of the checks, epoch seconds."""


def findings(inputs: PbsCheckInputs) -> Iterator[Finding]:
    """Yield (works, sentence) for each test."""
    parts = [_server, _queue]
    parts += [_backfill] if inputs.settings.backfill else [_preemption, _grace]
    tests = [*parts, _shape, _shell, _nodes]
    results = [finding for part in tests for finding in part(inputs)]
    yield from results
    if all(works is not False for works, _ in results):
        yield from _permission(inputs)


def _server(inputs: PbsCheckInputs) -> Iterator[Finding]:
    if not inputs.site.scheduling:
        yield False, "PBS starts no jobs at present; run: qmgr -c 'set server scheduling = True'"
    if not inputs.site.sees_others:
        yield (
            True,
            (
                "PBS shows each user only their own jobs, so MalleTrain cannot see when other "
                "users' jobs are expected to start. Run qmgr -c 'set server query_other_jobs = "
                "True', or make the daemon's user an operator."
            ),
        )


def _queue(inputs: PbsCheckInputs) -> Iterator[Finding]:
    name = inputs.settings.lease.queue
    available = (
        ", ".join(sorted(q.name for q in inputs.site.queues.values() if not q.acl)) or "none"
    )
    if not name:
        yield (
            False,
            "No queue is named for the leases; set queue in [scheduler.pbs] to one of "
            f"{available}.",
        )
        return
    queue = inputs.site.queues.get(name)
    if queue is None:
        yield (
            False,
            f"PBS has no queue {name}; set queue in [scheduler.pbs] to one of those it has: "
            f"{available}.",
        )
    elif not queue.enabled:
        yield False, f"Queue {name} takes no jobs; run: qmgr -c 'set queue {name} enabled = True'"
    elif not queue.started:
        yield False, f"Queue {name} starts no jobs; run: qmgr -c 'set queue {name} started = True'"
    elif queue.from_route_only:
        yield (
            False,
            f"Queue {name} takes jobs from a routing queue only; set queue in [scheduler.pbs] "
            "to that one.",
        )
    else:
        yield True, f"Queue {name} takes and starts jobs (Priority {queue.priority})."
        yield from _walltime(name, queue.min_walltime_s, queue.max_walltime_s, inputs)


def _walltime(
    name: str, least: float | None, most: float | None, inputs: PbsCheckInputs
) -> Iterator[Finding]:
    s = inputs.settings
    if most is not None and s.time_limit_s > most:
        enough = most >= min(s.min_length_s, s.time_limit_s)
        yield (
            enough,
            f"Leases end after {most:g} s at most (resources_max.walltime of queue {name}), sooner "
            f"than time_limit ({s.time_limit_s:g} s) says."
            if enough
            else f"Queue {name} takes jobs of {most:g} s at most, and the shortest lease has "
            f"{s.min_length_s:g} s: none could start. Raise resources_max.walltime, or lower "
            "time_min and min_lease in [scheduler.pbs].",
        )
    if least is not None and s.min_length_s < least:
        yield (
            True,
            (
                f"Queue {name} takes jobs of {least:g} s at least. MalleTrain requests shorter "
                "leases before a known use of a node, and PBS refuses them. Set "
                f'time_min in [scheduler.pbs] to "{least:g} s".'
            ),
        )


def _preemption(inputs: PbsCheckInputs) -> Iterator[Finding]:
    name = inputs.settings.lease.queue
    queue = inputs.site.queues.get(name)
    if queue is None:
        return
    instead = (
        'or set mode = "backfill" in [scheduler.pbs] for leases that end before the nodes '
        "are wanted"
    )
    above = inputs.site.above(name)
    ranks = {inputs.site.ranks_above_normal(inputs.site.queues[q].priority) for q in above}
    levels = (
        f"preempt_prio of PBS's scheduler ({', '.join(inputs.site.preempt_prio)}) does not name "
        "express_queue before normal_jobs"
    )
    remedy = "run qmgr -c 'set sched preempt_prio = \"express_queue, normal_jobs\"'"
    if queue.priority >= inputs.site.preempt_queue_prio:
        yield (
            False,
            (
                f"Queue {name} has Priority {queue.priority}, which makes it an express queue "
                "whose jobs preempt others (preempt_queue_prio is "
                f"{inputs.site.preempt_queue_prio}); set queue in [scheduler.pbs] to one "
                "with a lower Priority."
            ),
        )
    elif not above:
        yield (
            False,
            (
                f"No queue preempts {name}: none has a Priority of preempt_queue_prio "
                f"({inputs.site.preempt_queue_prio}) or more, so leases would "
                "keep others waiting; run qmgr -c 'set queue MAIN Priority = "
                f"{inputs.site.preempt_queue_prio}' for the queues of the main jobs and "
                f"set preemptive_sched: True in sched_config, {instead}."
            ),
        )
    elif ranks == {False}:
        is_reversed = "express_queue" in inputs.site.preempt_prio
        yield (
            False,
            f"No queue preempts {name}: {levels}, so leases would keep others waiting"
            + (" and preempt jobs of express queues" if is_reversed else "")
            + f"; {remedy}"
            + ("." if is_reversed else f", {instead}."),
        )
    else:
        below = [
            q
            for q in above
            if inputs.site.ranks_above_normal(inputs.site.queues[q].priority) is False
        ]
        above = [q for q in above if q not in below]
        if below:
            yield (
                None,
                f"Jobs of {', '.join(below)} do not preempt leases, and may have to wait until one "
                f"ends: {levels}; {remedy}.",
            )
        if True not in ranks:
            yield (
                None,
                f"Jobs of {', '.join(above)} preempt only those leases that exceed a soft limit or "
                f"their fairshare: {levels}. If leases need not exceed it, {remedy}.",
            )
        methods = ", ".join(PREEMPT_METHODS[letter] for letter in inputs.site.preempt_methods)
        yield (
            True,
            (
                f"Jobs of {', '.join(above)} preempt those of {name} if sched_config says "
                "preemptive_sched: True, which MalleTrain cannot see; "
                f"a preempted job is {methods}, whichever works first "
                f"(preempt_order{'' if inputs.site.preempt_known else ', by default'})."
            ),
        )
        for each in (inputs.site.queues[express] for express in above):
            if not inputs.site.preempts(each, name):
                targets = each.preempt_targets or inputs.site.preempt_targets
                yield (
                    False,
                    f"Jobs of {each.name} do not preempt those of {name} by default "
                    f"(resources_default.preempt_targets = {targets}), so that leases would keep "
                    f"them waiting; add queue={name} to it.",
                )
        others = sorted(
            q.name
            for q in inputs.site.queues.values()
            if _waits_for_leases(q.name, [*above, *below], inputs)
        )
        if others:
            yield (
                None,
                f"Jobs of {', '.join(others)} do not preempt leases: their Priority is below "
                f"preempt_queue_prio ({inputs.site.preempt_queue_prio}). They may have to wait "
                "until a lease ends, for as long as time_limit in [scheduler.pbs] "
                f"({inputs.settings.time_limit_s:g} s); keep it short, or give these queues a "
                "higher Priority.",
            )
        lease_methods = inputs.site.lease_methods(inputs.settings.lease.rerunnable)
        if "C" in lease_methods:
            yield (
                None,
                "PBS preempts jobs by checkpointing only, for a part of their time at least "
                f"(preempt_order = {inputs.site.preempt_order}). That needs a checkpoint_abort "
                "script on all hosts (pbs_mom's configuration), which MalleTrain cannot see; "
                "without it leases are not preempted then, and main jobs wait until they end. "
                "qmgr -c 'set sched preempt_order = D' lets leases leave in order.",
            )
        if "S" in lease_methods:
            is_after_c = re.search(r"C\w*S", inputs.site.preempt_order)
            leases = "Without a checkpoint_abort script preempted" if is_after_c else "Preempted"
            yield (
                True,
                (
                    f"{leases} leases are suspended: they get no signal and keep their memory "
                    "until MalleTrain kills them (qsig, qdel), at the next poll. "
                    "qmgr -c 'set sched preempt_order = D' lets them leave in order."
                ),
            )
        if inputs.settings.lease.rerunnable == "no" and inputs.site.requeues:
            yield (
                False,
                (
                    "Leases are not rerunnable, and PBS preempts jobs by requeuing only, for a "
                    f"part of their time at least (preempt_order = {inputs.site.preempt_order}), "
                    "so leases would not be preempted then; take rerunnable out of "
                    "[scheduler.pbs]."
                ),
            )


def _waits_for_leases(name: str, above: list[str], inputs: PbsCheckInputs) -> bool:
    queue = inputs.site.queues[name]
    own = inputs.site.queues[inputs.settings.lease.queue]
    return (
        queue.execution
        and queue.enabled
        and name not in (*above, own.name)
        and not queue.acl
        and queue.partition == own.partition
    )


def _grace(inputs: PbsCheckInputs) -> Iterator[Finding]:
    needed_s = inputs.settings.needed_grace_s
    queue = inputs.settings.lease.queue
    remedy = f"run qmgr -c 'set queue {queue} kill_delay = {needed_s:.0f}'"
    yield preemption_grace(inputs.grace_s, needed_s, remedy, "kill_delay")


def _backfill(inputs: PbsCheckInputs) -> Iterator[Finding]:
    if inputs.site.estimates:
        yield (
            True,
            (
                "Leases end before the next known use of their node. PBS makes known when "
                "waiting jobs are expected to start if sched_config "
                "says strict_ordering: True, which MalleTrain cannot see; without it only "
                "reservations are known."
            ),
        )
    else:
        yield (
            False,
            (
                'mode = "backfill" needs to know when waiting jobs are expected to start; run '
                "qmgr -c 'set server backfill_depth = 10' and "
                "set strict_ordering: True in sched_config."
            ),
        )


def _shape(inputs: PbsCheckInputs) -> Iterator[Finding]:
    """Check that no leases share a job, which PBS does not support."""
    why = {
        "array": "All subjobs of a PBS job array have the same select statement, so each cannot "
        "name a node of its own",
        "block": "When PBS preempts a job, only its first host gets SIGTERM; processes on the "
        "other hosts are killed at once, so agents there cannot save a snapshot",
    }
    if reason := why.get(inputs.settings.shape):
        yield (
            False,
            f'{reason}; set lease_shape = "single" in [scheduler.pbs]. Until then each lease has '
            "a job of its own.",
        )


def _limits(inputs: PbsCheckInputs, hosts: Collection[HostVnodes]) -> Iterator[Finding]:
    """Check whether the limits on a user's jobs allow jobs in addition to the leases. ``hosts``:
    those that leases may use.
    """
    s = inputs.settings
    smallest_lease = {
        resource: min(
            number_of(sum_of(resource, [v.resources_available for _, v in vnodes]))
            for vnodes in hosts
        )
        for resource in s.lease.resources
        if resource != "mem"
    }
    queue = inputs.site.queues.get(s.lease.queue)
    places = {"the server": inputs.site.limits, f"queue {s.lease.queue}": queue and queue.limits}
    for place, limits in places.items():
        for name, text in (limits or {}).items():
            resource = name.partition(".")[2]
            per_lease = smallest_lease.get(resource, 0.0) if resource else 1.0
            if per_lease >= 1 and (limit := limit_of(text, s.user)) is not None:
                limit_text = f"{name} of {place}"
                if resource:
                    limit_text += f": {limit}, of which a lease takes {per_lease:.0f} or more"
                if resource and limit < per_lease:
                    yield (
                        False,
                        f"No lease can run: a limit of PBS per user is smaller than one lease "
                        f"({limit_text}). Raise the limit, or take {resource} out of resources in "
                        "[scheduler.pbs].",
                    )
                    continue
                ours, jobs = s.max_leases_per_user, int(limit // per_lease)
                yield from job_limit("PBS", limit_text, jobs, ours, "scheduler.pbs")


def _shell(inputs: PbsCheckInputs) -> Iterator[Finding]:
    """Check whether agents will be the session leaders of their jobs."""
    shell = inputs.settings.lease.shell
    if not shell or shell == PLAIN_SHELL:
        yield (
            True,
            "Agents run below a shell that ends before them, so PBS notices up to 10 s late that a "
            "preempted lease has left; set shell in [scheduler.pbs] to shell.sh of jobscripts/pbs.",
        )
    elif not os.access(shell, os.X_OK) or not re.fullmatch(r"/[^@,\s]+", shell):
        yield (
            False,
            f"{shell} cannot be the shell of a lease. Copy jobscripts/pbs/shell.sh to an absolute "
            "path without spaces, commas or @ that exists here and on the nodes, make it "
            "executable, and set shell in [scheduler.pbs] to it.",
        )


def _nodes(inputs: PbsCheckInputs) -> Iterator[Finding]:
    """Check that the output of PBS which a poll reads can be parsed, and that leases may use at
    least one node.
    """
    try:
        nodes, _ = inputs.source.read(inputs.settings.prefix)
        inputs.reservations.of(nodes, inputs.now)
    except SchedulerError as error:
        yield False, f"PBS's nodes, jobs and reservations cannot be read: {error}"
        return
    hosts = by_host(nodes)
    queue = inputs.settings.lease.queue
    configured = inputs.site.queues.get(queue)
    queues_of = inputs.site.queues_of()
    usable_hosts = [
        vnodes
        for vnodes in hosts.values()
        if configured is None or not configured.execution or queue in queues_of(vnodes[0][1])
    ]
    if not usable_hosts:
        yield (
            False,
            f"No node of PBS takes jobs of queue {queue}; set queue in [scheduler.pbs] to another.",
        )
    else:
        yield (
            True,
            f"PBS has {len(hosts)} hosts with {len(nodes)} vnodes; {len(usable_hosts)} take jobs "
            f"of queue {queue}.",
        )
        if inputs.settings.slots:
            names = [name for name, vnodes in hosts.items() if vnodes in usable_hosts]
            yield from _slots(inputs, {name: hosts[name] for name in names}, nodes)
        else:
            yield from _limits(inputs, usable_hosts)


def _slots(
    inputs: PbsCheckInputs, hosts: Mapping[str, HostVnodes], nodes: Mapping[str, RawNode]
) -> Iterator[Finding]:
    """Check that hosts can have the site's kinds of slots.

    Args:
        inputs: the inputs of the check.
        hosts: those that leases may use.
        nodes: all vnodes.
    """
    use = read_hosts(hosts, nodes)
    for kind in inputs.settings.slots:
        yield kind_finding(
            kind, use, "scheduler.pbs", f"queue {inputs.settings.lease.queue or '(default)'}"
        )
    alone = [
        n for n, vnodes in hosts.items() if any(v.sharing in EXCLUSIVE_SHARING for _, v in vnodes)
    ]
    if alone:
        yield (
            len(alone) < len(hosts),
            f"PBS lets no two jobs share {len(alone)} of {len(hosts)} hosts (sharing of their "
            "vnodes), so that they have no slots.",
        )
    yield (
        True,
        "PBS confines jobs to their processors, memory and GPUs only with its hook pbs_cgroups, "
        "which only managers can see (qmgr -c 'list pbshook pbs_cgroups'). Without it leases of "
        "slots bound their own processors and memory ([nodes] bound_cpus, bound_memory). Nothing "
        "bounds memory bandwidth and network.",
    )


def _permission(inputs: PbsCheckInputs) -> Iterator[Finding]:
    """Submit a lease as a held job for any node, and delete it at once."""
    s = inputs.settings
    limit_s = min(s.min_length_s, s.time_limit_s)
    queue = inputs.site.queues.get(s.lease.queue)
    if queue is not None and queue.min_walltime_s is not None:
        limit_s = max(limit_s, queue.min_walltime_s)
    resources = ["ncpus=1"] if "ncpus" in s.lease.resources else []
    if s.slots:
        resources = slot_chunk(s.slots[0].amounts)
    select = ":".join(filter(None, ["1", *resources, s.lease.select]))
    name = s.prefix + "check"
    try:
        script = lease_script(s.template, Part("", ["true"], {}))
        argv = [
            *qsub(
                s,
                name=name,
                select=select,
                limit_s=limit_s,
                rerunnable=inputs.site.requeues,
                place=SHARED_PLACE if s.slots else "",
            ),
            "-h",
        ]
        job_id = inputs.submitter.submit(argv, script, None)
    except SchedulerError as error:
        yield (
            False,
            f"A lease could not be submitted: {error} "
            + (
                "PBS accepts no jobs of this user (usually root). Run check, and the daemon, as "
                "another user."
                if "Bad UID" in str(error)
                else "Change queue, account, project, select, place or options in [scheduler.pbs]."
            ),
        )
        return
    problem = inputs.submitter.cancel(
        [LeaseJob(Lease("check", job_id, LeaseState.PENDING), s.user)]
    ).problem
    if problem is None:
        yield True, "A lease can be submitted and deleted (one was, held)."
    else:
        yield (
            False,
            f"A lease can be submitted but not deleted: {problem} Delete job {job_id} (qdel "
            f"{job_id}), and ask for the permission.",
        )
