"""What a limit of the main scheduler on a user's jobs, or on the time of preempted ones, means for
leases, as findings of ``malletrain check``. Decides the sentences. Each scheduler's own check reads
the limits.
"""

from __future__ import annotations

from collections.abc import Iterator

from scavenger.batch.poll_result import Finding


def no_lease(limit: str, name: str, table: str) -> Finding:
    """Return the finding about a limit that allows no lease at all.

    Args:
        limit: its value, as the scheduler shows it.
        name: name of the limit.
        table: table of the configuration, such as ``scheduler.slurm``.
    """
    return (
        False,
        f"{name} is {limit}, so that no lease can start; raise it, or set options in [{table}] "
        "with which it does not apply to leases.",
    )


def job_limit(title: str, name: str, limit: int, max_leases: int, table: str) -> Iterator[Finding]:
    """Yield the findings about one limit.

    Args:
        title: name of the scheduler, for sentences.
        name: name of the limit, such as ``MaxJobs of user ann``.
        limit: number of jobs that it allows one user.
        max_leases: maximum number of leases of one user in the configuration; 0: no limit.
        table: table of the configuration, such as ``scheduler.slurm``.
    """
    jobs = "1 job" if limit == 1 else f"{limit} jobs"
    if not limit:
        yield no_lease("0", name, table)
    elif max_leases >= limit:
        yield (
            False,
            f"{title} allows one user {jobs} ({name}), leases included, and "
            f"max_leases_per_user is {max_leases}, so the user's other jobs would be refused or "
            f"wait; set max_leases_per_user in [{table}] below {limit}.",
        )
    elif not max_leases:
        yield (
            True,
            f"{title} allows one user {jobs} ({name}), and leases count as jobs; set "
            f"max_leases_per_user in [{table}] to leave room for the user's other jobs.",
        )
    else:
        yield (
            True,
            f"{title} allows one user {jobs} ({name}); leases take {max_leases} of them at most.",
        )


def preemption_grace(grace_s: float, needed_s: float, remedy: str, source: str = "") -> Finding:
    """Return the finding about the time that a preempted lease has.

    Args:
        grace_s: that time, seconds.
        needed_s: maximum time that jobs need to take a snapshot and stop, seconds.
        remedy: how to lengthen it, as a part of a sentence.
        source: name of the scheduler's setting; empty for none.
    """
    if grace_s < needed_s:
        return (
            False,
            f"A preempted lease has {grace_s:g} s until it is killed, too short to take a "
            f"snapshot and leave in order ({needed_s:g} s with drain_timeout and stop_grace of "
            f"[jobs]); {remedy}, or make those shorter.",
        )
    shown_source = f" ({source})" if source else ""
    return (
        True,
        f"A preempted lease has {grace_s:g} s to leave{shown_source}; jobs need {needed_s:g} s at "
        "most to take a snapshot and stop.",
    )
