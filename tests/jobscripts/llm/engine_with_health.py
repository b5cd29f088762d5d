"""The simulated engine, which in its first run answers ``/health`` as it is told, and notes it.
``FILE STATUS,STATUS,… [options of the simulated server]``; the last status is repeated. The file
has a line for each answer of the first run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fastapi import FastAPI, Request, Response
from llmserve import simulated_server
from llmserve.live_engine import LiveEngine

make_app = simulated_server.make_app


def make_app_with_health(engine: LiveEngine, model: str, load_s: float) -> FastAPI:
    app = make_app(engine, model, load_s)
    path, statuses = Path(sys.argv[1]), [int(status) for status in sys.argv[2].split(",")]
    is_first, count = not path.exists(), 0
    path.touch()

    def note(status: int) -> None:
        with path.open("a") as file:
            file.write(f"{status}\n")

    @app.middleware("http")
    async def answer(request: Request, call_next) -> Response:
        nonlocal count
        if request.url.path != "/health" or not is_first:
            return await call_next(request)
        status = statuses[min(count, len(statuses) - 1)]
        count += 1
        note(status)
        return Response(status_code=status)

    return app


simulated_server.make_app = make_app_with_health
simulated_server.main(sys.argv[3:])
