"""The OpenAPI description: schemas of the answers from the views themselves, so that there is one
definition of each.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from malletrain import __version__
from malletrain.protocol.views import (
    EventView,
    JobDetail,
    JobView,
    LogView,
    NodeForecastView,
    NodeView,
    SeriesView,
    UsageView,
)
from malletrain.web.board import BoardChange, MachineView
from malletrain.web.history import HistoryView
from malletrain.web.sweeps import SweepView, TrialView
from malletrain.web.timeline import TimelineView


class Done(msgspec.Struct, frozen=True):
    """Something was done with ``job``; ``sentence`` says what."""

    job: str
    sentence: str


class ApiProblem(msgspec.Struct, frozen=True):
    """Nothing was done. ``error``: why, as a sentence; ``code``: refused | usage | internal |
    unreachable | unauthenticated.
    """

    error: str
    code: str


SHOWN = (
    BoardChange,
    Done,
    EventView,
    HistoryView,
    JobDetail,
    JobView,
    LogView,
    MachineView,
    NodeForecastView,
    NodeView,
    ApiProblem,
    SeriesView,
    SweepView,
    TimelineView,
    TrialView,
    UsageView,
)
MEASURED = (
    ("JobView", "metrics", "additionalProperties"),
    ("SeriesView", "values", "items"),
    ("TrialView", "values", "additionalProperties"),
)
"""Numbers that scripts measured: schema, property, keyword of the values' own schema."""
REF = "#/components/schemas/{name}"
PROBLEMS = {
    400: "The request is not of its form, or asks for what cannot be.",
    401: "The token is missing or wrong.",
    403: "Not from here, or not for this user.",
    404: "There is no such job.",
    405: "The path knows no such method.",
    409: "The daemon refused.",
    421: "Called by a name that this page is not known by.",
    500: "The daemon failed at it; its log says how.",
    503: "No daemon answers.",
}


def answers(shown: Any, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """What a route answers: ``shown`` with ``status`` (None: a stream), or a problem."""
    if shown is None:
        good: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}
    else:
        (schema,), _ = msgspec.json.schema_components((shown,), ref_template=REF)
        good = {"application/json": {"schema": schema}}
    (problem,), _ = msgspec.json.schema_components((ApiProblem,), ref_template=REF)
    bad = {"application/json": {"schema": problem}}
    made: dict[int | str, dict[str, Any]] = {
        code: {"description": sentence, "content": bad} for code, sentence in PROBLEMS.items()
    }
    made[status] = {"description": "As asked.", "content": good}
    return made


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole description, as ``/api/v1/openapi.json`` serves it."""
    if app.openapi_schema is None:
        made = get_openapi(
            title="MalleTrain",
            version=__version__,
            summary="Jobs, nodes and events of one MalleTrain daemon, as one user sees them.",
            routes=app.routes,
        )
        _, components = msgspec.json.schema_components(SHOWN, ref_template=REF)
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(components)
        # A metric that is NaN or infinite is null, as JSON has no number for it.
        for view, field, part in MEASURED:
            schemas[view]["properties"][field][part] = {"type": ["number", "null"]}
        for path in made["paths"].values():
            for operation in path.values():
                # Such problems are answered as all others are.
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        app.openapi_schema = made
    return app.openapi_schema
