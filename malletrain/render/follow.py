"""Feeding the live screen from a daemon: one look asks for everything that changed. Decides what is
asked, not how often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from malletrain.protocol.views import EventView, JobView, NodeView, StatusView
from malletrain.render.live import Screen

NEWEST = 200
"""Events of the past that the first look fetches."""
PAGE = 1000


class FollowSource(Protocol):
    """What a look asks; :class:`malletrain.client.Connection` has it."""

    def status(self) -> StatusView: ...
    def jobs(self) -> list[JobView]: ...
    def nodes(self, *, explain: bool = False) -> list[NodeView]: ...
    def events(
        self, *, since: int = 0, limit: int = 500, job: str | None = None, wait_s: float = 0.0
    ) -> list[EventView]: ...


@dataclass(frozen=True)
class Look:
    """What one look saw."""

    status: StatusView
    """The daemon and the machine."""
    jobs: list[JobView]
    """All jobs."""
    nodes: list[NodeView]
    """The nodes that are shown."""
    events: list[EventView]
    """The events that are new."""


class Follower:
    """Keeps ``screen`` up to date. ``client`` may be exchanged after a restart of the daemon;
    events go on where they were.

    ``all_nodes``: show the nodes that the main scheduler uses, too.
    """

    def __init__(self, screen: Screen, client: FollowSource, *, all_nodes: bool = False) -> None:
        self.screen = screen
        self.client = client
        self.all_nodes = all_nodes
        self.since = -NEWEST
        """Number of the last event seen; negative: that many of the newest, to begin with."""

    def look(self) -> list[EventView]:
        """Ask once and update the screen; returns the events that are new. Raises what the client
        raises.
        """
        seen = self.ask()
        self.show(seen)
        return seen.events

    def ask(self) -> Look:
        """Ask once and change nothing on the screen, as another thread may. Raises what the client
        raises.
        """
        status, jobs, nodes = (
            self.client.status(),
            self.client.jobs(),
            self.client.nodes(explain=self.all_nodes),
        )
        fresh: list[EventView] = []
        while page := self.client.events(since=self.since, limit=PAGE):
            fresh += page
            self.since = page[-1].seq
            if len(page) < PAGE:
                break
        return Look(status, jobs, nodes, fresh)

    def show(self, seen: Look) -> None:
        """Update the screen."""
        self.screen.update(seen.status, seen.jobs, seen.nodes, seen.events)
