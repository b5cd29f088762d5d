"""The simulated engine, of whose first run the inner process ends, as that of vLLM may: it answers
on, with an error in each stream, and says at ``/health`` that it is not well.
``FILE [options of the simulated server]``; the file is there from the first run on.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fastapi import FastAPI, Request, Response
from llmserve import simulated_server
from llmserve.live_engine import LiveEngine

ERROR = (
    'data: {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the '
    'root cause.", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
    "data: [DONE]\n\n"
)
"""What vLLM 0.32 answered, with status 200."""
FATAL_TOKENS = 500
"""``max_tokens`` of a request that ends the inner process."""
make_app = simulated_server.make_app


def make_app_that_is_not_well(engine: LiveEngine, model: str, load_s: float) -> FastAPI:
    app = make_app(engine, model, load_s)
    path, has_ended = Path(sys.argv[1]), False
    is_first = not path.exists()
    path.touch()

    @app.middleware("http")
    async def answer(request: Request, call_next) -> Response:
        nonlocal has_ended
        if request.method == "POST" and is_first:
            has_ended = has_ended or (await request.json())["max_tokens"] >= FATAL_TOKENS
        if not has_ended:
            return await call_next(request)
        if request.url.path == "/health":
            return Response(status_code=503)
        return Response(ERROR, media_type="text/event-stream")

    return app


simulated_server.make_app = make_app_that_is_not_well
simulated_server.main(sys.argv[2:])
