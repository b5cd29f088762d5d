"""Resubmission of an ended job. Pure.

Decides what the new job takes over from the old one: everything that did not belong to that run
only.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from malletrain.protocol.messages import JobSpec
from malletrain.protocol.views import JobDetail
from malletrain.submission.error import SpecError
from malletrain.submission.resuming import resuming


def resubmitted(spec: JobSpec, job: str, more: Sequence[str], now: float) -> JobSpec:
    """Return a job that resumes from the snapshot of ``job``, which was submitted as ``spec``.

    Its arguments are those of the old job followed by ``more``, because in most scripts the last
    value of an option counts. A deadline before ``now`` (epoch seconds) and the jobs that the old
    job waited for are left out. If ``more`` is not empty, the work is left out too, because it may
    have changed.
    """
    goals: dict[str, float | None] = {}
    if spec.deadline is not None and spec.deadline <= now:
        goals["deadline"] = None
    if more:
        goals["work"] = None
    changed = msgspec.structs.replace(
        spec, key="", after=(), args=(*spec.args, *more), owner="", **goals
    )
    return resuming(changed, job)


def requeued(old: JobDetail, more: Sequence[object], now: float, user: str) -> JobSpec:
    """Return the job of :func:`resubmitted` for ``user``, from a job as the daemon shows it.

    Raises:
        SpecError: the job has not ended, belongs to another user, or is a farm.
    """
    if old.job.owner != user:
        raise SpecError(
            f"Job {old.job.id} belongs to {old.job.owner}; only {old.job.owner} can do this."
        )
    if old.job.ended is None:
        raise SpecError(f"Job {old.job.id} ({old.job.name}) is {old.job.state}; it has not ended.")
    spec = msgspec.convert(old.spec, JobSpec)
    if spec.farm is not None:
        raise SpecError(
            f"Job {old.job.id} ({old.job.name}) is a farm, whose tasks are not part of its "
            "specification; `malletrain map` takes the rows of those that failed again."
        )
    return resubmitted(spec, old.job.id, [str(word) for word in more], now)


def omissions(old: JobSpec, new: JobSpec) -> list[str]:
    """Return sentences about what :func:`resubmitted` has left out."""
    sentences = []
    if old.after:
        sentences.append(
            f"It does not wait for {', '.join(old.after)} (--after), as the old one did: submit it "
            "anew where it must."
        )
    if old.deadline is not None and new.deadline is None:
        sentences.append("The old one's deadline is over and left out.")
    if old.work is not None and new.work is None:
        sentences.append("The old one's --work is left out, for the arguments are others.")
    return sentences
