"""The limits of Slurm that a lease meets: of its partitions, of its QOS and of its association.

:func:`longest_lease` and :func:`most_memory_mb` decide the maximum length and memory of a lease
job: MaxTime and MaxMemPerNode of its partitions, MaxWall of its QOS or else of its association. A
lease that requests more would wait for ever (PartitionTimeLimit, QOSMaxWallDurationPerJobLimit,
AssocMaxWallDurationPerJobLimit, MaxMemPerLimit).

:class:`LimitWatch` watches jobs that wait because a limit of their association or QOS is reached,
against which leases count too. Slurm preempts for nodes, never for a limit. A job with such a
reason waits until another job of its account ends. If the site sets ``leave_at_limits``, leases
that count against the same limit leave for it, as many as it has nodes, and no lease is requested
meanwhile. If such jobs still wait after a while, leases are not the cause: leases are taken again,
and leave again after a longer while. :func:`at_limit` decides which leases such
jobs need.

:func:`limits` tests for ``malletrain check`` whether limits of associations and QOS leave room for
leases in addition to the users' other jobs. It asks a running Slurm and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from scavenger.batch.check import job_limit, no_lease
from scavenger.batch.commands import CommandError, Commands, NoAnswerError
from scavenger.batch.poll_result import Finding
from scavenger.batch.settings import BatchSettings
from scavenger.interface import kind_of
from scavenger.slurm.job import SlurmLeaseOptions
from scavenger.slurm.parse import SlurmJob, read_duration
from scavenger.slurm.site import DEFAULT_QOS, LeaseAssociation, SlurmSite
from scavenger.slurm.state import ENDED_STATES, PENDING_STATES


def longest_lease(site: SlurmSite, lease: SlurmLeaseOptions) -> tuple[float | None, str]:
    """Return (seconds, the setting that limits them), the smallest of all limits; (None, empty) if
    there is no limit.

    MaxWall of the association does not count if a QOS of the lease has one (resource limits page of
    Slurm, "Hierarchy").
    """
    limits: list[tuple[float, str]] = []
    association, qos = site.association, lease.qos or site.association.qos
    for name in lease.partitions or ("",):
        of_qos = [(qos, f"MaxWall of QOS {qos}")]
        if (partition := site.partitions.get(name)) is not None:
            if partition.max_time_s is not None:
                limits.append((partition.max_time_s, f"MaxTime of partition {name}"))
            if partition.qos:
                of_qos.append(
                    (partition.qos, f"MaxWall of QOS {partition.qos} of partition {name}")
                )
        walls = [(site.max_wall[one], by) for one, by in of_qos if one in site.max_wall]
        if not walls and (most := association.max_wall_in(name)) is not None:
            walls = [(most, f"MaxWall of the association with account {association.account}")]
        limits += walls
    return min(limits, default=(None, ""))


def most_memory_mb(site: SlurmSite, lease: SlurmLeaseOptions) -> int:
    """Return the memory that a lease can request on a node, MB; 0: all of its memory."""
    limits = (site.partitions[p].max_memory_mb for p in lease.partitions if p in site.partitions)
    return min((most for most in limits if most is not None), default=0)


def with_accounting(
    commands: Commands,
    site: SlurmSite,
    settings: BatchSettings[SlurmLeaseOptions],
    previous: SlurmSite | None,
) -> SlurmSite:
    """Return ``site`` with what slurmdbd knows of leases: MaxWall of QOS, and their association.
    What it does not report stays as it is in ``previous``.

    Args:
        commands: runs the commands, each once, because leases wait meanwhile.
        site: configuration of Slurm.
        settings: settings of the site.
        previous: the configuration as it was read before; None if it was not.
    """
    once = commands.trying_once()
    previous = previous or site
    result = replace(site, max_wall=previous.max_wall, association=previous.association)
    try:
        result = replace(result, max_wall=_max_walls(once, site))
    except NoAnswerError:  # the next command would not be answered either
        return result
    except CommandError:
        pass
    try:
        return replace(result, association=_lease_association(once, site, settings))
    except CommandError:
        return result


def _max_walls(commands: Commands, site: SlurmSite) -> Mapping[str, float]:
    """Return QOS → its MaxWall, seconds, if it has one. Empty if limits are not enforced. Raises
    CommandError.
    """
    if not _enforced(site):
        return {}
    printed = commands.ask(["sacctmgr", "-nP", "show", "qos", "format=name,maxwall"])
    rows = (line.split("|") for line in printed.splitlines() if "|" in line)
    return {row[0]: s for row in rows if (s := read_duration(row[1])) is not None}


def _lease_association(
    commands: Commands, site: SlurmSite, settings: BatchSettings[SlurmLeaseOptions]
) -> LeaseAssociation:
    """Return the association of the leases: that of their user, or of their account if several
    users have leases. Empty if it is not known. Raises CommandError.

    Its MaxWall counts only if limits are enforced, its default QOS in any case.
    """
    account, user = settings.lease.account, settings.owner
    if not site.has_slurmdbd or not (account or user):
        return LeaseAssociation()
    account = account or _default_account(commands, user)
    if not account:
        return LeaseAssociation()
    conditions = [f"cluster={site.settings.get('ClusterName', '')}", f"account={account}"]
    rows = _rows(
        commands, "assoc", FIELDS_OF_LEASES, *conditions, *([f"user={user}"] if user else ())
    )
    own = {row["partition"]: row for row in rows if row["user"] in (user, user.lower())}
    row = own.get(settings.lease.main_partition, own.get("", {}))
    qos = ""
    if row:
        only_qos = "" if "," in row["qos"] else row["qos"]
        qos = row["defaultqos"] or only_qos or DEFAULT_QOS
    return LeaseAssociation(
        account,
        qos,
        {partition: read_duration(row["maxwall"]) for partition, row in own.items()}
        if _enforced(site)
        else {},
    )


def _enforced(site: SlurmSite) -> bool:
    """Return whether Slurm enforces limits."""
    return "limits" in site.settings.get("AccountingStorageEnforce", "").lower()


UNRELIEVED_LIMITS = re.compile(r"\w*(?:PerJob|(?<!Run)Minutes|Wall)\w*")
"""Limits that the end of a lease does not relieve: those of a single job, and those on accumulated
usage.
"""
OF_USER = re.compile(r"AssocMax\w*|QOSMax\w*PerUser\w*|QOSMax\w*PU\w*|Max\w+PerUser")
OF_ACCOUNT = re.compile(r"AssocGrp\w*|QOSMax\w*PerAccount\w*|Max\w+PerAccount|Association\w*Limit")
OF_QOS = re.compile(r"QOSGrp\w*")
"""Reasons (squeue(1), "JOB REASON CODES") for limits that count the jobs of all users of a QOS."""


MAX_YIELD_S = 600.0
"""Maximum time for which leases count as the cause of a reached limit while no waiting job starts,
seconds. Slurm tries again within a minute or two after leases end.
"""
YIELD_PAUSE_S = 3600.0
"""Time for which they then do not count as the cause, seconds. If the limit lets no job start, no
lease can start either.
"""
START_WAIT_S = 60.0
"""Time that a job has to start after leases have left for it, seconds. Then more leases leave."""


class AtLimit(NamedTuple):
    """What jobs at a limit need from leases."""

    hold: str
    """Why no lease may be requested; empty if leases may be."""
    needed_leases: dict[str, list[str]]
    """Job id → leases that should leave for it."""


class LimitWatch:
    """Watches jobs that wait at limits, from poll to poll."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, ...], float] = {}
        """Limit → time since which jobs wait there and none of them has started."""
        self._waiting: dict[str, tuple[str, ...]] = {}
        """Job that waited at the last poll → its limit."""
        self._turns: dict[str, tuple[float, list[str]]] = {}
        """Job → (time at which leases that leave for it were last seen, these leases)."""

    def update(
        self,
        pending: Sequence[SlurmJob],
        own: Mapping[str, SlurmJob],
        options: SlurmLeaseOptions,
        user: str,
        now: float,
    ) -> AtLimit:
        """Return the result of :func:`at_limit` for the jobs whose limit leases may have
        caused.

        Args:
            pending: pending jobs.
            own: lease id → its job.
            options: options of the leases.
            user: the user of the leases; empty if several users have leases.
            now: epoch seconds.
        """
        waiting = {job.id: limit for job in pending if (limit := _limit_of(job))}
        moved = {limit for job, limit in self._waiting.items() if waiting.get(job) != limit}
        self._since = {
            limit: now if limit in moved else self._since.get(limit, now)
            for limit in waiting.values()
        }
        self._waiting = waiting
        believed = [
            job
            for job in pending
            if job.id in waiting
            and (now - self._since[waiting[job.id]]) % (MAX_YIELD_S + YIELD_PAUSE_S) < MAX_YIELD_S
        ]
        demand = at_limit(believed, own, options, user)
        leaving_by_job = {
            job: self._leases_of_turn(job, leases, own, now)
            for job, leases in demand.needed_leases.items()
        }
        self._turns = {job: turn for job, turn in self._turns.items() if job in waiting}
        return AtLimit(
            demand.hold, {job: leases for job, leases in leaving_by_job.items() if leases}
        )

    def _leases_of_turn(
        self, job: str, leases: list[str], own: Mapping[str, SlurmJob], now: float
    ) -> list[str]:
        """Return the leases that leave for this job now. Those that began to leave for it come
        first.
        """
        turn_at, turn_leases = self._turns.get(job, (now - START_WAIT_S, []))
        running = [
            lease for lease in turn_leases if lease in own and own[lease].state not in ENDED_STATES
        ]
        if not running and now - turn_at < START_WAIT_S:
            return []
        self._turns[job] = (now, running or leases)
        return running or leases


