"""Large answers, encoded once for each version of the board and for all who ask.

Decides nothing about what is in them. A program that has a version already (``If-None-Match``) is
told so instead of getting it again.
"""

from __future__ import annotations

import gzip
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Request, Response

LEAST_PACKED = 1000
"""Bytes under which packing is not worth it."""


class EncodedAnswers:
    """The newest version of each large answer."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(4)
        """Of this server: versions of another one mean nothing."""
        self._plain: dict[str, tuple[int, bytes]] = {}
        self._packed: dict[str, tuple[int, bytes]] = {}

    def answer(
        self, request: Request, what: str, version: int, make: Callable[[], Any]
    ) -> Response:
        """The answer called ``what`` as of ``version`` of the board; ``make``: its data."""
        etag = f'"{self._name}-{what}-{version}"'
        headers = {"cache-control": "no-store", "etag": etag, "vary": "accept-encoding"}
        etags = request.headers.get("if-none-match", "")
        if etag in (each.strip().removeprefix("W/") for each in etags.split(",")):
            return Response(None, 304, headers)
        body = _cached(self._plain, what, version, lambda: msgspec.json.encode(make()))
        if "gzip" in request.headers.get("accept-encoding", "") and len(body) >= LEAST_PACKED:
            plain = body
            body = _cached(self._packed, what, version, lambda: gzip.compress(plain, 1))
            headers["content-encoding"] = "gzip"
        return Response(body, 200, headers, media_type="application/json")


def _cached(
    cache: dict[str, tuple[int, bytes]], what: str, version: int, make: Callable[[], bytes]
) -> bytes:
    entry = cache.get(what)
    if entry is None or entry[0] != version:
        entry = cache[what] = (version, make())
    return entry[1]
