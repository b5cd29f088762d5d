"""Which nodes are not leased: those that operators have drained or excluded, all of them while
operators pause leasing, and sick ones. Pure. :mod:`malletrain.core.lease_planner` decides which
leases are taken.

The terms of operators are Slurm's: a *drained* node is released and not leased again until a time,
or until it is resumed.

Decides which nodes are suspected because jobs fail on them, and how long nodes that failed a health
check are not leased. Most failures are the job's own. A node is suspected only if, within a day,
several jobs in a row failed on it whose scripts have made steps on other nodes, and no job
completed there in between. The trials of a sweep count as one job, because one error may affect all
of them. The time for which a sick node is not leased doubles when it fails again, up to a limit. It
is never unlimited, because MalleTrain is not told of repairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

import msgspec

from scavenger.hostlist import named

MIN_FAILED_JOBS = 3
"""Minimum number of different jobs in a row."""
MAX_FAILURE_AGE_S = 86400.0
"""Older failures are ignored."""
MAX_JOBS = 50
"""Maximum number of jobs remembered per node."""
MAX_SCRIPTS = 10_000
NODES_PER_SCRIPT = 2
"""Number of nodes remembered per script: with two, at least one is not the suspected node."""


class FailingNodes:
    """The failing nodes of one machine, since the daemon's start."""

    def __init__(self) -> None:
        self._failed: dict[str, dict[str, tuple[str, float]]] = {}
        """Node → job that failed there → its script and the time."""
        self._works: dict[str, set[str]] = {}
        """Script → nodes on which it has made steps."""
        self.findings: dict[str, str] = {}
        """Detected node → reason as a sentence. The caller deletes an entry after it has reported
        it.
        """

    def works(self, script: str, nodes: Iterable[str]) -> None:
        """Note that a job of this script makes steps on these nodes."""
        worked_on = self._works.pop(script, set())
        for node in nodes:
            if len(worked_on) == NODES_PER_SCRIPT:
                break
            worked_on.add(node)
        self._works[script] = worked_on
        while len(self._works) > MAX_SCRIPTS:
            del self._works[next(iter(self._works))]

    def done(self, nodes: Iterable[str]) -> None:
        """Note that a job has completed on these nodes."""
        for node in nodes:
            self._failed.pop(node, None)

    def failed(self, job: str, script: str, node: str, now: float) -> None:
        """Note that a worker of the job failed by itself on this node, and on no other. ``job``:
        the sweep's name for a trial.
        """
        jobs = self._failed.setdefault(node, {})
        jobs.pop(job, None)
        jobs[job] = script, now
        for old in [name for name, (_, at) in jobs.items() if now - at > MAX_FAILURE_AGE_S]:
            del jobs[old]
        while len(jobs) > MAX_JOBS:
            del jobs[next(iter(jobs))]
        credible = [name for name, (of, _) in jobs.items() if self._works.get(of, set()) - {node}]
        if len(credible) >= MIN_FAILED_JOBS:
            del self._failed[node]
            self.findings[node] = (
                f"{len(credible)} jobs failed on it within a day and none was done, of scripts "
                f"that work on other nodes: {', '.join(credible)}."
            )


@dataclass(frozen=True)
class SickNode:
    """A node that failed a health check."""

    since: float
    """Time of its last failure."""
    until: float
    """Time until which it is not leased."""
    sentence: str
    """Result of the check, for users."""


