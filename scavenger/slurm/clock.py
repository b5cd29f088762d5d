"""The difference between the clock of Slurm's controller and that of this host, and times of Slurm
on the clock of this host. Pure.

Slurm prints times by the clock of its controller: ends of leases, beginnings of reservations,
expected starts. If the controller is a minute ahead and nobody converts them, a lease leaves for a
maintenance a minute late, and a preempted lease does not seem to leave. Slurm itself works at such
a difference: Munge accepts credentials for five minutes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from scavenger.batch.poll_result import Finding
from scavenger.slurm.parse import SlurmJob, SlurmJobTable, SlurmReservation

MIN_DIFFERENCE_S = 2.0
"""Smaller differences are not converted, because sdiag prints whole seconds."""
MAX_ANSWER_S = 2.0
"""Maximum time that sdiag may take to answer, seconds. A slower answer says too little."""
_PRINTED_AT = re.compile(r"^sdiag output at .*\((\d+)\)\s*$", re.MULTILINE)


def clock_ahead_s(statistics: str, asked_at: float, answered_at: float) -> float | None:
    """Return by how many seconds the controller's clock is ahead of this host's, negative if it is
    behind; None if the answer does not say.

    Args:
        statistics: output of ``sdiag``.
        asked_at: time before sdiag was called, epoch seconds.
        answered_at: time after it.
    """
    match = _PRINTED_AT.search(statistics)
    if match is None or not 0 <= answered_at - asked_at <= MAX_ANSWER_S:
        return None
    return int(match[1]) + 0.5 - (asked_at + answered_at) / 2


def settled(measured_s: float | None, before_s: float) -> float:
    """Return the difference to convert with. The previous one is kept if the new one is not known,
    or differs by less than can be measured, so that times do not jump.

    Args:
        measured_s: result of :func:`clock_ahead_s`.
        before_s: the previous difference, seconds.
    """
    if measured_s is None or abs(measured_s - before_s) < MIN_DIFFERENCE_S:
        return before_s
    return measured_s if abs(measured_s) >= MIN_DIFFERENCE_S else 0.0


def on_this_clock(
    jobs: SlurmJobTable, reservations: Sequence[SlurmReservation], ahead_s: float
) -> tuple[SlurmJobTable, list[SlurmReservation]]:
    """Return jobs and reservations with all times on the clock of this host. ``ahead_s``: by how
    much the controller's is ahead, seconds.
    """

    def converted(job: SlurmJob) -> SlurmJob:
        times = {name: getattr(job, name) for name in ("submitted", "start", "end")}
        return job._replace(**{name: t - ahead_s for name, t in times.items() if t is not None})

    return (
        SlurmJobTable(*([converted(job) for job in table] for table in jobs)),
        [r._replace(start=r.start - ahead_s, end=r.end - ahead_s) for r in reservations],
    )


def clock_findings(ahead_s: float) -> Iterator[Finding]:
    """Yield (works, sentence) about the clocks if they differ. ``ahead_s``: as in
    :func:`on_this_clock`.
    """
    if ahead_s:
        yield (
            None,
            f"The clock of Slurm's controller is {abs(ahead_s):.0f} s "
            f"{'ahead of' if ahead_s > 0 else 'behind'} that of this host. Slurm's times are "
            "converted. Set both clocks by NTP: if they differ by 5 min, Munge lets no command "
            "through.",
        )