def at_limit(
    pending: Sequence[SlurmJob],
    own: Mapping[str, SlurmJob],
    options: SlurmLeaseOptions,
    user: str,
) -> AtLimit:
    """Return what the waiting jobs of others need from leases.

    Args:
        pending: pending jobs.
        own: lease id → its job.
        options: options of the leases.
        user: the user of the leases; empty if several users have leases.
    """
    running = {
        lease: job
        for lease, job in sorted(own.items())
        if job.state not in ENDED_STATES and job.state not in PENDING_STATES
    }
    demand = AtLimit("", {})
    for job in pending:
        if not demand.hold and _counts(job, user, options.account, options):
            reason = f"job {job.id} waits for {job.reason}, against which leases count"
            demand = demand._replace(hold=reason)
        # Of the slots of a host one is enough: the others leave with it.
        lease_by_job: dict[str, str] = {}
        for lease, lease_job in running.items():
            if _counts(job, lease_job.user, lease_job.account, options):
                lease_by_job.setdefault(_counted_as(lease_job), lease)
        leave = list(lease_by_job.values())[: job.nodes]
        if leave:
            ending = {_counted_as(running[lease]) for lease in leave}
            running = {i: each for i, each in running.items() if _counted_as(each) not in ending}
            demand.needed_leases[job.id] = leave
    return demand


