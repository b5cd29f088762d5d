"""Builds the OpenAPI description. The schemas of answers are derived from the views, so that each
has only one definition.
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
from malletrain.web.history import HistoryView, TimelineView
from malletrain.web.poller import BoardChange, MachineView
from malletrain.web.sweeps import SweepView, TrialView


class Done(msgspec.Struct, frozen=True):
    """A change of ``job`` succeeded; ``sentence`` describes it."""

    job: str
    sentence: str


class ApiProblem(msgspec.Struct, frozen=True):
    """A request failed. ``error``: why, as a sentence; ``code``: refused | usage | quota |
    internal | unreachable | unauthenticated.
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
"""Numbers measured by scripts: schema, property, keyword of the values' own schema."""
REF = "#/components/schemas/{name}"
PROBLEMS = {
    400: "The request is malformed or invalid.",
    401: "The token is missing or wrong.",
    403: "Not from here, or not for this user.",
    404: "There is no such job.",
    405: "The path has no such method.",
    409: "The daemon refused.",
    421: "The name in the request is not one of this page.",
    500: "The daemon failed to handle it; its log has the cause.",
    503: "No daemon answers.",
}


def answers(shown: Any, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a route: a view with its status, or a problem. ``shown``: class of
    the view; None for a stream.
    """
    if shown is None:
        content: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}
    else:
        (schema,), _ = msgspec.json.schema_components((shown,), ref_template=REF)
        content = {"application/json": {"schema": schema}}
    (problem,), _ = msgspec.json.schema_components((ApiProblem,), ref_template=REF)
    problem_content = {"application/json": {"schema": problem}}
    responses: dict[int | str, dict[str, Any]] = {
        code: {"description": sentence, "content": problem_content}
        for code, sentence in PROBLEMS.items()
    }
    responses[status] = {"description": "As asked.", "content": content}
    return responses


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the whole description, served as ``/api/v1/openapi.json``."""
    if app.openapi_schema is None:
        description = get_openapi(
            title="MalleTrain",
            version=__version__,
            summary="Jobs, nodes and events of one MalleTrain daemon, as one user sees them.",
            routes=app.routes,
        )
        _, components = msgspec.json.schema_components(SHOWN, ref_template=REF)
        schemas = description.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(components)
        # A metric that is NaN or infinite is null, because JSON has no such number.
        for view, field, part in MEASURED:
            schemas[view]["properties"][field][part] = {"type": ["number", "null"]}
        for path in description["paths"].values():
            for operation in path.values():
                # Validation errors are answered like all other problems.
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        app.openapi_schema = description
    return app.openapi_schema
