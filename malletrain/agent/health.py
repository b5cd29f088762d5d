"""Whether this node is fit for jobs: the site's own check, and its GPUs.

Decides when the checks run, one after the other: at the start of the lease, periodically, and at
once when workers fail. One failure is enough; the daemon decides what follows.
:mod:`malletrain.agent.checks` runs a check, :mod:`malletrain.agent.gpus` interprets nvidia-smi.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from malletrain.agent import gpus
from malletrain.protocol.health import HealthPlan

LONGEST = 500
"""Characters of a check's words that are passed on."""
AGAIN_S = 1.0
"""A check that somebody else's killing ended is begun anew so much later."""
MOST_UNKNOWN = 3
"""Runs one after the other of which nobody knows how they ended: more are not tried."""

Verdict = Callable[[int | None, str], str]
"""Exit code (None: it took too long) and what was printed → what is wrong; empty: nothing."""


class Running(Protocol):
    """A check that was started."""

    def over(self) -> bool:
        """Whether it has ended."""

    def kill(self) -> None:
        """End it and everything it started."""

    @property
    def code(self) -> int | None:
        """Its exit code once it has ended; None: it was killed before it had one."""

    @property
    def printed(self) -> str:
        """What it has printed."""


@dataclass(frozen=True)
class Check:
    """One check."""

    command: tuple[str, ...]
    """What is run."""
    verdict: Verdict
    """What its end means."""


def checks_of(plan: HealthPlan, gpu_count: int) -> list[Check]:
    """The checks of a node with so many GPUs, the quickest to be sure of first."""
    checks = []
    if plan.gpus and gpu_count and shutil.which(gpus.COMMAND[0]):
        checks.append(Check(gpus.COMMAND, lambda code, printed: _sentence(code, printed)))
    if plan.check:
        name, limit_s = plan.check[0].rpartition("/")[2], plan.timeout_s
        checks.append(
            Check(plan.check, lambda code, printed: _of_site(name, limit_s, code, printed))
        )
    return checks


def _sentence(code: int | None, printed: str) -> str:
    wrong = gpus.trouble(code, printed)
    return f"Its GPUs are not fit for use: {wrong[:LONGEST]}." if wrong else ""


def _of_site(name: str, limit_s: float, code: int | None, printed: str) -> str:
    if code == 0:
        return ""
    words = [line.strip() for line in printed.splitlines() if line.strip()]
    last_line = f": {words[-1][:LONGEST]}" if words else ", and said nothing"
    if code is None:
        return f"The health check {name} did not end within {limit_s:g} s and was killed{last_line}"
    return f"The health check {name} failed with code {code}{last_line}"


def _without_result(check: Check) -> str:
    name = check.command[0].rpartition("/")[2]
    return (
        f"The health check {name} ran {MOST_UNKNOWN} times and its result cannot be written, or is "
        "lost: the disk of the agent's run directory may be full"
    )


class HealthWatch:
    """The checks of one node over the time of its lease.

    Args:
        checks: those that there are.
        interval_s: seconds from the end of one look to the next.
        timeout_s: seconds after which a check is killed.
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
        """Those that are still to run in this look."""
        self._current: Check | None = None
        self._running: Running | None = None
        self._kill_at = 0.0
        self._unknown = 0
        """Runs of which nobody knows how they ended, since the last of which it is known."""
        self._due = 0.0
        self._stopped = False
        self.looked = not self._checks
        """Whether a first look is over."""
        self.sick = ""
        """What is wrong with the node, as a sentence; empty: nothing that is known."""

    @property
    def looking(self) -> bool:
        """Whether a look is under way, or begins at once."""
        return not self.sick and bool(self._remaining or self._current)

    def look_soon(self) -> None:
        """Look at once, from the beginning: something has failed on the node."""
        self._remaining, self._due = list(self._checks), 0.0

    def step(self, now: float) -> None:
        """Start what is due and see what ended; to be called often. ``now``: seconds of a clock
        that does not jump.
        """
        if self.sick or self._stopped:
            return
        if self._current is not None and self._running is not None:
            self._look_at(self._current, self._running, now)
        elif self._checks and now >= self._due:
            self._remaining = self._remaining or list(self._checks)
            self._begin(self._remaining.pop(0), now)

    def stop(self) -> None:
        """Look no more, and leave no process behind."""
        self._stopped = True
        if self._running is not None:
            self._running.kill()

    def _begin(self, check: Check, now: float) -> None:
        self._current, self._kill_at = check, now + self._timeout_s
        try:
            self._running = self._start(check.command)
        except OSError as error:
            self._judge(check.verdict(126, str(error)), now)

    def _look_at(self, check: Check, running: Running, now: float) -> None:
        if running.over():
            code = running.code
            self._unknown = self._unknown + 1 if code is None else 0
            if code is not None:
                self._judge(check.verdict(code, running.printed), now)
            elif self._unknown >= MOST_UNKNOWN:
                self._judge(_without_result(check), now)
            else:
                # It was swept away with the processes of a job: nobody knows what it found.
                self._remaining.insert(0, check)
                self._current = self._running = None
                self._due = now + AGAIN_S
        elif now >= self._kill_at:
            # One that cannot be killed (a disk that does not answer) is not waited for.
            running.kill()
            self._judge(check.verdict(None, running.printed), now)

    def _judge(self, wrong: str, now: float) -> None:
        self._current = self._running = None
        self.sick = wrong
        if wrong or not self._remaining:
            self.looked, self._due = True, now + self._interval_s
