"""Sends server-sent events to all viewers: everything once, then the changes.

A change is encoded once for all viewers of one user. A viewer that is behind gets the kept changes,
or everything again. The server does not wait for slow viewers.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import msgspec
from fastapi import Request
from fastapi.responses import StreamingResponse

from malletrain.web.board import Board, BoardChange
from malletrain.web.poller import Poller
from malletrain.web.viewers import Viewer

KEEP_ALIVE_S = 15.0
"""Time without changes after which a line is sent, seconds, so that no proxy closes the connection
as dead.
"""


class Stream:
    """The stream of one board. ``poller``: counts the viewers."""

    def __init__(self, board: Board, poller: Poller) -> None:
        self._board, self._poller = board, poller
        self._encoded: dict[tuple[int, bool, str], bytes] = {}
        self._name = secrets.token_hex(4)
        """Random name of this server, because versions are not comparable after a restart."""

    async def follow(self, request: Request) -> StreamingResponse:
        """Changes as server-sent events: first everything, or all since ``Last-Event-ID``."""
        viewer: Viewer = request.state.viewer
        name, _, number = request.headers.get("last-event-id", "").partition("-")
        version = int(number) if name == self._name and number.isdecimal() else -1
        return StreamingResponse(
            self._changes(viewer, version),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    async def _changes(self, viewer: Viewer, version: int) -> AsyncIterator[bytes]:
        self._poller.watched(1)
        try:
            while not self._board.over:
                if version < 0:
                    changes = [self._board.everything()]
                else:
                    changes = list(self._board.since(version))
                for change in changes:
                    yield self._event(change, viewer)
                    version = change.version
                if not await self._board.news(version, KEEP_ALIVE_S):
                    yield b": still here\n\n"
        finally:
            self._poller.watched(-1)

    def _event(self, change: BoardChange, viewer: Viewer) -> bytes:
        key = (change.version, change.full, "" if viewer.all_of_it else viewer.name)
        if key not in self._encoded:
            # Older versions are rarely requested again.
            self._encoded = {k: v for k, v in self._encoded.items() if k[0] >= self._board.version}
            owners = {job.id: job.owner for job in self._board.jobs.values()}
            data = msgspec.json.encode(viewer.change(change, owners))
            self._encoded[key] = (
                f"id: {self._name}-{change.version}\nevent: change\ndata: ".encode()
                + data
                + b"\n\n"
            )
        return self._encoded[key]
