"""One look at the daemon for all viewers, again and again in a thread of its own.

Decides how often. While somebody watches, it looks every second, and more rarely where looking
takes the daemon long: of its time at most a small share goes to the page, however many watch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from malletrain.client import ClientError, Connection
from malletrain.render.follow import Follower, Look
from malletrain.render.live import Screen
from malletrain.web.board import HarvestView

LOOK_EVERY_S = 1.0
UNWATCHED_S = 10.0
"""Between two looks while nobody watches: the story of the nodes goes on."""
SHARE = 0.03
"""Of the time at most this share is spent looking; the rest is rest."""
LONGEST_S = 20.0
HARVEST_EVERY_S = 60.0
AGAIN_S = 0.5
"""Between two tries to reach a daemon that does not answer."""
DAY_S = 86400.0


def rest_s(took_s: float, watched: bool) -> float:
    """How long to rest after a look that took ``took_s`` seconds."""
    least = LOOK_EVERY_S if watched else UNWATCHED_S
    return min(LONGEST_S, max(least, took_s / SHARE - took_s))


class Poller(threading.Thread):
    """Looks until told to end.

    Args:
        connect: makes a client of the daemon; raises ClientError.
        tell: what to do with a look and the harvest of the day.
        away: what to do with a sentence that says why there is none.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        tell: Callable[[Look, HarvestView | None], None],
        away: Callable[[str], None],
    ) -> None:
        super().__init__(name="poller", daemon=True)
        self._connect, self._tell, self._away = connect, tell, away
        self._hurry = threading.Event()
        self._over = False
        self._watchers = 0
        self._harvest: HarvestView | None = None
        self._harvest_due = 0.0
        self._since: int | None = None

    def run(self) -> None:
        """Look until told to end."""
        while not self._over:
            try:
                client = self._connect()
            except ClientError as error:
                self._missed(error)
                continue
            try:
                self._follow(client)
            except ClientError as error:
                self._missed(error)
            finally:
                client.close()

    def _follow(self, client: Connection) -> None:
        follower = Follower(Screen(), client)
        # From the beginning of the audit log it would take long on an old site.
        follower.since = -1000 if self._since is None else self._since
        while not self._over:
            began = time.monotonic()
            look = follower.ask()
            self._since = max(0, follower.since)
            took = time.monotonic() - began
            self._tell(look, self._harvested(client, look.status.now))
            self._pause(rest_s(took, self._watchers > 0))

    def _harvested(self, client: Connection, now: float) -> HarvestView | None:
        if time.monotonic() >= self._harvest_due:
            midnight = now - now % DAY_S
            rows = client.usage(since=midnight)
            self._harvest = HarvestView(
                midnight, sum(row.leased_nh for row in rows), sum(row.trained_nh for row in rows)
            )
            self._harvest_due = time.monotonic() + HARVEST_EVERY_S
        return self._harvest

    def _missed(self, error: ClientError) -> None:
        self._away(str(error))
        self._pause(AGAIN_S)

    def _pause(self, seconds: float) -> None:
        self._hurry.wait(seconds)
        self._hurry.clear()

    def watched(self, more: int) -> None:
        """``more`` viewers than before (negative: fewer)."""
        self._watchers += more
        if more > 0:
            self.now()

    def now(self) -> None:
        """Look at once."""
        self._hurry.set()

    def end(self) -> None:
        """Stop looking."""
        self._over = True
        self._hurry.set()


def connector(state_dir: Path | None) -> Callable[[], Connection]:
    """Makes clients of the daemon of ``state_dir``, found anew each time: it may have moved."""
    return lambda: Connection.of(state_dir)