def _counted_as(job: SlurmJob) -> str:
    """Return the job, or the part of a job, that ends when a lease leaves."""
    if job.part is None:
        return job.id
    return job.part.job if kind_of(job.part.node) else job.part.id


def _limit_of(job: SlurmJob) -> tuple[str, ...]:
    """Return the limit at which the job waits: that of a user, or a shared one; empty if it waits
    for no limit.
    """
    reason = job.reason
    if UNRELIEVED_LIMITS.fullmatch(reason):
        return ()
    if OF_USER.fullmatch(reason):
        return (reason, job.account, job.user)
    is_shared = OF_ACCOUNT.fullmatch(reason) or OF_QOS.fullmatch(reason)
    return (reason, job.account) if is_shared else ()


def _counts(job: SlurmJob, user: str, account: str, options: SlurmLeaseOptions) -> bool:
    """Return whether a lease of this user and account (empty: not known) counts against the limit
    at which ``job`` waits. A lease with its own QOS counts against no other QOS.
    """
    reason = job.reason
    if UNRELIEVED_LIMITS.fullmatch(reason):
        return False
    if reason.startswith("QOS") and options.qos:
        return False
    if OF_USER.fullmatch(reason):
        return job.user == user and account in ("", job.account)
    if OF_ACCOUNT.fullmatch(reason) or OF_QOS.fullmatch(reason):
        return account == job.account if account else job.user == user
    return False


