"""The numbers of nodes in the past and in the forecast, as clients see them.

Decides how far ahead the forecast is shown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from malletrain.core.node_forecast import nodes_ahead
from malletrain.core.node_history import SPAN_S, NodeHistory
from malletrain.daemon.core import Core
from malletrain.protocol.views import NodeForecastView

DAY = int(86400 / SPAN_S)
"""Spans of a day: as many are told of the past, and of the time to come."""


def operations(core: Core) -> dict[str, Callable[[str, Mapping[str, Any]], Awaitable[Any]]]:
    """What clients may ask."""

    async def forecast(user: str, params: Mapping[str, Any]) -> list[NodeForecastView]:
        return node_forecasts(core.goals.history, core.clock.now())

    return {"forecast": forecast}


def node_forecasts(history: NodeHistory, now: float) -> list[NodeForecastView]:
    """One for each class of nodes. ``now``: on the daemon's clock."""
    return [_of_class(history, name, now) for name in history.classes()]


def _of_class(history: NodeHistory, name: str, now: float) -> NodeForecastView:
    past, there = history.nodes(name), history.now(name)
    last_day = past[-DAY:]
    ahead = nodes_ahead(past, there, DAY)
    return NodeForecastView(
        name,
        there,
        SPAN_S,
        tuple(
            (now - (len(last_day) - k) * SPAN_S, float(nodes)) for k, nodes in enumerate(last_day)
        ),
        tuple(
            (now + (k + 1) * SPAN_S, float(low), float(middle), float(high))
            for k, (low, middle, high) in enumerate(ahead)
        ),
        len(past) * SPAN_S / 3600.0,
    )
