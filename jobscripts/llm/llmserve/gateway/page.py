"""The routes of the gateway's page in the browser: its files, and the overview, which
:mod:`llmserve.gateway.overview` computes.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request, Response

from llmserve.gateway.access import Access
from llmserve.gateway.overview import Overviews
from llmserve.gateway.responses import json_response
from llmserve.openai_messages import ApiRefusal

STATIC = Path(__file__).with_name("static")
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Suffix of a file → its media type."""
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""Headers of the page: no content from other sites, only the page's own scripts, no frames."""


def page_router(access: Access, overviews: Overviews) -> APIRouter:
    """Return the routes.

    Args:
        access: checks the keys of users. The files need no key, the overview does.
        overviews: the overviews of the gateway.
    """
    router = APIRouter()
    files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in TYPES}

    @router.get("/")
    async def page() -> Response:
        return _file(files, "index.html")

    @router.get("/page/overview")
    async def overview(request: Request) -> Response:
        caller = access.caller(request.headers)
        return json_response(await overviews.of(caller), headers={"cache-control": "no-store"})

    @router.get("/page/{name}")
    async def file(name: str) -> Response:
        if name not in files:
            raise ApiRefusal(404, f"There is no GET /page/{name}.", "not_found")
        return _file(files, name)

    return router


def _file(files: dict[str, bytes], name: str) -> Response:
    return Response(files[name], headers=HEADERS, media_type=TYPES[Path(name).suffix])
