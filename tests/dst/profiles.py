"""Invariants of profiles: one at a time, each over in time, no donor with fewer nodes than its
minimum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from malletrain.core.events import JobState
from malletrain.protocol.event_kinds import EventKind
from tests.dst.head import MAX_PROFILE_S

if TYPE_CHECKING:
    from tests.dst.world import World

LATE_S = 3.0
"""Maximum time by which a profile may be seen to end late, seconds."""


class ProfileInvariants:
    """Checks one world by the daemon's audit log and its records of jobs."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen = 0
        """The newest event that was read."""
        self._daemon = 0
        """Number of the daemon's start; a profile does not outlive the daemon."""
        self._profiled = ""
        """The job that is being profiled."""
        self._since = 0.0

    def look(self, controller: Any) -> None:
        """Check the invariants that hold at any time."""
        world, now = self._world, self._world.loop.time()
        for event in world.head.store.events_since(self._seen):
            self._seen = event.seq
            self._happened(event)
        if self._daemon != world.head.restarts:
            self._daemon, self._profiled = world.head.restarts, ""
        jobs = controller.jobs
        under_way = [job for job, each in jobs.items() if each.state is JobState.PROFILING]
        if len(under_way) > 1:
            world.fail(f"{' and '.join(under_way)} are profiled at once")
        if self._profiled and now - self._since > MAX_PROFILE_S + LATE_S:
            world.fail(f"{self._profiled} has been profiled for {now - self._since:.0f} s")

    def _happened(self, event: Any) -> None:
        world, job = self._world, event.job
        if event.kind == EventKind.CLOCK_SET:
            self._profiled = ""  # the daemon has begun anew
        elif event.kind == EventKind.PROFILE_STARTED:
            if self._profiled and self._daemon == world.head.restarts:
                world.fail(f"a profile of {job} begins, and that of {self._profiled} goes on")
            world.profiles_begun += 1
            self._profiled, self._since = job, world.loop.time()
        elif event.kind in (EventKind.PROFILE_FINISHED, EventKind.PROFILE_WAITING):
            self._profiled = "" if job == self._profiled else self._profiled
        elif event.kind == EventKind.NODES_DONATED:
            spec = world.trainings.jobs[job].spec
            world.donated += 1
            if event.data["nodes"] < world.trainings.least[spec.name]:
                world.fail(f"{job} gave nodes to a profile and kept {event.data['nodes']}")

    def at_the_end(self) -> None:
        """Check the invariants that hold once everything has come to rest."""
        for event in self._world.head.store.events_since(self._seen):
            self._happened(event)
        if self._profiled and self._daemon == self._world.head.restarts:
            self._world.fail(f"the profile of {self._profiled} has not ended")
