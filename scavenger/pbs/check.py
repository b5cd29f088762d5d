"""Whether a PBS will do, tested live: for ``malletrain check``. Every finding is a sentence that
says what to change.

Nothing is left behind: PBS has no submission on trial, so whether a lease could be submitted is
tested with one that is held (``-h``) and deleted at once. What only the scheduler's own file says
(``preemptive_sched`` in sched_config) cannot be asked for and is named as such.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from scavenger.batch.lease_books import LeaseJob
from scavenger.batch.lease_script import lease_script
from scavenger.interface import Lease, LeaseState, SchedulerError
from scavenger.pbs.job import qsub
from scavenger.pbs.site import PbsSite
from scavenger.pbs.state import by_host

if TYPE_CHECKING:
    from scavenger.pbs.scavenger import PbsScavenger

OLDEST = (18, 1)
"""The first release whose qstat and pbsnodes print JSON (openpbs pull request 249)."""
Finding = tuple[bool, str]
WAYS = {"D": "deleted", "R": "requeued", "C": "checkpointed", "S": "suspended"}


def check(scavenger: PbsScavenger) -> list[Finding]:
    """(works, sentence) per thing tested."""
    try:
        site = scavenger.known_site()
    except SchedulerError as error:
        return [
            (
                False,
                f"PBS cannot be asked: {error} Run MalleTrain where qstat works (/etc/pbs.conf "
                "must name the server).",
            )
        ]
    found = list(_version(site, scavenger))
    if not found[0][0]:
        return found
    found += _server(site)
    found += _queue(site, scavenger)
    if scavenger.settings.backfill:
        found += _backfill(site, scavenger)
    else:
        found += _preemption(site, scavenger)
        found += _grace(site, scavenger)
    found += _nodes(site, scavenger)
    if all(works for works, _ in found):
        found += _permission(scavenger, site)
    return found


def _version(site: PbsSite, scavenger: PbsScavenger) -> Iterator[Finding]:
    if site.version < OLDEST:
        oldest = ".".join(str(part) for part in OLDEST)
        yield (
            False,
            f"PBS {site.shown_version} is older than {oldest}, the oldest that MalleTrain "
            "supports; update PBS.",
        )
        return
    yield (
        True,
        f"PBS {site.shown_version} (server {site.server}) answers; it is asked through its "
        f"{scavenger.source.name}.",
    )


def _server(site: PbsSite) -> Iterator[Finding]:
    if not site.scheduling:
        yield False, "PBS starts no jobs at present; run: qmgr -c 'set server scheduling = True'"
    if not site.sees_others:
        yield (
            True,
            (
                "Users see their own jobs only, so it is not known when a waiting job of "
                "somebody else is expected to start unless the "
                "daemon's user is an operator; qmgr -c 'set server query_other_jobs = True' "
                "would show it."
            ),
        )


def _queue(site: PbsSite, scavenger: PbsScavenger) -> Iterator[Finding]:
    name = scavenger.settings.lease.queue
    known = ", ".join(sorted(q.name for q in site.queues.values() if not q.acl)) or "none"
    if not name:
        yield (
            False,
            f"No queue is named for the leases; set queue in [scheduler.pbs] to one of {known}.",
        )
        return
    queue = site.queues.get(name)
    if queue is None:
        yield (
            False,
            f"PBS has no queue {name}; set queue in [scheduler.pbs] to one of those it has: "
            f"{known}.",
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
        yield from _walltime(name, queue.min_walltime_s, queue.max_walltime_s, scavenger)


def _walltime(
    name: str, least: float | None, most: float | None, scavenger: PbsScavenger
) -> Iterator[Finding]:
    s = scavenger.settings
    if most is not None and s.time_limit_s > most:
        yield (
            False,
            (
                f"Queue {name} takes jobs of {most:g} s at most, and a lease may ask for "
                f"{s.time_limit_s:g} s; set time_limit in "
                f'[scheduler.pbs] to "{most:g} s" or less.'
            ),
        )
    if least is not None and s.least_s < least:
        yield (
            True,
            (
                f"Queue {name} takes jobs of {least:g} s at least; shorter leases before a "
                "known use of their node will be refused. Set "
                f'time_min in [scheduler.pbs] to "{least:g} s".'
            ),
        )


def _preemption(site: PbsSite, scavenger: PbsScavenger) -> Iterator[Finding]:
    name = scavenger.settings.lease.queue
    queue = site.queues.get(name)
    if queue is None:
        return
    instead = (
        'or set mode = "backfill" in [scheduler.pbs] for leases that end before the nodes '
        "are wanted"
    )
    above = site.above(name)
    if queue.priority >= site.preempt_queue_prio:
        yield (
            False,
            (
                f"Queue {name} has Priority {queue.priority}, which makes it an express queue "
                "whose jobs preempt others (preempt_queue_prio is "
                f"{site.preempt_queue_prio}); set queue in [scheduler.pbs] to one with a lower "
                "Priority."
            ),
        )
    elif not above:
        yield (
            False,
            (
                f"No queue preempts {name}: none has a Priority of preempt_queue_prio "
                f"({site.preempt_queue_prio}) or more, so leases would "
                "keep others waiting; run qmgr -c 'set queue MAIN Priority = "
                f"{site.preempt_queue_prio}' for the queues of the main jobs and "
                f"set preemptive_sched: True in sched_config, {instead}."
            ),
        )
    else:
        ways = ", ".join(WAYS[way] for way in site.preempt_order)
        yield (
            True,
            (
                f"Jobs of {', '.join(above)} preempt those of {name} if sched_config says "
                "preemptive_sched: True, which MalleTrain cannot see; "
                f"a preempted job is {ways}, whichever works first "
                f"(preempt_order{'' if site.preempt_known else ', by default'})."
            ),
        )
        others = sorted(
            q.name for q in site.queues.values() if _waits(site, q.name, above, scavenger)
        )
        if others:
            yield (
                True,
                f"Jobs of {', '.join(others)} do not preempt leases and may have to wait for "
                "them to end; keep time_limit short.",
            )
        if site.suspends:
            yield (
                True,
                (
                    "Preempted leases are suspended: they get no signal and keep their memory "
                    "until MalleTrain deletes them, at the next poll. "
                    "qmgr -c 'set sched preempt_order = D' lets them leave in order."
                ),
            )
        if scavenger.settings.lease.rerunnable == "no" and site.requeues:
            yield (
                False,
                (
                    "Leases are not rerunnable, and PBS preempts by nothing else "
                    f"(preempt_order = {site.preempt_order}), so they would never "
                    "be preempted; take rerunnable out of [scheduler.pbs]."
                ),
            )


def _waits(site: PbsSite, name: str, above: list[str], scavenger: PbsScavenger) -> bool:
    queue = site.queues[name]
    own = scavenger.settings.lease.queue
    return queue.execution and queue.enabled and name not in above and name != own and not queue.acl


def _grace(site: PbsSite, scavenger: PbsScavenger) -> Iterator[Finding]:
    wanted = scavenger.settings.wanted_grace_s
    name = scavenger.settings.lease.queue
    grace = scavenger.grace_s(site)
    if grace < wanted:
        yield (
            False,
            (
                f"A preempted lease has {grace:g} s until it is killed, too short to take a "
                f"snapshot and leave in order ({wanted:g} s with "
                f"drain_timeout and stop_grace of [jobs]); run qmgr -c 'set queue {name} "
                f"kill_delay = {wanted:.0f}', or make those shorter."
            ),
        )
    else:
        yield (
            True,
            f"A preempted lease has {grace:g} s to leave (kill_delay); jobs need {wanted:g} s "
            "at most to take a snapshot and stop.",
        )


def _backfill(site: PbsSite, scavenger: PbsScavenger) -> Iterator[Finding]:
    if site.estimates:
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


def _nodes(site: PbsSite, scavenger: PbsScavenger) -> Iterator[Finding]:
    """Whether the answers that every poll needs can be read, and whether any node is for the
    leases.
    """
    try:
        nodes, _ = scavenger.source.read(scavenger.settings.prefix)
        scavenger.reservations.of(nodes, scavenger.clock())
    except SchedulerError as error:
        yield False, f"PBS's nodes, jobs and reservations cannot be read: {error}"
        return
    hosts = by_host(nodes)
    queue = scavenger.settings.lease.queue
    found = site.queues.get(queue)
    queues_of = site.queues_of()
    mine = [
        host
        for host, vnodes in hosts.items()
        if found is None or not found.execution or queue in queues_of(vnodes[0][1])
    ]
    if not mine:
        yield (
            False,
            f"No node of PBS takes jobs of queue {queue}; set queue in [scheduler.pbs] to another.",
        )
    else:
        yield (
            True,
            f"PBS has {len(hosts)} hosts with {len(nodes)} vnodes; {len(mine)} take jobs of "
            f"queue {queue}.",
        )


def _permission(scavenger: PbsScavenger, site: PbsSite) -> Iterator[Finding]:
    """As a lease would be submitted, but held and to any node, and deleted at once."""
    s = scavenger.settings
    limit_s = min(s.least_s, s.time_limit_s)
    queue = site.queues.get(s.lease.queue)
    if queue is not None and queue.min_walltime_s is not None:
        limit_s = max(limit_s, queue.min_walltime_s)
    select = ":".join(
        filter(None, ["1", "ncpus=1" if "ncpus" in s.lease.resources else "", s.lease.select])
    )
    name = s.prefix + "check"
    try:
        script = lease_script(s.template, ["true"], {})
        argv = [*qsub(s, name=name, select=select, limit_s=limit_s, rerunnable=site.requeues), "-h"]
        number = scavenger.submitter.submit(argv, script, None)
    except SchedulerError as error:
        yield (
            False,
            f"A lease could not be submitted: {error} Change queue, account, project, select, "
            "place or options in [scheduler.pbs].",
        )
        return
    problem = scavenger.submitter.cancel(
        [LeaseJob(Lease("check", number, LeaseState.PENDING), s.user)]
    )
    if problem is None:
        yield True, "A lease can be submitted and deleted (one was, held)."
    else:
        yield (
            False,
            f"A lease can be submitted but not deleted: {problem} Delete job {number} (qdel "
            f"{number}), and ask for the permission.",
        )
