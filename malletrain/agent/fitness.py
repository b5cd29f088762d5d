"""Reports the health of this node to the daemon.

Decides that nothing is reported before the first checks have ended, that failed workers cause
another check, and that the daemon receives a doubt about the node before it receives the failure.
The daemon decides whether the node or the job caused a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from malletrain.agent.checks import CheckProcess
from malletrain.agent.config import AgentConfig
from malletrain.agent.health import HealthWatch, checks_of
from malletrain.protocol.messages import Doubt, Message, Phase, Sick
from malletrain.protocol.phases import BROKEN


class NodeFitness:
    """The health reports of one agent.

    Args:
        config: settings of the agent, with the site's health checks.
        directory: directory for the output of checks.
        send: sends a message to the daemon. Returns False if the daemon is away.
    """

    def __init__(
        self, config: AgentConfig, directory: Path, send: Callable[[Message], bool]
    ) -> None:
        plan, log = config.health, directory / "health.log"
        checks = checks_of(plan, config.gpus)
        self._watch = HealthWatch(
            checks,
            plan.interval_s,
            plan.timeout_s,
            lambda command: CheckProcess(command, log, config.node),
        )
        self._checked = bool(checks)
        self._send = send
        self._doubted = ""
        """Job whose workers failed here, while the checks run because of that; else empty."""
        self._last_doubt: Doubt | None = None
        """The last message that raised or withdrew a doubt."""
        self._sickness_sent = False
        self._first_checks_done = asyncio.Event()
        if self._watch.first_checks_done:
            self._first_checks_done.set()

    @property
    def sick(self) -> str:
        """Reason why the node is not fit for jobs, as a sentence; empty if it is fit."""
        return self._watch.sick

    async def wait_for_first_checks(self) -> None:
        """Wait until it is known whether the node is fit."""
        await self._first_checks_done.wait()

    def send(self, message: Message) -> bool:
        """Send a message about the job. If its workers have failed, check the node."""
        if isinstance(message, Phase):
            broken = message.assignment.phase in BROKEN
            if broken and self._checked and not self._sickness_sent and not self._doubted:
                self._doubted = message.assignment.job
                self._send_doubt(Doubt(self._doubted))
                self._watch.check_soon()
        return self._send(message)

    def step(self, now: float) -> None:
        """Run the checks that are due, and report their results to the daemon. ``now``: seconds of
        a monotonic clock.
        """
        self._watch.step(now)
        if self._watch.first_checks_done:
            self._first_checks_done.set()
        if self._watch.sick and not self._sickness_sent:
            self._sickness_sent = True  # if the daemon is away, Hello reports it
            self._send(Sick(self._watch.sick, bool(self._doubted)))
        if self._doubted and not self._watch.is_checking:
            if not self._watch.sick:
                self._send_doubt(Doubt(self._doubted, over=True))
            self._doubted = ""

    def reconnected(self) -> None:
        """Send the last doubt again after a reconnection, because it may have been lost, and the
        daemon waits for the end of each doubt that it has received.
        """
        if self._last_doubt is not None and not self._watch.sick:
            self._send(self._last_doubt)

    def _send_doubt(self, doubt: Doubt) -> None:
        self._last_doubt = doubt
        self._send(doubt)

    def stop(self) -> None:
        """Stop the checks at the end of the lease."""
        self._watch.stop()
