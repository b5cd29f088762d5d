"""What a run's :class:`malletrain.Snapshot` does with the memory of the nodes.

Decides what is saved there and what goes to which node: at a drain the state is where the next
round begins, after every so many steps another node has it. Where memory does not suffice it says
so once, and the disk is used. It decides nothing about the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.training import memory_shards, owner, report, shard_files
from malletrain.training import objects as parts
from malletrain.training.memory_moment import CompleteSnapshot, Moment, age_of
from malletrain.training.memory_restore import MemoryRestore, Survey
from malletrain.training.memory_tier import MemoryTier, label_of, moment_now, tensor_bytes
from malletrain.training.outcomes import Attempt, Outcomes
from malletrain.training.owner import Owner
from malletrain.training.ranks import leads_its_node, rank_and_world
from malletrain.training.sharded_state import is_sharded
from malletrain.training.side_group import Team
from malletrain.training.snapshot_file import SnapshotError
from malletrain.training.staging import Staging

FromDisk = Callable[[], dict[str, Any] | None]
HEIR_SILENCE_S = 4.0
"""A node that says nothing for so long gets nothing: others, or the disk, are to have it within the
time of a drain.
"""
_ABSENT = (
    "This node keeps no snapshots in memory (outside MalleTrain, under torchrun, without /dev/shm, "
    "or with [jobs] snapshot_memory = 0): they go to disk."
)


class MemorySnapshots:
    """Those of one run.

    Args:
        path: of its snapshots on disk.
        who: the run.
        objects: the script's, by name.
        facts: what a snapshot says beside its objects.
        payload: makes a whole snapshot of this moment.
        all_ranks: the ranks together.
    """

    def __init__(
        self,
        path: str,
        who: Owner,
        objects: Mapping[str, Any],
        facts: Callable[[], dict[str, Any]],
        payload: Callable[[], dict[str, Any]],
        all_ranks: Callable[[], Team],
    ) -> None:
        self._path = path
        self._owner = who
        self._objects = objects
        self._facts = facts
        self._payload = payload
        self._all_ranks = all_ranks
        self._label = label_of(who, path)
        self.tier = MemoryTier.of_this_node(self._label)
        self._staging = Staging()
        self._addresses: tuple[str, ...] = ()
        self.newest: Moment | None = None
        """Of what is in this node's memory and whole."""
        self.bytes = 0
        """Of the snapshot saved last."""
        if self.tier is None:
            report.tell(_ABSENT, once="no memory")

    # --- restore ---

    def restore(self, from_disk: FromDisk) -> dict[str, Any] | None:
        """Restore the newest that the nodes have together in memory, unless the disk has a newer
        one. Collective.

        Args:
            from_disk: restores from disk on all ranks; returns what it found.

        Returns:
            The snapshot that was restored; None when there is none.

        Raises:
            SnapshotError: what there is cannot be used.
        """
        team = self._all_ranks()
        look = MemoryRestore(self.tier, self._label, self._path, self._owner, team)
        survey = look.survey()
        if survey.disk_at and _is_newer(survey.disk, survey.newest):
            look.take_in(survey.disk_at)
            survey = look.survey()
        self._addresses = survey.addresses
        snapshot = survey.newest
        if snapshot is None:
            return from_disk()
        if _is_newer(survey.disk, snapshot):
            read: list[dict[str, Any] | None] = []
            try:  # what one rank cannot read none goes on from
                team.everywhere(lambda: read.append(from_disk()))
                if read[0] is not None and _is_newer(age_of(read[0]), snapshot):
                    return read[0]
            except SnapshotError as error:
                report.tell(f"{error} Going on from memory.")
        return self._load(look, survey, snapshot, team)

    def _load(
        self, look: MemoryRestore, survey: Survey, snapshot: CompleteSnapshot, team: Team
    ) -> dict[str, Any]:
        look.spread(snapshot, survey.addresses)
        payload, name = look.payload(snapshot)
        owner.check(payload, name, self._owner, "")
        self.newest = snapshot.moment
        if payload.get(shard_files.KEY):
            memory_shards.put_back(
                self._objects, payload, name, self.tier, snapshot, self._label, team
            )
        else:
            parts.put_back(self._objects, payload, name)
        if self.tier is not None and leads_its_node():
            for moment in self.tier.moments():
                if moment != snapshot.moment:
                    self.tier.drop(moment)
        return payload

    # --- save ---

    def save(self, steps: int) -> Moment | None:
        """Have the state of this moment in memory: in that of this node, or, where the model is
        sharded, of all nodes together (collective).

        Args:
            steps: done by now, since the beginning of the run.

        Returns:
            What it is known by; None when it cannot be, which the user was told once.
        """
        moment = moment_now(report.generation(), steps, rank_and_world()[0])
        try:
            if is_sharded(self._objects):
                return self._save_shards(moment)
            if self.tier is None:
                return None
            self.bytes = self.tier.write(moment, self._staging.on_host(self._payload()))
            self.tier.keep_from(moment)
        except Exception as error:  # as for the disk: none may stop the training
            self._tell(error)
            return None
        self.newest = moment
        return moment

    def _save_shards(self, moment: Moment) -> Moment | None:
        team = self._all_ranks()  # who has a memory all ranks know alike, since they restored
        if self.tier is None or not self._addresses or not all(self._addresses):
            return None
        shared: Moment = team.from_rank_0(lambda: moment)
        self.bytes = memory_shards.save(self.tier, self._objects, self._facts, shared, team)
        return shared

    def _tell(self, error: Exception) -> None:
        report.tell(
            f"{_sentence(error)} Snapshots go to disk instead.", once=f"memory {type(error)}"
        )

    def settle(self, moment: Moment) -> None:
        """``moment`` is whole wherever it has to be: older ones go."""
        self.newest = moment
        if self.tier is not None and leads_its_node():
            reached(FaultPoint.MEMORY_SETTLES)
            self.tier.keep_from(moment)

    # --- other nodes ---

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the state."""
        return is_sharded(self._objects)

    def bytes_per_node(self) -> int:
        """Bytes of the state that a node holds, at most. Collective for a sharded model."""
        if not self.is_sharded:
            return tensor_bytes(self._payload())
        team, sizes = self._all_ranks(), list[int]()
        sizes += team.everywhere(lambda: memory_shards.bytes_of_node(self._objects))
        return team.from_rank_0(lambda: max(sizes))

    def agreed(self, seen: Callable[[], bool | None]) -> bool | None:
        """What all ranks have ``seen`` together: True if all did, None while one does not know.
        Collective.
        """
        team, answers = self._all_ranks(), list[bool | None]()
        answers += team.everywhere(seen)
        return team.from_rank_0(lambda: None if None in answers else all(answers))

    def replicate(self, steps: int) -> bool:
        """Have another node hold what this node would lose. Call it on every rank after the same
        step. Where every rank holds everything, each node saves its own; shards go to the next
        node, too (collective). Returns whether it could be done.
        """
        if not self.is_sharded:
            return not leads_its_node() or self.save(steps) is not None
        moment = self.save(steps)
        return moment is not None and self._to_others(moment, self._neighbour)

    def hand_to_neighbour(self, moment: Moment) -> None:
        """Give what this node has of the shards of ``moment`` to the next one; older ones stay.

        Raises:
            PeerError, OSError: it does not take it.
        """
        if self.tier is not None and leads_its_node():
            to = self._neighbour(self.tier.address)
            memory_shards.hand_over(self.tier, moment, to, HEIR_SILENCE_S)

    def _neighbour(self, own: str) -> str:
        order = self._addresses
        return order[(order.index(own) + 1) % len(order)]

    def drained(self, heirs: tuple[str, ...], steps: int, outcomes: Outcomes) -> bool:
        """Have the state of this moment where the next round begins. Collective for sharded models,
        else for rank 0 alone.

        Args:
            heirs: keepers of the nodes of the next round, the first rank's first; rank 0's count.
            steps: done by now.
            outcomes: hears of it.

        Returns:
            Whether it is there.
        """
        started = time.monotonic()
        if is_sharded(self._objects):
            heirs = self._all_ranks().from_rank_0(lambda: heirs)
        if not heirs or (moment := self.save(steps)) is None:
            return False
        if is_sharded(self._objects):
            order = self._addresses
            there = self._to_others(
                moment, lambda own: own if own in heirs else heirs[order.index(own) % len(heirs)]
            )
        else:
            there = self._give(moment, heirs)
        if there and rank_and_world()[0] == 0:
            seconds = time.monotonic() - started
            outcomes.in_memory(self.bytes, Attempt(seconds, *report.totals()))
        return there

    def wanted_by(self, heirs: tuple[str, ...]) -> bool:
        """Whether other nodes than those of the drain before have the state now, too. Asked of rank
        0 alone, where every rank holds everything.
        """
        return self.newest is not None and bool(heirs) and self._give(self.newest, heirs)

    def _to_others(self, moment: Moment, whom: Callable[[str], str]) -> bool:
        def give() -> None:
            if self.tier is not None and leads_its_node():
                to = whom(self.tier.address)
                if to != self.tier.address:
                    memory_shards.hand_over(self.tier, moment, to, HEIR_SILENCE_S)

        try:
            self._all_ranks().everywhere(give)
        except Exception as error:
            self._tell(error)
            return False
        self.settle(moment)
        return True

    def _give(self, moment: Moment, heirs: tuple[str, ...]) -> bool:
        if self.tier is None or self.tier.address in heirs:
            return self.tier is not None
        for heir in heirs:
            try:
                memory_shards.hand_over(self.tier, moment, heir, HEIR_SILENCE_S)
            except Exception as error:  # the next one may take it
                report.tell(f"{_sentence(error)} Trying another node.")
                continue
            return True
        return False


def _is_newer(disk: tuple[int, int] | None, snapshot: CompleteSnapshot | None) -> bool:
    return disk is not None and (snapshot is None or disk > snapshot.moment.age)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror}: {error.filename}."
    return f"{error}" if str(error).endswith(".") else f"{type(error).__name__}: {error}."