TABLE = "scheduler.slurm"
FIELDS_OF_LEASES = ["user", "partition", "defaultqos", "qos", "maxwall"]
FIELDS_OF_USER = {"maxjobs": "MaxJobs", "maxsubmitjobs": "MaxSubmitJobs"}
TRES_OF_USER = {"maxtres": "MaxTRESPerJob"}
FIELDS_OF_ACCOUNT = {"grpjobs": "GrpJobs", "grpsubmitjobs": "GrpSubmitJobs", "grptres": "GrpTRES"}
FIELDS_OF_QOS = {"maxjobsperuser": "MaxJobsPerUser", "maxsubmitjobsperuser": "MaxSubmitJobsPerUser"}
TRES_OF_QOS = {
    "maxtresperuser": "MaxTRESPerUser",
    "maxtresperaccount": "MaxTRESPerAccount",
    "grptres": "GrpTRES",
}
TRES_OF_JOB = {"maxtresperjob": "MaxTRES"}
JOBS_OF_QOS = {"grpjobs": "GrpJobs", "grpsubmitjobs": "GrpSubmitJobs"}
"""Field of ``sacctmgr show`` → name of the limit. These limits count the jobs of all users of a
QOS.
"""
LEASE_RESOURCES = ("node", "cpu", "mem")
"""Resources that every lease uses."""


def limits(
    site: SlurmSite, settings: BatchSettings[SlurmLeaseOptions], commands: Commands
) -> Iterator[Finding]:
    """Yield a finding for each limit against which leases count. There are none if Slurm enforces
    no limits or does not report them.

    Args:
        site: configuration of Slurm.
        settings: settings of the site.
        commands: runs the commands.
    """
    if not _enforced(site):
        return
    account = settings.lease.account or site.association.account
    try:
        account = account or _default_account(commands, settings.user)
        accounts = _with_parents(commands, site, account)
        of_qos = [*FIELDS_OF_QOS, *TRES_OF_QOS, *TRES_OF_JOB, *JOBS_OF_QOS]
        qos = {row["name"]: row for row in _rows(commands, "qos", ["name", *of_qos])}
    except CommandError:
        return
    yield from _limits_of_user(settings, account, accounts.get(account, []))
    for name in _names_of_qos(site, settings):
        yield from _limits_of_qos(settings, name, qos.get(name, {}))
    for name, rows in accounts.items():
        yield from _limits_of_account(settings, account, name, rows)


def _limits_of_user(
    settings: BatchSettings[SlurmLeaseOptions], account: str, rows: Sequence[Mapping[str, str]]
) -> Iterator[Finding]:
    """Yield the findings about the associations of the leases' user, which are among ``rows``: for
    each partition of the leases its own, or else the one for all partitions. If several users have
    leases, about that of their account: users inherit its limits.
    """
    user = settings.owner
    by_partition = {row["partition"]: row for row in rows if row["user"] in (user, user.lower())}
    partitions = settings.lease.partitions or ("",)
    names = [name if name in by_partition else "" for name in partitions]
    for in_partition in dict.fromkeys(names):
        if (row := by_partition.get(in_partition)) is None:
            continue
        of = f"of the association of {user or f'account {account}'}"
        of += f" for partition {in_partition}" if in_partition else ""
        for field, name in FIELDS_OF_USER.items():
            if (limit := row[field]).isdecimal():
                yield from job_limit(
                    "Slurm", f"{name} {of}", int(limit), settings.max_leases_per_user, TABLE
                )
        for field, name in TRES_OF_USER.items():
            if limit := row[field]:
                yield _each(limit, f"{name} {of}")


