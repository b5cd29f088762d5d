"""The jobs' own work, as it truly is: groups of workers in restart mode, samples, snapshots on the
disk.

The workers of a round train once all its members are up; when one is lost the others notice and
fail. Whatever the daemon believes is compared with this. Groups of live mode are
:mod:`tests.dst.live_groups`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from malletrain.protocol.messages import JobSpec
from tests.dst.live_groups import LiveGroups
from tests.dst.loop import VirtualLoop
from tests.dst.truth import BATCH, SNAPSHOT_EVERY, STEP_S, JobTruth


@dataclass
class Group:
    """The workers of one round of a job. ``size``: its members, as the daemon planned."""

    generation: int
    size: int
    members: list[Any] = field(default_factory=list)
    training: bool = False
    halted: bool = False
    """Whether its workers have served a drain and wait."""
    broken: bool = False
    steps: int = 0
    position: float = 0.0
    """Samples that its state has seen."""
    done: float = 0.0
    """Samples that it has trained."""
    store: Any = None
    """The launcher that serves the round's store; None: no launcher does yet."""


class Trainings:
    """The work of all jobs. ``broken`` is called with violated invariants."""

    def __init__(
        self,
        loop: VirtualLoop,
        rng: Random,
        later: Callable[..., Any],
        say: Callable[[str, str], None],
        broken: Callable[[str], None],
        excused: Callable[..., bool],
    ) -> None:
        self.loop, self.rng, self.later = loop, rng, later
        self.say, self.broken, self.excused = say, broken, excused
        self.jobs: dict[str, JobTruth] = {}
        self.lengths: dict[str, float] = {}
        """Job's name → its samples."""
        self.least: dict[str, int] = {}
        """Job's name → the lowest minimum of nodes that its user ever set."""
        self.live = LiveGroups(self)
        """Groups of the jobs in live mode."""
        self._step_due = False

    def of(self, job: str, spec: JobSpec) -> JobTruth:
        """Return the state of the job; create it at the first call."""
        if job not in self.jobs:
            self.jobs[job] = JobTruth(spec, self.lengths[spec.name])
        return self.jobs[job]

    def group(self, job: str, generation: int, size: int) -> Group:
        """The workers of a round, those that are there."""
        truth = self.jobs[job]
        if generation not in truth.groups:
            truth.groups[generation] = Group(generation, size)
        return truth.groups[generation]

    def up(self, job: str, group: Group, launcher: Any) -> None:
        """The workers of one member are up."""
        truth = self.jobs[job]
        if group.broken:
            self.later(0.1, launcher.peer_lost, group)
            return
        group.members.append(launcher)
        if len(group.members) < group.size:
            return
        self.enough(job, group.size)
        group.training, group.position = True, truth.saved
        self.say("training", f"{job} round {group.generation} trains from {group.position:g}")
        for other in truth.groups.values():
            trains = other.training and not other.broken and not other.halted
            if other is group or not trains or all(map(self.excused, other.members)):
                continue
            self.broken(f"{job} trains in rounds {other.generation} and {group.generation} at once")
        if not self._step_due:
            self._step_due = True
            self.later(STEP_S, self._step)

    def enough(self, job: str, nodes: int) -> None:
        """A round of ``nodes`` nodes begins to train."""
        least = self.least[self.jobs[job].spec.name]
        if nodes < least:
            self.broken(f"{job} trains on {nodes} nodes, and its least are {least}")

    def member_ended(self, job: str, group: Group, launcher: Any) -> None:
        """The workers of one member have ended; its peers notice."""
        if launcher not in group.members:
            return
        group.members.remove(launcher)
        if not group.broken and not self.jobs[job].finished:
            group.broken, group.training = True, False
            for member in list(group.members):
                self.later(self.rng.uniform(0.0, 0.5), member.peer_lost, group)

    def _step(self) -> None:
        self._step_due = False
        for job, truth in self.jobs.items():
            for group in truth.groups.values():
                if group.training and not group.halted and not group.broken:
                    self._one_step(job, truth, group)
                    self._step_due = True
        if self._step_due:
            self.later(STEP_S, self._step)

    def _one_step(self, job: str, truth: JobTruth, group: Group) -> None:
        gained = BATCH * group.size
        group.steps += 1
        group.position += gained
        group.done += gained
        truth.trained += gained
        truth.reached = max(truth.reached, group.position)
        over = group.position >= truth.length
        if over or group.steps % SNAPSHOT_EVERY == 0:
            self.save(truth, group)
        for member in list(group.members):
            member.stepped(group)
        if over:
            group.training, truth.finished = False, True
            self.say("training", f"{job} is done in round {group.generation}")
            for member in list(group.members):
                member.succeeded()

    def save(self, truth: JobTruth, group: Group) -> None:
        """Rank 0 writes a snapshot. An older one does not take the place of a newer one."""
        truth.saved = max(truth.saved, group.position)

    def drained(self, job: str, group: Group) -> None:
        """Rank 0 saves, and all wait."""
        if group.training and not group.broken:
            self.save(self.jobs[job], group)
            group.halted = True

    def drain_over(self, group: Group) -> None:
        """They train on."""
        if group.halted:
            group.halted = False
            if not self._step_due:
                self._step_due = True
                self.later(STEP_S, self._step)