class SickNodes:
    """The sick nodes of one machine. All times are in seconds.

    Args:
        first_s: time without leases after a first failure.
        most_s: maximum time without leases. A failure this long after the end of the last one
            counts as a first one.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._nodes: dict[str, SickNode] = {}

    def failed(self, node: str, sentence: str, now: float) -> SickNode:
        """Record a failure of the node. Return its record."""
        before = self._nodes.get(node)
        if before is not None and now < before.until:  # a lease from before the first failure
            wait_s = before.until - before.since
        elif before is not None and now < before.until + self._most_s:
            wait_s = min(self._most_s, 2 * (before.until - before.since))
        else:
            wait_s = self._first_s
        self._nodes = {n: s for n, s in self._nodes.items() if now < s.until + self._most_s}
        self._nodes[node] = SickNode(now, now + wait_s, sentence)
        return self._nodes[node]

    def forget(self, node: str) -> None:
        """Drop a node that is reported to be healthy."""
        self._nodes.pop(node, None)

    def remember(self, node: str, sick_node: SickNode) -> None:
        """Restore a record from an earlier process."""
        self._nodes[node] = sick_node

    def now(self, now: float) -> dict[str, SickNode]:
        """Return the nodes that are not leased at this time."""
        return {name: node for name, node in self._nodes.items() if now < node.until}


EVERY_NODE = "*"
"""Stands for all nodes, including those that appear later."""


class Restriction(msgspec.Struct, frozen=True):
    """A pause, drain or exclusion."""

    by: str
    """Operator who ordered it."""
    since: float
    """Start, seconds since the epoch."""
    until: float | None = None
    """End, seconds since the epoch; None if it lasts until an operator ends it."""
    why: str = ""
    """Reason in the operator's words."""

    def over(self, now: float) -> bool:
        """Return whether its time is over."""
        return self.until is not None and now >= self.until


class Restrictions(msgspec.Struct, frozen=True):
    """All restrictions in force."""

    paused: Restriction | None = None
    """Pause of new leases; None if there is none."""
    drained: Mapping[str, Restriction] = {}
    """Node, or :data:`EVERY_NODE`, → its drain."""
    excluded: Mapping[str, Restriction] = {}
    """Node → its exclusion: no new lease is taken there. An existing lease stays."""

    def refusal(self, node: str) -> str:
        """Return why the node may not be leased, as a sentence; empty if it may."""
        if self.paused is not None:
            return f"Paused{_by(self.paused)}."
        for name in (node, EVERY_NODE):
            if name in self.drained:
                return f"Drained{_by(self.drained[name])}."
        return f"Excluded{_by(self.excluded[node])}." if node in self.excluded else ""

    def sentence(self) -> str:
        """Return all restrictions as sentences; empty if there are none."""
        sentences = []
        if self.paused is not None:
            sentences.append(f"Paused{_by(self.paused)}: nothing new is leased.")
        if EVERY_NODE in self.drained:
            sentences.append(f"All nodes are drained{_by(self.drained[EVERY_NODE])}.")
        for word, restrictions in (("Drained", self.drained), ("Excluded", self.excluded)):
            if names := sorted(name for name in restrictions if name != EVERY_NODE):
                sentences.append(f"{word}: {named(names)}.")
        return " ".join(sentences)

    def pausing(self, hold: Restriction | None) -> Restrictions:
        """Return a copy with this pause, or without a pause."""
        return msgspec.structs.replace(self, paused=hold)

    def draining(self, nodes: Iterable[str], hold: Restriction) -> Restrictions:
        """Return a copy with these nodes drained."""
        return msgspec.structs.replace(self, drained={**self.drained, **dict.fromkeys(nodes, hold)})

    def excluding(self, nodes: Iterable[str], hold: Restriction) -> Restrictions:
        """Return a copy with these nodes excluded."""
        excluded = {**self.excluded, **dict.fromkeys(nodes, hold)}
        return msgspec.structs.replace(self, excluded=excluded)

    def resuming(self, nodes: Iterable[str]) -> Restrictions:
        """Return a copy with these nodes neither drained nor excluded."""
        resumed = set(nodes)
        return msgspec.structs.replace(
            self,
            drained={n: h for n, h in self.drained.items() if n not in resumed},
            excluded={n: h for n, h in self.excluded.items() if n not in resumed},
        )

    def over(self, now: float) -> list[str]:
        """Return the nodes whose drain has reached its end."""
        return sorted(name for name, hold in self.drained.items() if hold.over(now))


def _by(hold: Restriction) -> str:
    until = "" if hold.until is None else f" until {_moment(hold.until)}"
    why = f" ({hold.why})" if hold.why else ""
    return f" by {hold.by}{until}{why}"


def _moment(time: float) -> str:
    return f"{datetime.fromtimestamp(time, timezone.utc):%Y-%m-%d %H:%M} UTC"
