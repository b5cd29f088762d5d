"""What an exception in handling one message costs: that message, and never the daemon.

Decides what is told of it, and that who sends again and again what cannot be handled is not heard
for a while in this kind of message. Whether memory and store are apart after it, so that the parts
of the daemon have to be made anew, is known to the step that failed (:mod:`malletrain.daemon.core`)
and done by :mod:`malletrain.daemon.main`. It outlives the parts.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from malletrain.daemon.metrics import Metrics

REMEMBERED_S = 600.0
"""For so long a mishap counts against its sender, and against the daemon."""
NOT_HEARD_S, NOT_HEARD_MOST_S = 60.0, 3600.0
"""How long the second mishap of a kind keeps its sender from sending more of it, doubling."""
MOST_OF_ITS_OWN = 3
"""So often within REMEMBERED_S the daemon begins anew for a failure that no message brought."""
MOST_SENDERS = 10_000
SENDERS = {"lease": "agent", "client": "client", "stranger": "unknown"}

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Mishap:
    """One message that could not be handled."""

    who: str
    """The sender, as the key ring names it."""
    kind: str
    """What it was: a type of message, or an operation of clients."""
    cause: str
    """The exception, and the line that raised it."""
    time: float

    @property
    def sentence(self) -> str:
        """For operators."""
        role, _, name = self.who.partition(":")
        sender = {"lease": f"the agent of lease {name}", "client": f"the client of {name}"}.get(
            role, "a client that has not logged in"
        )
        return f"The message {self.kind} of {sender} could not be handled: {self.cause}"


class Mishaps:
    """The mishaps of this start of the daemon. ``now``: the time, seconds."""

    def __init__(self, metrics: Metrics, now: Callable[[], float]) -> None:
        self._metrics = metrics
        self._now = now
        self.count = 0
        """All of them so far."""
        self.last: Mishap | None = None
        self._against: dict[tuple[str, str], tuple[int, float]] = {}
        self._own: deque[float] = deque(maxlen=MOST_OF_ITS_OWN)

    def of_message(self, who: str, kind: str, error: BaseException) -> Mishap:
        """A message of ``who`` failed; counts and logs it."""
        now, key = self._now(), (who, kind)
        times, last = self._against.get(key, (0, now))
        if now - last > REMEMBERED_S + self._pause_s(times):
            times = 0
        if len(self._against) >= MOST_SENDERS:
            self._against.pop(next(iter(self._against)))
        self._against[key] = (times + 1, now)
        self.count, self.last = self.count + 1, Mishap(who, kind, cause_of(error), now)
        self._metrics.failed_message(SENDERS.get(who.partition(":")[0], "unknown"))
        log.error("message failed", who=who, kind=kind, exception=_trace(error))
        return self.last

    def refusal(self, who: str, kind: str) -> str:
        """Why ``who`` is not heard in this kind of message now, as a sentence; empty: it is."""
        if not self._against:
            return ""
        times, last = self._against.get((who, kind), (0, 0.0))
        left = last + self._pause_s(times) - self._now()
        if left <= 0.0:
            return ""
        return (
            f"The daemon failed at {times} messages {kind} of yours; it takes no more of them for "
            f"{left:.0f} s. Its log says how it failed."
        )

    def told(self) -> str:
        """What operators are shown of it; empty: there is nothing."""
        if self.last is None:
            return ""
        number = "One message" if self.count == 1 else f"{self.count:,} messages"
        return (
            f"{number} could not be handled since the daemon's start: a defect of MalleTrain, "
            f"please report it. The last: {self.last.sentence} See `malletrain events`."
        )

    def may_begin_anew(self, error: BaseException) -> bool:
        """The daemon failed, and at no message. Whether it may begin anew once more; else its end
        is the service manager's to deal with.
        """
        now = self._now()
        often = len(self._own) == MOST_OF_ITS_OWN and now - self._own[0] < REMEMBERED_S
        self._own.append(now)
        log.error("the daemon failed", again=not often, exception=_trace(error))
        return not often

    def doubtful(self) -> bool:
        """Whether the daemon failed not long ago, and it is not known at which message."""
        return bool(self._own) and self._now() - self._own[-1] < REMEMBERED_S

    @staticmethod
    def _pause_s(times: int) -> float:
        return 0.0 if times < 2 else min(NOT_HEARD_MOST_S, NOT_HEARD_S * 2.0 ** min(times - 2, 16))


def _trace(error: BaseException) -> str:
    """Where it came from, for the log. Without local variables: there are secrets among them."""
    return "".join(traceback.format_exception(error, limit=-20))[:20_000].rstrip()


def cause_of(error: BaseException) -> str:
    """The exception and where it was raised, on one line of bounded length."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{text.rstrip('.')}{where}."
