"""The groups of live jobs: how workers check in, leave the old group together, form the new one,
share their state, step, and what a loss does to them.

As in :mod:`malletrain.elastic`:

* All agree on the last step of the old group. It is left after that step, and not before every
  member of the new one has checked in.
* The member that is furthest gives its state to those that are behind.
* A step that a loss has interrupted is given up: by all, or by some where others had done it
  already.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.dst.truth import SNAPSHOT_EVERY, STEP_S, JobTruth

if TYPE_CHECKING:
    from tests.dst.live import LiveWorker

TORN = 0.3
"""How likely it is that some have done the step in which a peer is lost."""


@dataclass(eq=False)
class LiveGroup:
    """The workers of one round of a live job."""

    job: str
    generation: int
    size: int
    came: dict[int, LiveWorker] = field(default_factory=dict)
    """Rank → member that has checked in."""
    entering: list[LiveWorker] = field(default_factory=list)
    members: list[LiveWorker] = field(default_factory=list)
    """In rank order, once it is formed."""
    broken: bool = False
    over: bool = False
    """Whether its members have left it together."""
    stepping: bool = False
    last: bool = False
    """Whether all members have agreed that the present step is the last."""
    steps: int = 0
    store: Any = None
    """The launcher that serves the round's store."""

    @property
    def everyone(self) -> bool:
        """Whether all have checked in."""
        return len(self.came) == self.size

    @property
    def trains(self) -> bool:
        """Whether it makes steps, or would."""
        return bool(self.members) and not self.broken and not self.over


class LiveGroups:
    """The groups of all live jobs. ``trainings``: :class:`tests.dst.training.Trainings`."""

    def __init__(self, trainings: Any) -> None:
        self._trainings = trainings
        self._rng, self._later = trainings.rng, trainings.later
        self._groups: dict[str, dict[int, LiveGroup]] = {}
        self._workers: dict[str, list[LiveWorker]] = {}
        """Job → workers that hold its state, or have held it."""

    def _truth(self, group: LiveGroup) -> JobTruth:
        truth: JobTruth = self._trainings.jobs[group.job]
        return truth

    def group(self, job: str, generation: int, size: int) -> LiveGroup:
        """Return the group of a round."""
        groups = self._groups.setdefault(job, {})
        if generation not in groups:
            groups[generation] = LiveGroup(job, generation, size)
        return groups[generation]

    # --- the way in ---

    def checked_in(self, group: LiveGroup, rank: int, worker: LiveWorker) -> bool:
        """A worker checks in. Return whether all have now."""
        if rank in group.came:
            return False  # The worker of this place has died: the round cannot be formed any more.
        group.came[rank] = worker
        if group.everyone:
            for other in list(group.came.values()):
                if other is not worker:
                    other.go_on()
        return group.everyone

    def enters(self, group: LiveGroup, worker: LiveWorker) -> None:
        """The worker has left its old group and forms this one with the others."""
        group.entering.append(worker)
        if group.broken:
            self._later(self._rng.uniform(0.0, 0.5), worker.interrupted, group)
        elif not all(other.alive for other in group.came.values()):
            self.breaks(group)
        elif len(group.entering) == group.size:
            self._later(self._rng.uniform(0.02, 0.3), self._formed, group)

    def _formed(self, group: LiveGroup) -> None:
        if group.broken:
            return
        trainings, truth = self._trainings, self._truth(group)
        members = [group.came[rank] for rank in range(group.size)]
        trainings.enough(group.job, group.size)
        furthest = max((m.position for m in members if m.has_state), default=None)
        if furthest is None:
            furthest = truth.saved
        self._none_is_further(group, furthest)
        workers = self._workers.setdefault(group.job, [])
        group.members, group.entering = members, []
        trainings.say("training", f"{group.job} round {group.generation} goes on at {furthest:g}")
        for rank, member in enumerate(members):
            member.entered(group, rank, furthest)
            if member not in workers:
                workers.append(member)
        self._alone(group)
        if furthest >= truth.length:
            self._done(group)
        else:
            self.step(group)

    def _none_is_further(self, group: LiveGroup, furthest: float) -> None:
        """Check that no round continues from less progress than the state of a worker that the
        daemon can reach.
        """
        for other in self._workers.get(group.job, []):
            away = self._trainings.excused(other.launcher, now=True)
            if other.alive and other.position > furthest and not away:
                self._trainings.broken(
                    f"{group.job} round {group.generation} goes on at {furthest:g}, and the worker "
                    f"on {other.launcher.node.name} holds {other.position:g}"
                )

    def _away(self, worker: LiveWorker) -> bool:
        return bool(self._trainings.excused(worker.launcher))

    def _alone(self, group: LiveGroup) -> None:
        for other in self._groups[group.job].values():
            living = [m for m in other.members if m.alive and m.group is other]
            waits = any(m.draining for m in living)  # to be stopped
            if other is group or not other.trains or waits or all(map(self._away, living)):
                continue
            self._trainings.broken(
                f"{group.job} trains in rounds {other.generation} and {group.generation} at once"
            )

    # --- steps ---

    def step(self, group: LiveGroup) -> None:
        """Begin one, if all can."""
        if group.trains and not group.stepping and not any(m.draining for m in group.members):
            group.stepping = True
            group.last = any(m.ready_to_go() for m in group.members)
            self._later(STEP_S, self._stepped, group)

    def _stepped(self, group: LiveGroup) -> None:
        if not group.trains:
            return
        truth, first = self._truth(group), group.members[0]
        group.stepping = False
        group.steps += 1
        for member in group.members:
            member.commit(group.size)
        if first.position >= truth.length:
            truth.saved = first.position
            self._done(group)
        elif group.last:
            group.over = True
            for member in group.members:
                member.leaves()
        else:
            number = first.launcher.wanted_drain()
            if group.steps % SNAPSHOT_EVERY == 0 or (number and number != first.served):
                truth.saved = max(truth.saved, first.position)
            if number and number != first.served:
                first.drain(number)
            self.step(group)

    def _done(self, group: LiveGroup) -> None:
        """The training is over: they go together."""
        self._truth(group).finished = group.over = True
        self._trainings.say("training", f"{group.job} is done in round {group.generation}")
        for member in group.members:
            self._later(self._rng.uniform(0.05, 0.4), member.launcher.succeeded, member)

    # --- losses ---

    def gone(self, worker: LiveWorker) -> None:
        """The process has ended."""
        for group in (worker.group, worker.entering):
            if group is not None and not group.over:
                self.breaks(group)

    def breaks(self, group: LiveGroup) -> None:
        """A peer is lost, or has given up: the others notice."""
        if group.broken or group.over:
            return
        group.broken = True
        living = [m for m in group.members if m.alive]
        done: list[LiveWorker] = []
        if group.stepping and living and self._rng.random() < TORN:
            done = self._rng.sample(living, self._rng.randint(1, len(living)))
        for member in living:
            in_s = self._rng.uniform(0.0, 0.5)
            self._later(in_s, member.gives_up, group, member in done)
        for worker in group.entering:
            self._later(self._rng.uniform(0.0, 0.5), worker.interrupted, group)
