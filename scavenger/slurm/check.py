"""Tests a live Slurm for ``malletrain check``. Each finding is a sentence that says what to change.

Nothing is submitted (``sbatch --test-only``) and nothing is changed.
:mod:`scavenger.slurm.longest_wait` tests how long a job may wait for a lease.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scavenger.batch.check import preemption_grace
from scavenger.batch.commands import CommandError, Commands
from scavenger.batch.poll_result import Finding
from scavenger.batch.settings import BatchSettings
from scavenger.batch.submission import LeaseSpec
from scavenger.interface import SchedulerError
from scavenger.slurm.check_slots import slot_findings
from scavenger.slurm.job import SlurmLeaseOptions, batch_script, sbatch
from scavenger.slurm.limits import limits, longest_lease, most_memory_mb
from scavenger.slurm.longest_wait import wait_findings
from scavenger.slurm.site import Partition, SlurmSite, clock_findings
from scavenger.slurm.source import SlurmSource

_PARTITION = re.compile(r"\bto start at .* in partition (\S+)")
"""The output of ``sbatch --test-only``."""
MAX_NAMED = 8
"""Maximum number of partitions or QOS that a sentence names."""


@dataclass(frozen=True)
class SlurmCheckInputs:
    """The inputs of the checks."""

    site: SlurmSite
    """Configuration of Slurm."""
    settings: BatchSettings[SlurmLeaseOptions]
    """Settings of the site."""
    grace_s: float
    """Grace time of a preempted lease, seconds."""
    source: SlurmSource
    """How Slurm is read."""
    commands: Commands
    """Runs commands."""


def findings(inputs: SlurmCheckInputs) -> Iterator[Finding]:
    """Yield (works, sentence) for each test; None instead of True: works but needs attention."""
    backfill = inputs.settings.backfill
    by_mode = [_backfill] if backfill else [_preemption, _exempt_priority, _grace]
    for part in (_partitions, _time_limit, _memory, *by_mode):
        yield from part(inputs)
    if not backfill:
        yield from wait_findings(inputs.site, inputs.settings, inputs.grace_s, inputs.commands)
    for part in (_permission, _shape, _gpus, _sight):
        yield from part(inputs)
    yield from slot_findings(inputs.site, inputs.settings, inputs.commands)
    yield from limits(inputs.site, inputs.settings, inputs.commands)


def _partitions(inputs: SlurmCheckInputs) -> Iterator[Finding]:
    names = inputs.settings.lease.partitions
    if not names and not inputs.settings.lease.qos:
        available = ", ".join(sorted(inputs.site.partitions))
        yield (
            False,
            "No partition is named for the leases; set partition in [scheduler.slurm] to one "
            f"of {available}, or set qos.",
        )
    for name in names:
        partition = inputs.site.partitions.get(name)
        if partition is None:
            available = ", ".join(sorted(inputs.site.partitions)) or "none"
            yield (
                False,
                f"Slurm has no partition {name}; set partition in [scheduler.slurm] to one of "
                f"those it has: {available}.",
            )
        elif not partition.up:
            yield (
                False,
                f"Partition {name} is not up; run: scontrol update PartitionName={name} State=UP",
            )
        else:
            count = len(partition.nodes)
            yield True, f"Partition {name} is up and has {count} node{'s' * (count != 1)}."
            if partition.exclusive_topo:
                yield (
                    False,
                    f"A lease would block all other nodes of its topology block for other jobs "
                    f"({partition.exclusive_topo} of partition {name}); set "
                    f"{partition.exclusive_topo.partition('=')[0]}=NO for it.",
                )
    if inputs.site.federation:
        yield (
            True,
            f"The cluster belongs to federation {inputs.site.federation}. Leases are submitted to "
            f"{inputs.site.cluster} alone (sbatch --clusters), and only its nodes and jobs are "
            "read.",
        )


def _time_limit(inputs: SlurmCheckInputs) -> Iterator[Finding]:
    s = inputs.settings
    longest_s, by = longest_lease(inputs.site, s.lease)
    if longest_s is None or longest_s >= s.time_limit_s:
        return
    if longest_s < min(s.min_length_s, s.time_limit_s):
        yield (
            False,
            f"Slurm takes jobs of {longest_s:g} s at most where leases run ({by}), and the "
            f"shortest lease has {s.min_length_s:g} s: none could start. Raise that limit, or "
            "lower time_min and min_lease in [scheduler.slurm].",
        )
    else:
        yield (
            True,
            f"Leases end after {longest_s:g} s at most ({by}), sooner than time_limit "
            f"({s.time_limit_s:g} s) says.",
        )


def _memory(inputs: SlurmCheckInputs) -> Iterator[Finding]:
    lease = inputs.settings.lease
    if lease.exclusive and (most := most_memory_mb(inputs.site, lease)):
        yield (
            True,
            f"Leases have {most:,} MB of a node's memory at most (MaxMemPerNode of their "
            "partition).",
        )


def _preemption(inputs: SlurmCheckInputs) -> Iterator[Finding]:
    instead = (
        'or set mode = "backfill" in [scheduler.slurm] for leases that end before the '
        "nodes are wanted"
    )
    if inputs.site.preempt_type in ("none", ""):
        yield (
            False,
            (
                "Slurm preempts no jobs (PreemptType is none), so leases would keep others "
                "waiting; in slurm.conf set "
                f"PreemptType=preempt/partition_prio and PreemptMode=REQUEUE, {instead}."
            ),
        )
        return
    if inputs.site.preempt_type == "qos":
        yield from _preempting_qos(inputs)
        return
    for name in inputs.settings.lease.partitions:
        partition = inputs.site.partitions.get(name)
        if partition is None:
            continue
        mode = inputs.site.preempt_mode_of(name).upper()
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
        elif not (above := _above(inputs.site, partition)):
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
            where = [p for p in above if inputs.site.preempts_by_priority(p)]
            yield from _by_priority(where, inputs.settings.lease.nice)
            yield from _not_above(inputs, partition)


def _by_priority(preemptors: Sequence[str], nice: int) -> Iterator[Finding]:
    if not preemptors:
        return
    sentence = (
        f"Jobs of {', '.join(preemptors)} preempt a lease only if its priority is not higher than "
        "theirs (PreemptMode=PRIORITY)"
    )
    if nice > 0:
        yield True, f"{sentence}; leases have nice = {nice}, which has to be enough for that."
    else:
        yield (
            False,
            f"{sentence}, so that a lease can keep a job waiting; remove PRIORITY from "
            "PreemptMode in slurm.conf, or set nice in [scheduler.slurm] so high that the priority "
            "of leases is below that of all other jobs.",
        )


def _exempt_priority(inputs: SlurmCheckInputs) -> Iterator[Finding]:
    """Check whether Slurm preempts leases whatever their priority."""
    most = inputs.site.max_preempted_priority
    if most is None:
        return
    nice = inputs.settings.lease.nice
    sentence = (
        f"Slurm does not preempt jobs whose priority is above {most} "
        f"(PreemptParameters=min_exempt_priority={most})"
    )
    if nice > 0:
        yield True, f"{sentence}; leases have nice = {nice}, which has to keep theirs below that."
    else:
        yield (
            False,
            f"{sentence}, so that a lease can keep a job waiting; remove min_exempt_priority from "
            "slurm.conf, or set nice in [scheduler.slurm] so high that the priority of leases is "
            "below it.",
        )


def _above(site: SlurmSite, lease: Partition) -> list[str]:
    return sorted(
        p.name
        for p in site.partitions.values()
        if p.tier > lease.tier and not p.nodes.isdisjoint(lease.nodes)
    )


def _not_above(inputs: SlurmCheckInputs, lease: Partition) -> Iterator[Finding]:
    """Name the partitions whose jobs wait for leases, and those whose jobs leases preempt."""
    beside = sorted(
        (
            p
            for p in inputs.site.partitions.values()
            if p.up
            and p.tier <= lease.tier
            and p.name not in inputs.settings.lease.partitions
            and not p.nodes.isdisjoint(lease.nodes)
        ),
        key=lambda p: p.name,
    )
    if beside:
        yield (
            None,
            f"Jobs of {_listed([p.name for p in beside])} share nodes with {lease.name} and do not "
            f"preempt leases: their PriorityTier is not above {lease.tier}, that of {lease.name}. "
            "They wait until a lease ends, for as long as time_limit in [scheduler.slurm] "
            f"({inputs.settings.time_limit_s:g} s). Give these partitions a higher PriorityTier, "
            "unless their jobs may wait.",
        )
    preempted = [
        p.name
        for p in beside
        if p.tier < lease.tier and inputs.site.preempt_mode_of(p.name).upper() != "OFF"
    ]
    if preempted:
        yield (
            None,
            f"Leases preempt jobs of {_listed(preempted)}, whose PriorityTier is below "
            f"{lease.tier}, that of {lease.name}; give {lease.name} the lowest PriorityTier.",
        )


def _listed(names: Sequence[str]) -> str:
    """Return names for a sentence, MAX_NAMED of them."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _preempting_qos(inputs: SlurmCheckInputs) -> Iterator[Finding]:
    qos = inputs.settings.lease.qos
    if not qos:
        sentence = (
            "Slurm preempts by QOS (PreemptType=preempt/qos), and no QOS is named; set "
            "qos in [scheduler.slurm] to one "
        )
        yield False, sentence + "that others preempt."
        return
    try:
        printed = inputs.commands.ask(
            ["sacctmgr", "-nP", "show", "qos", "format=name,preempt,preemptmode"]
        )
    except CommandError as error:
        yield False, f"Slurm's QOS cannot be read: {error}"
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
        everywhere = "PRIORITY" in inputs.site.preempt_mode.upper().split(",")
        where = [
            f"QOS {row[0]}"
            for row in rows
            if row[0] in above and (everywhere or "priority" in row[2].lower().split(","))
        ]
        yield from _by_priority(where, inputs.settings.lease.nice)
        if others := [row[0] for row in rows if row[0] not in (qos, *above)]:
            yield (
                None,
                f"Jobs of QOS {_listed(others)} do not preempt leases. On nodes where they may run "
                "they wait until a lease ends, for as long as time_limit in [scheduler.slurm] "
                f"({inputs.settings.time_limit_s:g} s). Run sacctmgr modify qos NAME set "
                f"Preempt+={qos} for these QOS, unless their jobs may wait.",
            )


