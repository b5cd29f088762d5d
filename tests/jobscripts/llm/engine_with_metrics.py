"""The simulated engine with metrics of another one: ``FILE [options of the simulated server]``."""

from __future__ import annotations

import sys
from pathlib import Path

from fastapi import FastAPI, Response
from llmserve import simulated_server
from llmserve.live_engine import LiveEngine

make_app = simulated_server.make_app


def make_app_with_metrics(engine: LiveEngine, model: str, load_s: float) -> FastAPI:
    app = make_app(engine, model, load_s)
    text = Path(sys.argv[1]).read_text()
    app.add_api_route("/metrics", lambda: Response(text, media_type="text/plain"))
    return app


simulated_server.make_app = make_app_with_metrics
simulated_server.main(sys.argv[2:])