def _limits_of_qos(
    settings: BatchSettings[SlurmLeaseOptions], qos: str, row: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield the findings about a QOS of the leases."""
    for field, name in FIELDS_OF_QOS.items():
        if (limit := row.get(field, "")).isdecimal():
            named = f"{name} of QOS {qos}"
            yield from job_limit("Slurm", named, int(limit), settings.max_leases_per_user, TABLE)
    for field, name in JOBS_OF_QOS.items():
        if (limit := row.get(field, "")).isdecimal():
            yield _together(f"{limit} jobs", f"{name} of QOS {qos}", limit == "0")
    for field, name in TRES_OF_QOS.items():
        if limit := row.get(field, ""):
            yield _together(limit, f"{name} of QOS {qos}", _takes_none(limit))
    for field, name in TRES_OF_JOB.items():
        if limit := row.get(field, ""):
            yield _each(limit, f"{name} of QOS {qos}")


def _limits_of_account(
    settings: BatchSettings[SlurmLeaseOptions],
    account: str,
    limited: str,
    rows: Sequence[Mapping[str, str]],
) -> Iterator[Finding]:
    """Yield the finding about the limits of the leases' account, or of a parent account.

    Args:
        settings: settings of the site.
        account: account of the leases.
        limited: the account whose limits are in ``rows``.
        rows: associations of that account.
    """
    row = next((row for row in rows if not row["user"]), {})
    limits = [f"{name}={row[field]}" for field, name in FIELDS_OF_ACCOUNT.items() if row.get(field)]
    if not limits:
        return
    is_parent = limited != account
    whose = f"account {limited}" + (f", a parent of {account}" if is_parent else "")
    sentence = f"Leases count against the limits of {whose} ({', '.join(limits)})"
    if not settings.lease.leave_at_limits:
        yield (
            False,
            f"{sentence}, for which Slurm preempts nothing, so jobs of the account would wait for "
            f"leases; set leave_at_limits = true in [{TABLE}], or account to one of their own.",
        )
    elif is_parent:
        yield (
            None,
            f"{sentence}; they leave for jobs of {account} that wait there (leave_at_limits), not "
            f"for those of other accounts below {limited}.",
        )
    else:
        yield True, f"{sentence}; they leave for its jobs that wait there (leave_at_limits)."


def _with_parents(
    commands: Commands, site: SlurmSite, account: str
) -> dict[str, list[dict[str, str]]]:
    """Return account → its associations, for an account and all its parents. Raises
    CommandError.
    """
    fields = ["user", "partition", "parentname"]
    fields += [*FIELDS_OF_USER, *TRES_OF_USER, *FIELDS_OF_ACCOUNT]
    accounts: dict[str, list[dict[str, str]]] = {}
    while account and account not in accounts:
        conditions = f"cluster={site.settings.get('ClusterName', '')}", f"account={account}"
        rows = accounts[account] = _rows(commands, "assoc", fields, *conditions)
        account = next((row["parentname"] for row in rows if not row["user"]), "")
    return accounts


def _names_of_qos(site: SlurmSite, settings: BatchSettings[SlurmLeaseOptions]) -> list[str]:
    """Return the QOS whose limits apply to leases: their own or that of jobs that name none, and
    those of their partitions.
    """
    lease = settings.lease
    of_partitions = (
        site.partitions[name].qos for name in lease.partitions if name in site.partitions
    )
    qos = lease.qos or site.association.qos
    return list(dict.fromkeys(name for name in (qos, *of_partitions) if name))


def _takes_none(tres: str) -> bool:
    """Return whether a limit on resources, such as ``cpu=64,node=0``, allows no lease at all."""
    parts = (part.partition("=") for part in tres.split(","))
    return any(name in LEASE_RESOURCES and value.strip("KMGTP") == "0" for name, _, value in parts)


def _each(limit: str, name: str) -> Finding:
    """Return the finding about a limit on the resources of one job."""
    if _takes_none(limit):
        return no_lease(limit, name, TABLE)
    return (
        True,
        f"A lease has {limit} at most ({name}). On a node with more it waits in Slurm for "
        "start_within and is withdrawn.",
    )


def _together(limit: str, name: str, allows_none: bool) -> Finding:
    """Return the finding about a limit on all leases together."""
    if allows_none:
        return no_lease(limit, name, TABLE)
    return (
        True,
        f"Leases have {limit} at most ({name}). More of them wait in Slurm for start_within and "
        f"are withdrawn; max_leases in [{TABLE}] keeps MalleTrain from requesting them.",
    )


def _default_account(commands: Commands, user: str) -> str:
    """Return the user's default account; empty if sacctmgr names none, or several. Raises
    CommandError.
    """
    words = ["sacctmgr", "-nP", "show", "user", user, "format=defaultaccount"]
    accounts = {line.strip() for line in commands.ask(words).splitlines()} - {""}
    return accounts.pop() if len(accounts) == 1 else ""


def _rows(
    commands: Commands, entity: str, fields: Sequence[str], *conditions: str
) -> list[dict[str, str]]:
    """Return the rows of ``sacctmgr show``, each as field → value. Raises CommandError."""
    words = ["sacctmgr", "-nP", "show", entity, *conditions, f"format={','.join(fields)}"]
    rows = (line.split("|") for line in commands.ask(words).splitlines())
    return [dict(zip(fields, row, strict=False)) for row in rows if len(row) >= len(fields)]