def _grace(inputs: SlurmCheckInputs) -> Iterator[Finding]:
    needed_s = inputs.settings.needed_grace_s
    where = (
        f"partition {name}"
        if (name := inputs.settings.lease.main_partition)
        else f"QOS {inputs.settings.lease.qos}"
    )
    remedy = f"set GraceTime={needed_s:.0f} for {where} in Slurm"
    yield preemption_grace(inputs.grace_s, needed_s, remedy)
    if inputs.site.user_signal:
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


def _backfill(inputs: SlurmCheckInputs) -> Iterator[Finding]:
    if inputs.site.backfill_cycle_s is None:
        yield (
            False,
            'mode = "backfill" needs SchedulerType=sched/backfill in slurm.conf; Slurm has '
            "another.",
        )
    else:
        yield (
            True,
            f"The backfill scheduler runs every {inputs.site.backfill_cycle_s:.3g} s; leases end "
            "before the next known use of their node.",
        )


def _permission(inputs: SlurmCheckInputs) -> Iterator[Finding]:
    """Test the submission of a lease, to any node."""
    s = inputs.settings
    try:
        script = batch_script(s.template, ["true"], {}, False)
    except SchedulerError as error:
        yield False, str(error)
        return
    spec = LeaseSpec(
        s.prefix + "check",
        "any",
        (),
        {},
        s.min_length_s,
        inputs.grace_s,
        None,
        slot=s.slots[0] if s.slots else None,
    )
    argv = [
        word
        for word in sbatch(
            s, spec, False, most_memory_mb(inputs.site, s.lease), inputs.site.cluster
        )
        if not word.startswith(("--nodelist=", "--deadline="))
    ]
    try:
        result = inputs.commands.run([*argv, "--test-only"], stdin=script)
    except CommandError as error:
        yield False, str(error)
        return
    other = _PARTITION.search(result.stderr)
    partitions = s.lease.partitions
    if result.status == 0 and other and partitions and other[1] not in partitions:
        configured = ", ".join(partitions)
        yield (
            False,
            f"A lease for {configured} would run in partition {other[1]} (sbatch --test-only), "
            "whose jobs may not be preempted in the same way: a job_submit plugin moves it. Exempt "
            f"leases (jobs named {s.prefix}…) from that rule, or set partition in "
            "[scheduler.slurm] to where leases may run. MalleTrain ends leases elsewhere.",
        )
    elif result.status == 0:
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


