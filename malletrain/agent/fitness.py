"""What this node reports to the daemon about its health, and when.

Decides that nothing is reported before the first check, that failed workers cause another check,
and that the daemon learns of a suspected node before it learns of the failure. The daemon decides
whose fault a failure was.
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
    """Of one agent.

    Args:
        config: with how the site wants it.
        directory: for what checks print.
        send: reaches the daemon (False: it is away).
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
        """The job whose workers failed here, while it is being looked why."""
        self._last_doubt: Doubt | None = None
        """The last doubt, or that it is over."""
        self._sickness_sent = False
        self._looked = asyncio.Event()
        if self._watch.looked:
            self._looked.set()

    @property
    def sick(self) -> str:
        """Why the node is not fit for jobs, as a sentence; empty: it is."""
        return self._watch.sick

    async def first_look(self) -> None:
        """Until it is known whether the node is fit."""
        await self._looked.wait()

    def send(self, message: Message) -> bool:
        """Send what is to be said of the job, and look at the node where its workers failed."""
        if isinstance(message, Phase):
            broken = message.assignment.phase in BROKEN
            if broken and self._checked and not self._sickness_sent and not self._doubted:
                self._doubted = message.assignment.job
                self._say(Doubt(self._doubted))
                self._watch.look_soon()
        return self._send(message)

    def step(self, now: float) -> None:
        """Look after the checks, and tell the daemon what they found."""
        self._watch.step(now)
        if self._watch.looked:
            self._looked.set()
        if self._watch.sick and not self._sickness_sent:
            self._sickness_sent = True  # where the daemon is away, Hello says it
            self._send(Sick(self._watch.sick, bool(self._doubted)))
        if self._doubted and not self._watch.looking:
            if not self._watch.sick:
                self._say(Doubt(self._doubted, over=True))
            self._doubted = ""

    def reconnected(self) -> None:
        """The daemon is there (again). It waits for the end of a doubt that it has heard of, so
        what may have been lost with the connection is said once more.
        """
        if self._last_doubt is not None and not self._watch.sick:
            self._send(self._last_doubt)

    def _say(self, doubt: Doubt) -> None:
        self._last_doubt = doubt
        self._send(doubt)

    def stop(self) -> None:
        """The lease ends."""
        self._watch.stop()
