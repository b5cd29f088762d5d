"""The jobs of a sweep's trials, as the engine asks for them and hears of them.

Decides what the engine needs to know of a job. The engine works on :class:`Jobs`; of a daemon they
are :class:`malletrain.sweep.daemon_jobs.DaemonJobs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from malletrain.protocol.messages import JobSpec

ENDED = ("completed", "failed", "cancelled")
LOST = "lost"


class JobsAway(RuntimeError):
    """Nobody can be asked at the moment; later perhaps. The message is a sentence."""


class JobRefused(RuntimeError):
    """The job cannot be submitted as it is; the message is a sentence."""


@dataclass(frozen=True)
class TrialJob:
    """What the engine knows of a job."""

    id: str
    state: str
    """As in the glossary; ``lost``: the daemon knows no such job."""
    reason: str = ""
    nodes: int = 0
    """It runs on."""

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.state in ENDED or self.state == LOST


class Jobs(Protocol):
    """Where jobs are. Every call raises JobsAway when nobody answers."""

    def daemon(self) -> str:
        """The name of the daemon that has the jobs: ids are its own."""

    def submit(self, spec: JobSpec) -> str:
        """Submit; the job's id. A spec whose key was submitted before is that job. Raises
        JobRefused.
        """

    def look(self, ids: Sequence[str]) -> Mapping[str, TrialJob]:
        """How these jobs are, each of them."""

    def points(self, job: str, metric: str, since: int) -> list[tuple[int, float]]:
        """What the job reported of a metric: (step, value), of steps after ``since`` at least."""

    def last(self, job: str, metric: str) -> float | None:
        """The newest value that the job reported of a metric."""

    def names(self, job: str) -> list[str]:
        """The metrics that the job has reported."""

    def node_seconds(self, job: str) -> float:
        """How long nodes trained for it, times nodes."""

    def weigh(self, job: str, weight: float) -> None:
        """It counts so much from now on; nothing where it has ended."""

    def cancel(self, job: str, why: str) -> None:
        """End it; nothing where it has ended. ``why``: what is said of it."""

    def wait(self, ids: Sequence[str], within_s: float) -> None:
        """Return when one of these jobs has reported a value or has ended since the last time, or
        may have; after ``within_s`` at the latest.
        """
