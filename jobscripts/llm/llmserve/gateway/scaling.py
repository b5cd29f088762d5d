"""Reports to the daemon what nodes are worth to the service of a model, while requests come and go.

The values expire after :data:`EXPIRES_INTERVALS` intervals unless they are set again. If the
gateway is gone, the values of the submission of the service apply again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from llmserve.gateway.demand import Demand
from malletrain.waits import happens

log = logging.getLogger(__name__)

EXPIRES_INTERVALS = 6
"""Number of intervals after which values expire that are not set again."""


class WorthClient(Protocol):
    """The part of ``malletrain.AsyncClient`` that is used."""

    async def worth(
        self, job: str, values: Mapping[int, float] | None = None, *, expires_s: float | None = None
    ) -> str:
        """Set what nodes are worth to a service."""


class Scaler:
    """Sets the values of one service.

    Args:
        client: a client of the daemon.
        job: name or id of the service.
        demand: the demand of its model.
        open_requests: returns the number of requests that wait or run.
        interval_s: seconds between two checks.
        clock: returns seconds; the clock of ``demand``.
    """

    def __init__(
        self,
        client: WorthClient,
        job: str,
        demand: Demand,
        open_requests: Callable[[], int],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._job, self._demand = client, job, demand
        self._open_requests = open_requests
        self._interval_s, self._clock = interval_s, clock
        self._wake = asyncio.Event()
        self._values: dict[int, float] | None = None
        self._set_at = 0.0
        self.error = ""
        """The daemon's last error; empty: it accepted the values."""

    def wake(self) -> None:
        """Request a check now: a request waits and there is no node."""
        self._wake.set()

    async def run(self) -> None:
        """Set values until it is cancelled."""
        while True:
            self._wake.clear()
            await self.update()
            if await happens(self._wake, self._interval_s):
                await asyncio.sleep(0)  # requests that arrive together are one change

    async def update(self) -> None:
        """Set the values if they have changed, or will expire soon."""
        now = self._clock()
        values = self._demand.values(self._open_requests(), now)
        expires_s = EXPIRES_INTERVALS * self._interval_s
        if values == self._values and now - self._set_at < expires_s / 2:
            return
        try:
            await self._client.worth(self._job, values, expires_s=expires_s)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the daemon is restarted, the job has ended: later it may work
            if str(error) != self.error:
                log.warning("The value of nodes for service %s is not set: %s", self._job, error)
            self.error, self._values = str(error) or type(error).__name__, None
            return
        self.error, self._values, self._set_at = "", values, now
