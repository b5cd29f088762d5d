"""Caches large answers, encoded once for each version of the board and for all viewers.

Decides nothing about their contents. A client that has a version already (``If-None-Match``) gets
status 304 instead of the answer.
"""

from __future__ import annotations

import gzip
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Request, Response

MIN_COMPRESSED_BYTES = 1000
"""Minimum size of an answer that is compressed, bytes."""


class EncodedAnswers:
    """The newest version of each large answer."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(4)
        """Random name of this server, because versions of another one are not comparable."""
        self._plain: dict[str, tuple[int, bytes]] = {}
        self._compressed: dict[str, tuple[int, bytes]] = {}

    def answer(
        self, request: Request, name: str, version: int, make: Callable[[], Any]
    ) -> Response:
        """Return a large answer, or status 304 if the client has it already.

        Args:
            request: request of the client.
            name: name of the answer.
            version: version of the board.
            make: returns the data of the answer.
        """
        etag = f'"{self._name}-{name}-{version}"'
        headers = {"cache-control": "no-store", "etag": etag, "vary": "accept-encoding"}
        etags = request.headers.get("if-none-match", "")
        if etag in (each.strip().removeprefix("W/") for each in etags.split(",")):
            return Response(None, 304, headers)
        body = _cached(self._plain, name, version, lambda: msgspec.json.encode(make()))
        if (
            "gzip" in request.headers.get("accept-encoding", "")
            and len(body) >= MIN_COMPRESSED_BYTES
        ):
            plain = body
            body = _cached(self._compressed, name, version, lambda: gzip.compress(plain, 1))
            headers["content-encoding"] = "gzip"
        return Response(body, 200, headers, media_type="application/json")


def _cached(
    cache: dict[str, tuple[int, bytes]], name: str, version: int, make: Callable[[], bytes]
) -> bytes:
    entry = cache.get(name)
    if entry is None or entry[0] != version:
        entry = cache[name] = (version, make())
    return entry[1]