def _shape(inputs: SlurmCheckInputs) -> Iterator[Finding]:
    """Check the settings for leases that share a job."""
    s, site = inputs.settings, inputs.site
    if s.shape == "array":
        if site.array_size < 3:
            yield (
                False,
                f"Slurm takes no job arrays (MaxArraySize={site.array_size}); set lease_shape in "
                '[scheduler.slurm] to "single" or "block", or MaxArraySize in slurm.conf.',
            )
        elif not s.lease.exclusive:
            yield (
                False,
                "Two tasks of a job array may come to one node where leases do not take whole "
                'nodes; set exclusive = true in [scheduler.slurm], or lease_shape = "single".',
            )
        else:
            most = min(s.shared_by, site.array_size)
            yield True, f"Leases that are requested together share a job array, {most} at most."
    elif s.shape == "block":
        whole = "" if inputs.settings.backfill else "; a preemption takes all of them at once"
        yield (
            True,
            f"Leases that are requested together are nodes of one job, {s.shared_by} at most"
            f"{whole}. They are given back one by one (scontrol update NodeList), the first last.",
        )


def _gpus(inputs: SlurmCheckInputs) -> Iterator[Finding]:
    """Check whether leases would leave GPUs unused."""
    lease = inputs.settings.lease
    if inputs.settings.slots or any("gpu" in word for word in (lease.gres, *lease.options)):
        return
    try:
        table, _, _ = inputs.source.read(inputs.settings.prefix)
    except SchedulerError:
        return  # _polls reports it
    named = set(inputs.settings.lease.partitions)
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


