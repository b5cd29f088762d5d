"""Checks whether this node is fit for jobs, by the site's own check and by the state of its GPUs.

Decides when the checks run, one after the other: at the start of the lease, periodically, and at
once when workers fail. One failed check makes the node unfit; the daemon decides what follows.
:mod:`malletrain.agent.checks` runs a check, :mod:`malletrain.agent.gpus` interprets nvidia-smi.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from malletrain.agent import gpus
from malletrain.protocol.health import HealthPlan

MAX_OUTPUT_CHARACTERS = 500
"""Maximum number of characters of a check's output in a report."""
RETRY_DELAY_S = 1.0
"""Delay before a check runs again that was killed together with the processes of a job, seconds."""
MAX_UNKNOWN_RESULTS = 3
"""Number of consecutive runs without a known result after which the node counts as unfit."""

Verdict = Callable[[int | None, str], str]
"""(exit code, None if the check took too long; output) → problem; empty if there is none."""


class Running(Protocol):
    """A check that was started."""

    def over(self) -> bool:
        """Returns whether it has ended."""

    def kill(self) -> None:
        """Kill it and all its descendants."""

    @property
    def code(self) -> int | None:
        """Exit code after its end; None if it was killed."""

    @property
    def printed(self) -> str:
        """Its output."""


@dataclass(frozen=True)
class Check:
    """One check."""

    command: tuple[str, ...]
    """The program and its arguments."""
    verdict: Verdict
    """Interprets its result."""


def checks_of(plan: HealthPlan, gpu_count: int) -> list[Check]:
    """Returns the checks of a node with ``gpu_count`` GPUs. The fastest is first."""
    checks = []
    if plan.gpus and gpu_count and shutil.which(gpus.COMMAND[0]):
        checks.append(Check(gpus.COMMAND, lambda code, printed: _gpu_verdict(code, printed)))
    if plan.check:
        name, limit_s = plan.check[0].rpartition("/")[2], plan.timeout_s
        checks.append(
            Check(plan.check, lambda code, printed: _site_verdict(name, limit_s, code, printed))
        )
    return checks


def _gpu_verdict(code: int | None, printed: str) -> str:
    problem = gpus.trouble(code, printed)
    return f"Its GPUs are not fit for use: {problem[:MAX_OUTPUT_CHARACTERS]}." if problem else ""


def _site_verdict(name: str, limit_s: float, code: int | None, printed: str) -> str:
    if code == 0:
        return ""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    last_line = f": {lines[-1][:MAX_OUTPUT_CHARACTERS]}" if lines else ", and said nothing"
    if code is None:
        return f"The health check {name} did not end within {limit_s:g} s and was killed{last_line}"
    return f"The health check {name} failed with code {code}{last_line}"


def _verdict_without_result(check: Check) -> str:
    name = check.command[0].rpartition("/")[2]
    return (
        f"The health check {name} ran {MAX_UNKNOWN_RESULTS} times and its result cannot be "
        "written, or is lost: the disk of the agent's run directory may be full"
    )


class HealthWatch:
    """Runs the checks of one node during its lease.

    Args:
        checks: the checks.
        interval_s: time from the end of all checks to their next run, seconds.
        timeout_s: time after which a check is killed, seconds.
        start: starts the command of a check. Raises OSError.
    """

    def __init__(
        self,
        checks: Sequence[Check],
        interval_s: float,
        timeout_s: float,
        start: Callable[[tuple[str, ...]], Running],
    ) -> None:
        self._checks = tuple(checks)
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._start = start
        self._remaining = list(self._checks)
        """Checks that have not run yet in the current pass."""
        self._current: Check | None = None
        self._running: Running | None = None
        self._kill_at = 0.0
        self._unknown_results = 0
        """Number of consecutive runs without a known result."""
        self._due = 0.0
        self._stopped = False
        self.first_checks_done = not self._checks
        """Whether all checks have run once."""
        self.sick = ""
        """Problem of the node, as a sentence; empty if none is known."""

    @property
    def is_checking(self) -> bool:
        """Whether checks are running, or about to run."""
        return not self.sick and bool(self._remaining or self._current)

    def check_soon(self) -> None:
        """Run all checks now, because workers have failed on the node."""
        self._remaining, self._due = list(self._checks), 0.0

    def step(self, now: float) -> None:
        """Start the check that is due, or handle the end of the one that runs; called often.
        ``now``: seconds of a monotonic clock.
        """
        if self.sick or self._stopped:
            return
        if self._current is not None and self._running is not None:
            self._poll(self._current, self._running, now)
        elif self._checks and now >= self._due:
            self._remaining = self._remaining or list(self._checks)
            self._begin(self._remaining.pop(0), now)

    def stop(self) -> None:
        """Start no further check, and kill the one that runs."""
        self._stopped = True
        if self._running is not None:
            self._running.kill()

    def _begin(self, check: Check, now: float) -> None:
        self._current, self._kill_at = check, now + self._timeout_s
        try:
            self._running = self._start(check.command)
        except OSError as error:
            self._finish(check.verdict(126, str(error)), now)

    def _poll(self, check: Check, running: Running, now: float) -> None:
        if running.over():
            code = running.code
            self._unknown_results = self._unknown_results + 1 if code is None else 0
            if code is not None:
                self._finish(check.verdict(code, running.printed), now)
            elif self._unknown_results >= MAX_UNKNOWN_RESULTS:
                self._finish(_verdict_without_result(check), now)
            else:
                # It was killed with the processes of a job, so its result is not known.
                self._remaining.insert(0, check)
                self._current = self._running = None
                self._due = now + RETRY_DELAY_S
        elif now >= self._kill_at:
            # Do not wait for the end of the check: it may be impossible to kill, for example while
            # it waits for a disk.
            running.kill()
            self._finish(check.verdict(None, running.printed), now)

    def _finish(self, problem: str, now: float) -> None:
        self._current = self._running = None
        self.sick = problem
        if problem or not self._remaining:
            self.first_checks_done, self._due = True, now + self._interval_s
