"""Whether a Slurm will do, tested live: for ``malletrain check``. Every finding is a sentence that
says what to change.

Nothing is submitted (``sbatch --test-only``) and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from scavenger.batch.commands import CommandError
from scavenger.batch.submission import Wanted
from scavenger.interface import SchedulerError
from scavenger.slurm.job import batch_script, sbatch
from scavenger.slurm.site import Partition, SlurmSite

if TYPE_CHECKING:
    from scavenger.slurm.scavenger import SlurmScavenger

OLDEST = (20, 11)
Finding = tuple[bool, str]


def check(scavenger: SlurmScavenger) -> list[Finding]:
    """(works, sentence) per thing tested."""
    try:
        site = scavenger.known_site()
    except SchedulerError as error:
        return [
            (
                False,
                f"Slurm cannot be asked: {error} Run MalleTrain where sinfo works (SLURM_CONF "
                "may name its configuration).",
            )
        ]
    found = list(_version(site, scavenger))
    if not found[0][0]:
        return found
    found += _partitions(site, scavenger)
    if scavenger.settings.backfill:
        found += _backfill(site)
    else:
        found += _preemption(site, scavenger)
        found += _grace(site, scavenger)
    found += _permission(scavenger, site)
    found += _gpus(scavenger)
    found += _sight(site, scavenger)
    return found


def _version(site: SlurmSite, scavenger: SlurmScavenger) -> Iterator[Finding]:
    shown = ".".join(f"{part:02d}" for part in site.version)
    cluster = site.settings.get("ClusterName", "?")
    if site.version < OLDEST:
        yield (
            False,
            f"Slurm {shown} is older than {OLDEST[0]}.{OLDEST[1]:02d}, the oldest that "
            "MalleTrain supports; update Slurm.",
        )
        return
    yield (
        True,
        f"Slurm {shown} (cluster {cluster}) answers; it is asked through {scavenger.source.name}.",
    )


def _partitions(site: SlurmSite, scavenger: SlurmScavenger) -> Iterator[Finding]:
    names = scavenger.settings.lease.partitions
    if not names and not scavenger.settings.lease.qos:
        known = ", ".join(sorted(site.partitions))
        yield (
            False,
            "No partition is named for the leases; set partition in [scheduler.slurm] to one "
            f"of {known}, or set qos.",
        )
    for name in names:
        partition = site.partitions.get(name)
        if partition is None:
            known = ", ".join(sorted(site.partitions)) or "none"
            yield (
                False,
                f"Slurm has no partition {name}; set partition in [scheduler.slurm] to one of "
                f"those it has: {known}.",
            )
        elif not partition.up:
            yield (
                False,
                f"Partition {name} is not up; run: scontrol update PartitionName={name} State=UP",
            )
        else:
            yield True, f"Partition {name} is up and has {len(partition.nodes)} nodes."


def _preemption(site: SlurmSite, scavenger: SlurmScavenger) -> Iterator[Finding]:
    instead = (
        'or set mode = "backfill" in [scheduler.slurm] for leases that end before the '
        "nodes are wanted"
    )
    if site.preempt_type in ("none", ""):
        yield (
            False,
            (
                "Slurm preempts no jobs (PreemptType is none), so leases would keep others "
                "waiting; in slurm.conf set "
                f"PreemptType=preempt/partition_prio and PreemptMode=REQUEUE, {instead}."
            ),
        )
        return
    if site.preempt_type == "qos":
        yield from _preempting_qos(site, scavenger)
        return
    for name in scavenger.settings.lease.partitions:
        partition = site.partitions.get(name)
        if partition is None:
            continue
        mode = site.preempt_mode_of(name).upper()
        if mode == "OFF":
            yield (
                False,
                f"Jobs of partition {name} are never preempted (PreemptMode=OFF); set "
                f"PreemptMode=CANCEL for it, {instead}.",
            )
        elif "SUSPEND" in mode:
            yield (
                False,
                (
                    f"Preempted jobs of partition {name} are suspended and keep their memory "
                    f"(PreemptMode={mode}); set PreemptMode=CANCEL "
                    "for it."
                ),
            )
        elif not (above := _above(site, partition)):
            yield (
                False,
                (
                    f"No partition that shares nodes with {name} has a higher PriorityTier than "
                    f"its {partition.tier}, so nobody can preempt "
                    "the leases; give the partitions of the main jobs a higher PriorityTier."
                ),
            )
        else:
            yield True, f"Jobs of {', '.join(above)} preempt those of {name} (PreemptMode={mode})."


def _above(site: SlurmSite, lease: Partition) -> list[str]:
    return sorted(
        p.name
        for p in site.partitions.values()
        if p.tier > lease.tier and not p.nodes.isdisjoint(lease.nodes)
    )


def _preempting_qos(site: SlurmSite, scavenger: SlurmScavenger) -> Iterator[Finding]:
    qos = scavenger.settings.lease.qos
    if not qos:
        sentence = (
            "Slurm preempts by QOS (PreemptType=preempt/qos), and no QOS is named; set "
            "qos in [scheduler.slurm] to one "
        )
        yield False, sentence + "that others preempt."
        return
    try:
        printed = scavenger.commands.ask(
            ["sacctmgr", "-nP", "show", "qos", "format=name,preempt,preemptmode"]
        )
    except CommandError as error:
        yield False, f"Slurm's QOS cannot be asked for: {error}"
        return
    rows = [line.split("|") for line in printed.splitlines() if line.count("|") >= 2]
    mode = next((row[2] for row in rows if row[0] == qos), None)
    above = [row[0] for row in rows if qos in row[1].split(",")]
    if mode is None:
        yield False, f"Slurm has no QOS {qos}; it has {', '.join(row[0] for row in rows)}."
    elif not above:
        yield (
            False,
            f"No QOS preempts {qos}; run: sacctmgr modify qos NAME set Preempt+={qos}, for the "
            "QOS of the main jobs.",
        )
    else:
        yield True, f"Jobs of QOS {', '.join(above)} preempt those of {qos} (PreemptMode={mode})."


def _grace(site: SlurmSite, scavenger: SlurmScavenger) -> Iterator[Finding]:
    wanted = scavenger.settings.wanted_grace_s
    grace = scavenger.grace_s(site)
    where = (
        f"partition {name}"
        if (name := scavenger.settings.lease.main_partition)
        else f"QOS {scavenger.settings.lease.qos}"
    )
    if grace < wanted:
        yield (
            False,
            (
                f"A preempted lease has {grace:g} s until it is killed, too short to take a "
                f"snapshot and leave in order ({wanted:g} s with "
                f"drain_timeout and stop_grace of [jobs]); set GraceTime={wanted:.0f} for "
                f"{where} in Slurm, or make those shorter."
            ),
        )
    else:
        yield (
            True,
            f"A preempted lease has {grace:g} s to leave; jobs need {wanted:g} s at most to "
            "take a snapshot and stop.",
        )
    if site.user_signal:
        yield True, "Preemption signals the agent at once (preempt_send_user_signal)."
    else:
        yield (
            True,
            (
                "Slurm's configuration lacks SlurmctldParameters=preempt_send_user_signal, so "
                "agents run as a job step (srun) to be told of a "
                "preemption at once; with it they would need no srun."
            ),
        )


def _backfill(site: SlurmSite) -> Iterator[Finding]:
    if site.backfill_cycle_s is None:
        yield (
            False,
            'mode = "backfill" needs SchedulerType=sched/backfill in slurm.conf; Slurm has '
            "another.",
        )
    else:
        yield (
            True,
            f"The backfill scheduler runs every {site.backfill_cycle_s:.3g} s; leases end "
            "before the next known use of their node.",
        )


def _permission(scavenger: SlurmScavenger, site: SlurmSite) -> Iterator[Finding]:
    """As a lease would be submitted, but to any node."""
    s = scavenger.settings
    try:
        script = batch_script(s.template, ["true"], {}, False)
    except SchedulerError as error:
        yield False, str(error)
        return
    wanted = Wanted(s.prefix + "check", "any", (), {}, s.least_s, scavenger.grace_s(site), None)
    argv = [
        word
        for word in sbatch(s, wanted, False)
        if not word.startswith(("--nodelist=", "--deadline="))
    ]
    try:
        result = scavenger.commands.run([*argv, "--test-only"], stdin=script)
    except CommandError as error:
        yield False, str(error)
        return
    if result.status == 0:
        yield True, "A lease could be submitted (sbatch --test-only)."
    else:
        yield (
            False,
            (
                f"A lease could not be submitted: {result.complaint} Change partition, qos, "
                "account, constraint, gres or options in "
                "[scheduler.slurm], or ask for the permission."
            ),
        )


def _gpus(scavenger: SlurmScavenger) -> Iterator[Finding]:
    """GPUs that leases would leave unused."""
    lease = scavenger.settings.lease
    if any("gpu" in word for word in (lease.gres, *lease.options)):
        return
    try:
        table, _, _ = scavenger.source.read(scavenger.settings.prefix)
    except SchedulerError as error:
        yield False, str(error)
        return
    named = set(scavenger.settings.lease.partitions)
    with_gpus = {
        name: group.gres.split("(")[0] for name, group in table.nodes.items() if "gpu" in group.gres
    }
    kinds = {
        gres
        for name, gres in with_gpus.items()
        if not named or not named.isdisjoint(table.partitions[name])
    }
    if kinds:
        yield (
            True,
            (
                f"Nodes have GPUs ({', '.join(sorted(kinds))}) and leases ask for none, so jobs "
                "may see none; if they should, set gres "
                'in [scheduler.slurm], such as gres = "gpu:4".'
            ),
        )


def _sight(site: SlurmSite, scavenger: SlurmScavenger) -> Iterator[Finding]:
    cycle = site.backfill_cycle_s
    if scavenger.settings.idle_for_s is None and cycle is not None:
        yield True, f"A node is a gap when it was idle for one backfill cycle, here {cycle:.3g} s."
    if "jobs" in site.hidden:
        # Operators see everything; whether this user is one shows only in what squeue leaves out.
        yield (
            not scavenger.settings.backfill,
            (
                "PrivateData=jobs hides the jobs of others from users who are no operators, so "
                "it may not be known when a waiting job is "
                "expected to start; let an operator's account run the daemon"
                + ("." if scavenger.settings.backfill else ", or rely on preemption.")
            ),
        )
