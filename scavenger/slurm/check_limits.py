"""Whether limits of associations and QOS leave room for leases beside the users' other jobs, asked
of a running Slurm: for ``malletrain check``. Nothing is changed.
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
"""Fields of ``sacctmgr show`` and the names of the limits, by whose jobs they count."""


def limits(
    site: SlurmSite, settings: BatchSettings[SlurmLeaseOptions], commands: Commands
) -> Iterator[Finding]:
    """A finding for each limit against which leases count. None where Slurm enforces none, or does
    not say.
    """
    if "limits" not in site.settings.get("AccountingStorageEnforce", "").lower():
        return
    cluster, lease, ours = site.settings.get("ClusterName", ""), settings.lease, settings
    try:
        account = lease.account or _default_account(commands, settings.user)
        rows = _show(
            commands, "assoc", [*OF_USER, *OF_ACCOUNT], f"cluster={cluster}", f"account={account}"
        )
        qos = _show(commands, "qos", [*OF_QOS], f"name={lease.qos}") if lease.qos else {}
    except CommandError:
        return
    of_user = rows.get(settings.user, {})
    for field, name in OF_USER.items():
        if (most := of_user.get(field, "")).isdecimal():
            named = f"{name} of the association of {settings.user}"
            yield from job_limit("Slurm", named, int(most), ours.max_leases_per_user, TABLE)
    for field, name in OF_QOS.items():
        if (most := qos.get(lease.qos, {}).get(field, "")).isdecimal():
            named = f"{name} of QOS {lease.qos}"
            yield from job_limit("Slurm", named, int(most), ours.max_leases_per_user, TABLE)
    shared = [
        f"{name}={value}"
        for field, name in OF_ACCOUNT.items()
        if (value := rows.get("", {}).get(field, ""))
    ]
    if not shared:
        return
    what = f"Leases count against the limits of account {account} ({', '.join(shared)})"
    if lease.leave_at_limits:
        yield True, f"{what}; they leave for its jobs that wait there (leave_at_limits)."
    else:
        yield (
            False,
            f"{what}, for which Slurm preempts nothing, so jobs of the account would wait for "
            f"leases; set leave_at_limits = true in [{TABLE}], or account to one of their own.",
        )


def _default_account(commands: Commands, user: str) -> str:
    words = ["sacctmgr", "-nP", "show", "user", user, "format=defaultaccount"]
    return commands.ask(words).strip()


def _show(
    commands: Commands, what: str, fields: list[str], *where: str
) -> dict[str, dict[str, str]]:
    """Name (the user of an association, empty: the account itself; the QOS) → field → value."""
    key = "user" if what == "assoc" else "name"
    words = ["sacctmgr", "-nP", "show", what, *where, f"format={','.join([key, *fields])}"]
    rows = [line.split("|") for line in commands.ask(words).splitlines() if "|" in line]
    return {row[0]: dict(zip(fields, row[1:], strict=False)) for row in rows}
