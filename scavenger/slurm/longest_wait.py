"""The longest time that a job of the main scheduler waits because a lease has its nodes.

Decides which times add up. By Slurm's preempt_select_promiscuous, a lease cannot be preempted
during its exempt time. A preempted lease then has GraceTime, SIGTERM, and SIGKILL after KillWait.
While a job is completing, Slurm starts no other for CompleteWait. The waiting job is reconsidered
at least once per backfill cycle. See slurm.conf(5), PreemptExemptTime, GraceTime, KillWait,
CompleteWait, bf_interval.

Programs of the site that run when a lease ends (Epilog), and processes that SIGKILL does not end,
have no such number: :func:`wait_findings` names them beside the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from scavenger.batch.commands import CommandError, Commands
from scavenger.batch.poll_result import Finding
from scavenger.batch.settings import BatchSettings
from scavenger.slurm.job import SlurmLeaseOptions
from scavenger.slurm.parse import read_duration
from scavenger.slurm.site import DEFAULT_QOS, SlurmSite

CLUSTER = "PreemptExemptTime"
HETEROGENEOUS_DELAY_S = 30.0
"""Time for which Slurm puts off a component of a heterogeneous job (reason ``BeginTime``) if its
nodes are not free yet when it first could start; measured with Slurm 22.05, also without leases.
"""


@dataclass(frozen=True)
class LongestWait:
    """The parts of the longest wait, seconds."""

    exempt_s: float
    """Time after its start in which a lease cannot be preempted."""
    exempt_by: str
    """The setting from which ``exempt_s`` comes."""
    grace_s: float
    """Time from the notice of a preemption to SIGTERM."""
    kill_wait_s: float
    """Time from SIGTERM to SIGKILL, if the lease has not ended by itself."""
    cycle_s: float
    """Maximum time until Slurm considers the job again."""
    complete_wait_s: float
    """Time in which Slurm starts no job while another is completing."""

    @property
    def seconds(self) -> float:
        """The sum of all parts."""
        return self.exempt_s + self.grace_s + self.kill_wait_s + self.cycle_s + self.complete_wait_s


def longest_wait(
    site: SlurmSite, partition: str, qos: str, exempt_of: Mapping[str, float | None]
) -> LongestWait:
    """Return the longest wait for a lease.

    Args:
        site: the Slurm site.
        partition: partition of the leases; empty if it is not set.
        qos: QOS of the leases; empty if it is not set, so that Slurm chooses it. If it is not
            known which, that is DEFAULT_QOS.
        exempt_of: QOS → its PreemptExemptTime, seconds; None if it is not set. A set value takes
            precedence over that of the cluster.
    """
    configured = site.partitions.get(partition)
    of_partition = configured.qos if configured is not None else ""
    of_lease = qos or site.association.qos or DEFAULT_QOS
    named = [name for name in (of_partition, of_lease) if name]
    by_qos = {n: s for n in named if (s := exempt_of.get(n)) is not None}
    if by_qos:
        name = max(by_qos, key=lambda n: by_qos[n])
        exempt_s, exempt_by = by_qos[name], f"{CLUSTER} of QOS {name}"
    else:
        # A time of -1 (UNLIMITED, INFINITE) means 0.
        exempt_s, exempt_by = read_duration(site.settings.get(CLUSTER, "")) or 0.0, CLUSTER
    grace_s = configured.grace_s if configured is not None else 0.0
    return LongestWait(
        exempt_s,
        exempt_by,
        grace_s,
        site.kill_wait_s,
        site.backfill_cycle_s or 0.0,
        site.complete_wait_s,
    )


def exempt_times(commands: Commands, site: SlurmSite) -> dict[str, float | None]:
    """Return QOS → its PreemptExemptTime, seconds; None if it is not set. Empty if Slurm has no
    accounting or does not report it.
    """
    if not site.has_slurmdbd:
        return {}
    try:
        printed = commands.ask(["sacctmgr", "-nP", "show", "qos", "format=name,preemptexempttime"])
    except CommandError:
        return {}
    rows = [line.split("|") for line in printed.splitlines() if "|" in line]
    return {row[0]: read_duration(row[1]) if row[1] else None for row in rows}


def wait_findings(
    site: SlurmSite,
    settings: BatchSettings[SlurmLeaseOptions],
    grace_s: float,
    commands: Commands,
) -> Iterator[Finding]:
    """Yield (works, sentence) about the longest wait for a lease, and about what adds to it.

    Args:
        site: configuration of Slurm.
        settings: settings of the site.
        grace_s: grace time of a preempted lease, seconds.
        commands: runs commands.
    """
    lease = settings.lease
    exempt_of = exempt_times(commands, site)
    waits = [
        replace(w, grace_s=max(w.grace_s, grace_s))
        for w in (longest_wait(site, n, lease.qos, exempt_of) for n in lease.partitions or ("",))
    ]
    wait = max(waits, key=lambda each: each.seconds)
    parts = (
        f"{wait.grace_s:g} s of grace, {wait.kill_wait_s:g} s of KillWait for a lease that does "
        f"not end by itself, {wait.cycle_s:.3g} s until Slurm looks again"
    )
    if wait.complete_wait_s > 0:
        parts += f", {wait.complete_wait_s:g} s of CompleteWait"
    if wait.exempt_s > 0:
        yield (
            False,
            f"A job may wait {wait.seconds:.0f} s for a lease: in its first {wait.exempt_s:g} s "
            f"Slurm preempts none ({wait.exempt_by}); then {parts}. Leases must be preempted at "
            "once: give them a QOS of their own as qos in [scheduler.slurm], with sacctmgr modify "
            "qos NAME set PreemptExemptTime=00:00:00, which counts more than that of the cluster.",
        )
    else:
        yield (
            True,
            f"A job waits {wait.seconds:.0f} s for a lease at the longest: {parts}. A "
            f"heterogeneous job waits up to {wait.seconds + HETEROGENEOUS_DELAY_S:.0f} s, because "
            "Slurm puts off its components while it preempts for them.",
        )
    yield from _additions(site)


def _additions(site: SlurmSite) -> Iterator[Finding]:
    """Name the times that come on top of the sum."""
    limit_s = site.program_limit_s
    limited = (
        f"each {limit_s:g} s at most (PrologEpilogTimeout)"
        if limit_s is not None
        else "without a limit, as PrologEpilogTimeout is not set"
    )
    if programs := site.programs("Epilog"):
        yield (
            True,
            f"The time of {' and '.join(programs)} comes on top of this sum, {limited}: a node is "
            "free when they have ended.",
        )
    if programs := site.programs("Prolog"):
        yield (
            True,
            f"A lease that is preempted while {' or '.join(programs)} runs for its start ends "
            f"after that, so its time comes on top of this sum, {limited}.",
        )
    yield (
        True,
        "Processes of a lease that SIGKILL does not end keep their node, on top of this sum; after "
        f"{site.unkillable_step_s:g} s (UnkillableStepTimeout) Slurm drains it.",
    )
