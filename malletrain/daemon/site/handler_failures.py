"""Records exceptions of message handlers, and refuses messages that fail again and again. Such an
exception costs the message, never the daemon.

Decides what is reported to operators. Decides that after repeated failures of one sender's messages
of one kind, such messages are refused for a while. If memory and store may differ after a failure
(:mod:`malletrain.daemon.engine.transactions`), :mod:`malletrain.daemon.main` replaces the daemon's
components; this record outlives them.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from malletrain.daemon.site.metrics import Metrics
from scavenger.backoff import doubled_s

MEMORY_S = 600.0
"""Time for which a failure counts against its sender and against the daemon, seconds."""
REFUSAL_S, MAX_REFUSAL_S = 60.0, 3600.0
"""Time for which messages of a kind are refused after their second failure, and its maximum,
seconds. It doubles with each further failure.
"""
MAX_RESTARTS = 3
"""Maximum number of restarts of the components within MEMORY_S after failures that no message
caused.
"""
MAX_SENDERS = 10_000
"""Maximum number of (sender, kind) pairs whose failures are recorded."""
SENDERS = {"lease": "agent", "client": "client", "unauthenticated": "unknown"}
"""Role of a sender in the key ring → its label in the metrics."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class HandlerFailure:
    """A message whose handler raised an exception."""

    who: str
    """Sender, as named by the key ring."""
    kind: str
    """Type of the message, or operation of a client."""
    cause: str
    """Exception and the line that raised it."""
    time: float
    """Time of the failure, seconds."""

    @property
    def sentence(self) -> str:
        """Description for operators."""
        role, _, name = self.who.partition(":")
        sender = {"lease": f"the agent of lease {name}", "client": f"the client of {name}"}.get(
            role, "a client that has not logged in"
        )
        return f"The message {self.kind} of {sender} could not be handled: {self.cause}"


class HandlerFailures:
    """The failures since the daemon started.

    Args:
        metrics: counts them.
        now: returns the time, seconds.
    """

    def __init__(self, metrics: Metrics, now: Callable[[], float]) -> None:
        self._metrics = metrics
        self._now = now
        self.count = 0
        """Number of failures."""
        self.last: HandlerFailure | None = None
        """The newest failure; None if there was none."""
        self._by_sender: dict[tuple[str, str], tuple[int, float]] = {}
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)

    def of_message(self, who: str, kind: str, error: BaseException) -> HandlerFailure:
        """Record a failed message.

        Args:
            who: sender, as named by the key ring.
            kind: type of the message, or operation of a client.
            error: exception that the handler raised.
        """
        now, key = self._now(), (who, kind)
        failures, last = self._by_sender.get(key, (0, now))
        if now - last > MEMORY_S + self._pause_s(failures):
            failures = 0
        if len(self._by_sender) >= MAX_SENDERS:
            self._by_sender.pop(next(iter(self._by_sender)))
        self._by_sender[key] = (failures + 1, now)
        self.count, self.last = self.count + 1, HandlerFailure(who, kind, cause_of(error), now)
        self._metrics.failed_message(SENDERS.get(who.partition(":")[0], "unknown"))
        log.error("message failed", who=who, kind=kind, exception=_trace(error))
        return self.last

    def refusal(self, who: str, kind: str) -> str:
        """Return why messages of this kind from ``who`` are refused now, as a sentence; empty if
        they are not.
        """
        if not self._by_sender:
            return ""
        failures, last = self._by_sender.get((who, kind), (0, 0.0))
        remaining_s = last + self._pause_s(failures) - self._now()
        if remaining_s <= 0.0:
            return ""
        return (
            f"The daemon failed to handle {failures} of your messages {kind}; it refuses more of "
            f"them for {remaining_s:.0f} s. Its log has the cause."
        )

    def summary(self) -> str:
        """Return a sentence for operators; empty if there was no failure."""
        if self.last is None:
            return ""
        number = "One message" if self.count == 1 else f"{self.count:,} messages"
        return (
            f"{number} could not be handled since the daemon's start: a defect of MalleTrain, "
            f"please report it. The last: {self.last.sentence} See `malletrain events`."
        )

    def may_begin_anew(self, error: BaseException) -> bool:
        """Record a failure of the daemon that no message caused. Return whether its components may
        be replaced again. If not, the daemon ends, and the service manager decides.
        """
        now = self._now()
        too_often = len(self._restarts) == MAX_RESTARTS and now - self._restarts[0] < MEMORY_S
        self._restarts.append(now)
        log.error("the daemon failed", again=not too_often, exception=_trace(error))
        return not too_often

    def doubtful(self) -> bool:
        """Whether the daemon failed within ``MEMORY_S`` without a known message as the cause."""
        return bool(self._restarts) and self._now() - self._restarts[-1] < MEMORY_S

    @staticmethod
    def _pause_s(failures: int) -> float:
        return 0.0 if failures < 2 else doubled_s(REFUSAL_S, failures - 2, MAX_REFUSAL_S)


def _trace(error: BaseException) -> str:
    """Return the traceback for the log, without local variables, which may be secrets."""
    return "".join(traceback.format_exception(error, limit=-20))[:20_000].rstrip()


def cause_of(error: BaseException) -> str:
    """Return the exception and the line that raised it, as one line of bounded length."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{text.rstrip('.')}{location}."
