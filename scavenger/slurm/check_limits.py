"""Tests for ``malletrain check`` whether limits of associations and QOS leave room for leases in
addition to the users' other jobs. Asks a running Slurm and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from scavenger.batch.commands import CommandError, Commands
from scavenger.batch.limits import job_limit
from scavenger.batch.look import Finding
from scavenger.batch.settings import BatchSettings
from scavenger.slurm.job import SlurmLeaseOptions
from scavenger.slurm.site import SlurmSite

TABLE = "scheduler.slurm"
OF_USER = {"maxjobs": "MaxJobs", "maxsubmitjobs": "MaxSubmitJobs"}
OF_ACCOUNT = {"grpjobs": "GrpJobs", "grpsubmitjobs": "GrpSubmitJobs", "grptres": "GrpTRES"}
OF_QOS = {"maxjobsperuser": "MaxJobsPerUser", "maxsubmitjobsperuser": "MaxSubmitJobsPerUser"}
TRES_OF_QOS = {
    "maxtresperuser": "MaxTRESPerUser",
    "maxtresperaccount": "MaxTRESPerAccount",
    "grptres": "GrpTRES",
    "maxtresperjob": "MaxTRES",
}
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
    """
    if "limits" not in site.settings.get("AccountingStorageEnforce", "").lower():
        return
    cluster, lease, ours = site.settings.get("ClusterName", ""), settings.lease, settings
    try:
        account = lease.account or _default_account(commands, settings.user)
        rows = _show(
            commands, "assoc", [*OF_USER, *OF_ACCOUNT], f"cluster={cluster}", f"account={account}"
        )
        of_qos = [*OF_QOS, *TRES_OF_QOS, *JOBS_OF_QOS]
        qos = _show(commands, "qos", of_qos) if _names_of_qos(site, settings) else {}
    except CommandError:
        return
    of_user = rows.get(settings.user, {})
    for field, name in OF_USER.items():
        if (limit := of_user.get(field, "")).isdecimal():
            named = f"{name} of the association of {settings.user}"
            yield from job_limit("Slurm", named, int(limit), ours.max_leases_per_user, TABLE)
    for called in _names_of_qos(site, settings):
        row = qos.get(called, {})
        for field, name in OF_QOS.items():
            if (limit := row.get(field, "")).isdecimal():
                named = f"{name} of QOS {called}"
                yield from job_limit("Slurm", named, int(limit), ours.max_leases_per_user, TABLE)
        for field, name in JOBS_OF_QOS.items():
            if (limit := row.get(field, "")).isdecimal():
                yield _together(f"{limit} jobs", f"{name} of QOS {called}", limit == "0")
        for field, name in TRES_OF_QOS.items():
            if limit := row.get(field, ""):
                yield _together(limit, f"{name} of QOS {called}", _takes_none(limit))
    account_limits = [
        f"{name}={value}"
        for field, name in OF_ACCOUNT.items()
        if (value := rows.get("", {}).get(field, ""))
    ]
    if not account_limits:
        return
    shown = ", ".join(account_limits)
    sentence = f"Leases count against the limits of account {account} ({shown})"
    if lease.leave_at_limits:
        yield True, f"{sentence}; they leave for its jobs that wait there (leave_at_limits)."
    else:
        yield (
            False,
            f"{sentence}, for which Slurm preempts nothing, so jobs of the account would wait for "
            f"leases; set leave_at_limits = true in [{TABLE}], or account to one of their own.",
        )


def _names_of_qos(site: SlurmSite, settings: BatchSettings[SlurmLeaseOptions]) -> list[str]:
    """Return the QOS whose limits apply to leases: their own, and those of their partitions."""
    lease = settings.lease
    of_partitions = (
        site.partitions[name].qos for name in lease.partitions if name in site.partitions
    )
    return list(dict.fromkeys(name for name in (lease.qos, *of_partitions) if name))


def _takes_none(tres: str) -> bool:
    """Return whether a limit on resources, such as ``cpu=64,node=0``, allows no lease at all."""
    parts = (part.partition("=") for part in tres.split(","))
    return any(name in LEASE_RESOURCES and value.strip("KMGTP") == "0" for name, _, value in parts)


def _together(limit: str, name: str, allows_none: bool) -> Finding:
    if allows_none:
        return (
            False,
            f"{name} is {limit}, so that no lease can start; raise it, or name another QOS.",
        )
    return (
        True,
        f"Leases have {limit} at most ({name}). More of them wait in Slurm for start_within and "
        f"are withdrawn; max_leases in [{TABLE}] keeps them from being asked for.",
    )


def _default_account(commands: Commands, user: str) -> str:
    words = ["sacctmgr", "-nP", "show", "user", user, "format=defaultaccount"]
    return commands.ask(words).strip()


def _show(
    commands: Commands, entity: str, fields: list[str], *conditions: str
) -> dict[str, dict[str, str]]:
    """Return name → field → value. The name is a QOS, or the user of an association (empty: the
    account itself).
    """
    key = "user" if entity == "assoc" else "name"
    words = ["sacctmgr", "-nP", "show", entity, *conditions, f"format={','.join([key, *fields])}"]
    rows = [line.split("|") for line in commands.ask(words).splitlines() if "|" in line]
    return {row[0]: dict(zip(fields, row[1:], strict=False)) for row in rows}