def _sight(inputs: SlurmCheckInputs) -> Iterator[Finding]:
    cycle = inputs.site.backfill_cycle_s
    if inputs.settings.idle_for_s is None and cycle is not None:
        yield True, f"A node is a gap when it was idle for one backfill cycle, here {cycle:.3g} s."
    yield from _polls(inputs)
    yield from clock_findings(inputs.site.clock_ahead_s)
    if "reservations" in inputs.site.hidden and not _is_operator(inputs):
        yield (
            False,
            "PrivateData=reservations hides reservations from users who are no operators, so that "
            "maintenance would not be seen and leases would stand in its way; let an operator's "
            f"account run the daemon (sacctmgr modify user {inputs.settings.user} set "
            "adminlevel=operator), or take reservations out of PrivateData.",
        )
    if "jobs" in inputs.site.hidden:
        # Operators see everything. Only the jobs that squeue omits show whether this user is one.
        yield (
            not inputs.settings.backfill,
            (
                "PrivateData=jobs hides the jobs of others from users who are no operators, so "
                "it may not be known when a waiting job is "
                "expected to start; let an operator's account run the daemon"
                + ("." if inputs.settings.backfill else ", or rely on preemption.")
            ),
        )


def _polls(inputs: SlurmCheckInputs) -> Iterator[Finding]:
    """Make the requests of a poll as the daemon makes them."""
    try:
        table, _, _ = inputs.source.read(inputs.settings.prefix)
    except SchedulerError as error:
        hidden = inputs.site.hidden & {"nodes", "reservations", "jobs"}
        why = (
            f" PrivateData={','.join(sorted(hidden))} hides them from users who are no operators: "
            "let an operator's account run the daemon (sacctmgr modify user "
            f"{inputs.settings.user} set adminlevel=operator), or take that out of PrivateData."
        )
        yield False, f"The polls of the daemon fail: {error}{why * bool(hidden)}"
    else:
        yield True, f"A poll sees {len(table.nodes)} node{'s' * (len(table.nodes) != 1)}."


def _is_operator(inputs: SlurmCheckInputs) -> bool:
    """Return whether Slurm hides nothing from the daemon's user."""
    user = inputs.settings.user
    if user in ("root", inputs.site.settings.get("SlurmUser", "").partition("(")[0]):
        return True
    try:
        words = ["sacctmgr", "-nP", "show", "user", user, "format=adminlevel"]
        return inputs.commands.ask(words).strip().lower().startswith(("operator", "admin"))
    except CommandError:
        return False
