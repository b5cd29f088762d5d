"""The interface between the engine and the jobs of a sweep's trials.

Decides what the engine needs to know of a job. The engine uses :class:`Jobs`; the implementation
with a daemon is :class:`malletrain.sweep.daemon_jobs.DaemonJobs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from malletrain.protocol.messages import JobSpec

ENDED = ("completed", "failed", "cancelled")
LOST = "lost"


class JobsAway(RuntimeError):
    """The daemon does not answer at the moment. The message is a sentence."""


class JobRefused(RuntimeError):
    """The job cannot be submitted as it is; the message is a sentence."""


class TooManyJobs(RuntimeError):
    """The owner may submit the job when another one has ended. It does not exist yet. The message
    is a sentence.
    """


@dataclass(frozen=True)
class TrialJob:
    """State of a trial's job."""

    id: str
    state: str
    """As in the glossary; ``lost``: the daemon knows no such job."""
    reason: str = ""
    nodes: int = 0
    """Number of nodes on which it runs."""

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.state in ENDED or self.state == LOST


class Jobs(Protocol):
    """Interface to the jobs. Every call raises JobsAway if the daemon does not answer."""

    def daemon(self) -> str:
        """Return the name of the daemon that has the jobs: ids are valid for this daemon only."""

    def submit(self, spec: JobSpec) -> str:
        """Submit a job and return its id. If its key was submitted before, returns that job's id.
        Raises JobRefused, TooManyJobs.
        """

    def states(self, ids: Sequence[str]) -> Mapping[str, TrialJob]:
        """Return the state of each of these jobs."""

    def points(self, job: str, metric: str, since: int) -> list[tuple[int, float]]:
        """Return the reported values of a metric as (step, value), at least those after
        ``since``."""

    def last(self, job: str, metric: str) -> float | None:
        """Return the newest value that the job reported of a metric."""

    def names(self, job: str) -> list[str]:
        """Return the names of the metrics that the job has reported."""

    def node_seconds(self, job: str) -> float:
        """Return the node-seconds that the job had."""

    def weigh(self, job: str, weight: float) -> None:
        """Set the weight of a job; no effect if it has ended."""

    def cancel(self, job: str, why: str) -> None:
        """Cancel a job; no effect if it has ended. ``why``: the reason that is reported."""

    def wait(self, ids: Sequence[str], within_s: float) -> None:
        """Wait until one of these jobs has, or may have, reported a value or ended since the last
        call; at most ``within_s`` seconds.
        """
