"""Polls the daemon for all viewers, in a thread of its own.

Decides how often. While viewers watch, it polls every second, and less often if a poll takes the
daemon long. So the page takes at most a small fraction of the daemon's time, for any number of
viewers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from malletrain.client import ClientError, Connection
from malletrain.render.live import Follower, PollAnswers, Screen
from malletrain.web.board import HarvestView

WATCHED_S = 1.0
"""Interval between two polls while viewers watch, seconds."""
UNWATCHED_S = 10.0
"""Interval between two polls without viewers, seconds. They continue the timeline of the nodes."""
MAX_POLL_FRACTION = 0.03
"""Maximum fraction of the time that is spent on polls."""
MAX_INTERVAL_S = 20.0
"""Maximum interval between two polls, seconds."""
HARVEST_EVERY_S = 60.0
"""Interval between two queries of the day's usage, seconds."""
RETRY_INTERVAL_S = 0.5
"""Interval between two tries to reach a daemon that does not answer, seconds."""
DAY_S = 86400.0


def rest_s(took_s: float, watched: bool) -> float:
    """Return the pause after a poll that took ``took_s``, seconds."""
    min_pause_s = WATCHED_S if watched else UNWATCHED_S
    return min(MAX_INTERVAL_S, max(min_pause_s, took_s / MAX_POLL_FRACTION - took_s))


class Poller(threading.Thread):
    """Polls until :meth:`end` is called.

    Args:
        connect: opens a connection to the daemon; raises ClientError.
        tell: called with the answers of a poll and the harvest of the day.
        away: called with a sentence that says why a poll failed.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        tell: Callable[[PollAnswers, HarvestView | None], None],
        away: Callable[[str], None],
    ) -> None:
        super().__init__(name="poller", daemon=True)
        self._connect, self._tell, self._away = connect, tell, away
        self._poll_now = threading.Event()
        self._ended = False
        self._watchers = 0
        self._harvest: HarvestView | None = None
        self._harvest_due = 0.0
        self._since: int | None = None

    def run(self) -> None:
        """Poll until :meth:`end` is called."""
        while not self._ended:
            try:
                client = self._connect()
            except ClientError as error:
                self._poll_failed(error)
                continue
            try:
                self._follow(client)
            except ClientError as error:
                self._poll_failed(error)
            finally:
                client.close()

    def _follow(self, client: Connection) -> None:
        follower = Follower(Screen(), client)
        # The whole audit log of an old site would take long.
        follower.since = -1000 if self._since is None else self._since
        while not self._ended:
            started_at = time.monotonic()
            answers = follower.ask()
            self._since = max(0, follower.since)
            took_s = time.monotonic() - started_at
            self._tell(answers, self._current_harvest(client, answers.status.now))
            self._pause(rest_s(took_s, self._watchers > 0))

    def _current_harvest(self, client: Connection, now: float) -> HarvestView | None:
        if time.monotonic() >= self._harvest_due:
            midnight = now - now % DAY_S
            rows = client.usage(since=midnight)
            self._harvest = HarvestView(
                midnight, sum(row.leased_nh for row in rows), sum(row.trained_nh for row in rows)
            )
            self._harvest_due = time.monotonic() + HARVEST_EVERY_S
        return self._harvest

    def _poll_failed(self, error: ClientError) -> None:
        self._away(str(error))
        self._pause(RETRY_INTERVAL_S)

    def _pause(self, seconds: float) -> None:
        self._poll_now.wait(seconds)
        self._poll_now.clear()

    def watched(self, more: int) -> None:
        """Change the number of viewers by ``more``."""
        self._watchers += more
        if more > 0:
            self.now()

    def now(self) -> None:
        """Poll at once."""
        self._poll_now.set()

    def end(self) -> None:
        """Stop polling."""
        self._ended = True
        self._poll_now.set()


def connector(state_dir: Path | None) -> Callable[[], Connection]:
    """Return a function that connects to the daemon of ``state_dir``. Each call looks up its
    address, because it may have moved.
    """
    return lambda: Connection.of(state_dir)
