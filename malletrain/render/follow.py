"""Updates the live screen from a daemon: one look requests everything that changed. Decides what is
requested, not how often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from malletrain.protocol.views import EventView, JobView, NodeView, StatusView
from malletrain.render.live import Screen

INITIAL_EVENTS = 200
"""Number of past events that the first look requests."""
PAGE = 1000


class FollowSource(Protocol):
    """Requests of a poll; :class:`malletrain.client.Connection` implements it."""

    def status(self) -> StatusView: ...
    def jobs(self) -> list[JobView]: ...
    def nodes(self, *, explain: bool = False) -> list[NodeView]: ...
    def events(
        self, *, since: int = 0, limit: int = 500, job: str | None = None, wait_s: float = 0.0
    ) -> list[EventView]: ...


@dataclass(frozen=True)
class PollAnswers:
    """The daemon's answers at one poll."""

    status: StatusView
    """The daemon and the machine."""
    jobs: list[JobView]
    """All jobs."""
    nodes: list[NodeView]
    """Nodes on the screen."""
    events: list[EventView]
    """New events."""


class Follower:
    """Keeps ``screen`` up to date. ``client`` may be replaced after a restart of the daemon; events
    continue from the last position. ``all_nodes``: whether to show the nodes that the main
    scheduler uses, too.
    """

    def __init__(self, screen: Screen, client: FollowSource, *, all_nodes: bool = False) -> None:
        self.screen = screen
        self.client = client
        self.all_nodes = all_nodes
        self.since = -INITIAL_EVENTS
        """Number of the last event read; negative: number of newest events to start with."""

    def update(self) -> list[EventView]:
        """Send the requests once and update the screen; return the new events. Raises the client's
        errors.
        """
        seen = self.ask()
        self.show(seen)
        return seen.events

    def ask(self) -> PollAnswers:
        """Send the requests once without a change of the screen, which is safe in another thread.
        Raises the client's errors.
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
        return PollAnswers(status, jobs, nodes, fresh)

    def show(self, seen: PollAnswers) -> None:
        """Update the screen."""
        self.screen.update(seen.status, seen.jobs, seen.nodes, seen.events)
