"""Forecasts when each job loses a node, so that it saves in time. Pure.

A job loses a node when the first gap of its nodes ends. The gaps of one cohort end together, those
of different cohorts independently of each other, so the rates at which cohorts end add up to the
rate of the job's losses. :mod:`scavenger.horizon` forecasts the rate of each gap.
:mod:`malletrain.training.snapshot_pace`, in the training process, knows the cost of a snapshot and
decides how often it saves. A forecast is sent when it has changed by a quarter.
"""

from __future__ import annotations

import math

from malletrain.core.commands import LossExpected
from malletrain.core.records import JobRecord
from malletrain.core.state import ControllerState

MIN_CHANGE_RATIO = 1.25
"""Minimum ratio of a change that is reported."""
MAX_LOSS_S = 86400.0
"""A loss expected later than this counts as none, seconds."""


class LossForecasts:
    """Forecasts of losses sent to the jobs of one controller."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._sent: dict[str, float] = {}
        """Job → expected time to its next loss that was sent last, seconds."""

    def review(self) -> list[LossExpected]:
        """Return the changed forecasts of the jobs that process samples. Call it after a plan."""
        if not self._state.forecasts and not self._sent:
            return []
        jobs = {job.submitted.job: job for job in self._state.at_work.values() if job.nodes}
        self._sent = {name: in_s for name, in_s in self._sent.items() if name in jobs}
        commands = []
        for name, job in jobs.items():
            in_s = self._expected_s(job)
            before = self._sent.get(name, math.inf)
            changed = (
                in_s != before and not before / MIN_CHANGE_RATIO < in_s < before * MIN_CHANGE_RATIO
            )
            if changed and not job.rescaling:
                commands.append(self._send(name, in_s))
        return commands

    def resumed(self, job: JobRecord) -> list[LossExpected]:
        """Return the forecast of a job whose newest round processes samples. It is sent again,
        because the first node, which receives it, may have changed.
        """
        in_s = self._expected_s(job)
        must_send = in_s < math.inf or job.submitted.job in self._sent
        return [self._send(job.submitted.job, in_s)] if job.nodes and must_send else []

    def _send(self, job: str, in_s: float) -> LossExpected:
        self._sent[job] = in_s
        return LossExpected(job, in_s)

    def _expected_s(self, job: JobRecord) -> float:
        """Return the mean time to the next loss of a node that is not leaving already, seconds;
        infinite if it is longer than :data:`MAX_LOSS_S`.
        """
        usable, forecasts = self._state.usable, self._state.forecasts
        open_gaps = (forecasts[node] for node in job.nodes if node in usable and node in forecasts)
        rate = sum({gap.cohort: gap.end_rate for gap in open_gaps}.values())
        return 1.0 / rate if rate * MAX_LOSS_S > 1.0 else math.inf
