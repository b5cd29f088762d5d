"""What a limit of the main scheduler on a user's jobs means for leases, as findings of ``malletrain
check``. Decides the sentences. Each scheduler's own check reads the limits.
"""

from __future__ import annotations

from collections.abc import Iterator

from scavenger.batch.look import Finding


def job_limit(title: str, name: str, most: int, ours: int, table: str) -> Iterator[Finding]:
    """Yield the findings about one limit.

    Args:
        title: name of the scheduler, for sentences.
        name: name of the limit, such as ``MaxJobs of user ann``.
        most: number of jobs that it allows one user.
        ours: maximum number of leases of one user in the configuration; 0: no limit.
        table: table of the configuration, such as ``scheduler.slurm``.
    """
    if ours >= most:
        yield (
            False,
            f"{title} allows one user {most} jobs ({name}), leases included, and "
            f"max_leases_per_user is {ours}, so the user's other jobs would be refused or wait; "
            f"set max_leases_per_user in [{table}] below {most}.",
        )
    elif not ours:
        yield (
            True,
            f"{title} allows one user {most} jobs ({name}), and leases count as jobs; set "
            f"max_leases_per_user in [{table}] to leave room for the user's other jobs.",
        )
    else:
        yield (
            True,
            f"{title} allows one user {most} jobs ({name}); leases take {ours} of them at most.",
        )
