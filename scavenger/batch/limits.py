"""What a limit of the main scheduler on a user's jobs means for leases, as findings of ``malletrain
check``. Decides the sentences; what limits there are is read by each scheduler's own check.
"""

from __future__ import annotations

from collections.abc import Iterator

from scavenger.batch.look import Finding


def job_limit(title: str, name: str, most: int, ours: int, table: str) -> Iterator[Finding]:
    """What is said of one limit.

    Args:
        title: the scheduler, in sentences.
        name: of the limit, such as ``MaxJobs of user ann``.
        most: jobs of one user that it allows.
        ours: leases of one user that the configuration allows; 0: any number.
        table: the table of the configuration, such as ``scheduler.slurm``.
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
