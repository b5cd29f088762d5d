"""Creates the view of past and forecast numbers of nodes for clients.

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
"""Number of spans in a day: the length of the past and of the forecast that are shown."""


def operations(core: Core) -> dict[str, Callable[[str, Mapping[str, Any]], Awaitable[Any]]]:
    """Return name → operation of clients."""

    async def forecast(user: str, params: Mapping[str, Any]) -> list[NodeForecastView]:
        return node_forecasts(core.goals.history, core.clock.now())

    return {"forecast": forecast}


def node_forecasts(history: NodeHistory, now: float) -> list[NodeForecastView]:
    """Return the forecast for each class of nodes. ``now``: time on the daemon's clock, seconds."""
    return [_of_class(history, name, now) for name in history.classes()]


def _of_class(history: NodeHistory, name: str, now: float) -> NodeForecastView:
    past, current_nodes = history.nodes(name), history.now(name)
    last_day = past[-DAY:]
    forecast = nodes_ahead(past, current_nodes, DAY)
    return NodeForecastView(
        name,
        current_nodes,
        SPAN_S,
        tuple(
            (now - (len(last_day) - k) * SPAN_S, float(nodes)) for k, nodes in enumerate(last_day)
        ),
        tuple(
            (now + (k + 1) * SPAN_S, float(low), float(middle), float(high))
            for k, (low, middle, high) in enumerate(forecast)
        ),
        len(past) * SPAN_S / 3600.0,
    )
