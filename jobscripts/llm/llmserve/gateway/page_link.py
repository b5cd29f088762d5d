"""Links the services of the gateway to its page, so that users of MalleTrain find it."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

log = logging.getLogger(__name__)

NAME = "LLM gateway"
"""Name of the link."""
INTERVAL_S = 60.0
"""Seconds after which the link is set again: the service may have been submitted anew as another
job.
"""


class LinkClient(Protocol):
    """The part of ``malletrain.AsyncClient`` that is used."""

    async def set_link(self, job: str, name: str, url: str) -> str:
        """Give a job a link."""


class PageLink:
    """The link of one service.

    Args:
        client: a client of the daemon.
        job: name or id of the service.
        url: address of the page.
        interval_s: seconds after which the link is set again.
    """

    def __init__(
        self, client: LinkClient, job: str, url: str, interval_s: float = INTERVAL_S
    ) -> None:
        self._client, self._job, self._url, self._interval_s = client, job, url, interval_s
        self._error = ""
        """The daemon's last error; empty: it accepted the link."""

    async def run(self) -> None:
        """Set the link until it is cancelled."""
        while True:
            await self.set()
            await asyncio.sleep(self._interval_s)

    async def set(self) -> None:
        """Set the link now."""
        try:
            await self._client.set_link(self._job, NAME, self._url)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the daemon is restarted, the job has ended: later it may work
            if str(error) != self._error:
                log.warning("Service %s is not linked to the page: %s", self._job, error)
            self._error = str(error)
            return
        self._error = ""
