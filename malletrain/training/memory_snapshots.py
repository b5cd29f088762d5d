"""The snapshots of a run's :class:`malletrain.Snapshot` in the memory of the nodes.

:class:`MemorySnapshots` decides what is saved and which node gets a copy: at a drain a node of the
next round, and periodically another node. If the memory does not suffice, the user gets one message
and the disk is used. It decides nothing about the disk.

:class:`Staging` copies tensors from a GPU to host memory through page-locked buffers, which are
reused for the next snapshot. It starts all copies at once and waits for them once, and does nothing
on a CPU. Tested by ``make test-gpu``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.training import memory_shards, owner, report, shard_files
from malletrain.training import objects as parts
from malletrain.training.memory_tier import (
    CompleteSnapshot,
    MemoryRestore,
    MemoryTier,
    SnapshotTime,
    Survey,
    age_of,
    label_of,
    moment_now,
    tensor_bytes,
)
from malletrain.training.outcomes import Attempt, Outcomes
from malletrain.training.owner import RunIdentity
from malletrain.training.ranks import leads_its_node, rank_and_world
from malletrain.training.sharded_state import is_sharded
from malletrain.training.side_group import Team
from malletrain.training.snapshot_file import SnapshotError
from malletrain.training.step_times import counted_as


class Staging:
    """The page-locked buffers of one run's snapshots."""

    def __init__(self) -> None:
        self._buffers: dict[str, Any] = {}

    def on_host(self, value: Any) -> Any:
        """Return ``value`` with every GPU tensor in it replaced by a copy in host memory. The
        copies are valid until the next call.
        """
        copied: list[Any] = []
        staged = self._copy_to_host(value, "", copied)
        if copied:
            import torch

            for device in {tensor.device for tensor in copied}:
                torch.cuda.synchronize(device)
        return staged

    def _copy_to_host(self, value: Any, name: str, copied: list[Any]) -> Any:
        if getattr(value, "is_cuda", False):
            copied.append(value)
            return self._buffer(value, name).copy_(value.detach(), non_blocking=True)
        if type(value) is dict:
            return {k: self._copy_to_host(v, f"{name}/{k}", copied) for k, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(
                self._copy_to_host(v, f"{name}/{i}", copied) for i, v in enumerate(value)
            )
        return value

    def _buffer(self, tensor: Any, name: str) -> Any:
        import torch

        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._buffers[name] = buffer
        return buffer


FromDisk = Callable[[], dict[str, Any] | None]
HEIR_SILENCE_S = 4.0
"""Maximum time without a message from another node, seconds, at a hand-over: the snapshot must
reach another node, or the disk, within the drain wait.
"""
_ABSENT = (
    "This node keeps no snapshots in memory (outside MalleTrain, under torchrun, without /dev/shm, "
    'or with [jobs] snapshot_memory = "off"): they go to disk.'
)


class MemorySnapshots:
    """The snapshots of one run in memory.

    Args:
        path: path of its snapshots on disk.
        run: the run.
        objects: the script's objects, by name.
        facts: returns the entries of a snapshot other than its objects.
        payload: returns a whole snapshot of the current state.
        all_ranks: returns the team of all ranks.
    """

    def __init__(
        self,
        path: str,
        run: RunIdentity,
        objects: Mapping[str, Any],
        facts: Callable[[], dict[str, Any]],
        payload: Callable[[], dict[str, Any]],
        all_ranks: Callable[[], Team],
    ) -> None:
        self._path = path
        self._run = run
        self._objects = objects
        self._facts = facts
        self._payload = payload
        self._all_ranks = all_ranks
        self._label = label_of(run, path)
        self.tier = MemoryTier.of_this_node(self._label)
        self._staging = Staging()
        self._addresses: tuple[str, ...] = ()
        self.newest: SnapshotTime | None = None
        """Time of the newest complete snapshot in this node's memory; None if there is none."""
        self.bytes = 0
        """Size of the snapshot saved last, bytes."""
        if self.tier is None:
            report.tell(_ABSENT, once="no memory")

    # --- restore ---

    def restore(self, from_disk: FromDisk) -> dict[str, Any] | None:
        """Restore the newest snapshot that is complete in the nodes' memory, unless the disk has a
        newer one. Collective.

        Args:
            from_disk: restores from disk on all ranks; return the snapshot, or None.

        Returns:
            The snapshot that was restored; None if there is none.

        Raises:
            SnapshotError: the snapshots cannot be used.
        """
        team = self._all_ranks()
        restore_ = MemoryRestore(self.tier, self._label, self._path, self._run, team)
        survey = restore_.survey()
        if survey.disk_at and _is_newer(survey.disk, survey.newest):
            restore_.copy_from_disk(survey.disk_at)
            survey = restore_.survey()
        self._addresses = survey.addresses
        snapshot = survey.newest
        if snapshot is None:
            return from_disk()
        if _is_newer(survey.disk, snapshot):
            read: list[dict[str, Any] | None] = []
            try:  # all ranks must be able to read it
                team.run_on_all(lambda: read.append(from_disk()))
                if read[0] is not None and _is_newer(age_of(read[0]), snapshot):
                    return read[0]
            except SnapshotError as error:
                report.tell(f"{error} Going on from memory.")
        return self._load(restore_, survey, snapshot, team)

    def _load(
        self, restore_: MemoryRestore, survey: Survey, snapshot: CompleteSnapshot, team: Team
    ) -> dict[str, Any]:
        restore_.distribute(snapshot, survey.addresses)
        payload, name = restore_.payload(snapshot)
        owner.check(payload, name, self._run, "")
        self.newest = snapshot.moment
        if payload.get(shard_files.KEY):
            memory_shards.restore(
                self._objects, payload, name, self.tier, snapshot, self._label, team
            )
        else:
            parts.restore(self._objects, payload, name)
        if self.tier is not None and leads_its_node():
            for moment in self.tier.moments():
                if moment != snapshot.moment:
                    self.tier.drop(moment)
        return payload

    # --- save ---

    def save(self, steps: int) -> SnapshotTime | None:
        """Save the current state to memory: of this node, or, for a sharded model, of all nodes
        together (collective).

        Args:
            steps: number of steps done since the beginning of the run.

        Returns:
            Time of the snapshot; None if it cannot be saved (the user gets one message).
        """
        moment = moment_now(report.generation(), steps, rank_and_world()[0])
        try:
            if is_sharded(self._objects):
                return self._save_shards(moment)
            if self.tier is None:
                return None
            self.bytes = self.tier.write(moment, self._staging.on_host(self._payload()))
            self.tier.remove_superseded(moment)
        except Exception as error:  # as for the disk: no error may stop the training
            self._tell_once(error)
            return None
        self.newest = moment
        return moment

    def _save_shards(self, moment: SnapshotTime) -> SnapshotTime | None:
        team = self._all_ranks()  # all ranks know since restore() which nodes have memory
        if self.tier is None or not self._addresses or not all(self._addresses):
            return None
        shared: SnapshotTime = team.from_rank_0(lambda: moment)
        self.bytes = memory_shards.save(self.tier, self._objects, self._facts, shared, team)
        return shared

    def _tell_once(self, error: Exception) -> None:
        report.tell(
            f"{_sentence_for(error)} Snapshots go to disk instead.", once=f"memory {type(error)}"
        )

    def settle(self, moment: SnapshotTime) -> None:
        """Remove older snapshots: the one of ``moment`` is complete and in place."""
        self.newest = moment
        if self.tier is not None and leads_its_node():
            reached(FaultPoint.MEMORY_SETTLES)
            self.tier.remove_superseded(moment)

    # --- other nodes ---

    @property
    def is_sharded(self) -> bool:
        """True if each rank holds only a part of the state."""
        return is_sharded(self._objects)

    def bytes_per_node(self) -> int:
        """Return the maximum over the nodes of the bytes of the state that they hold. Collective
        for a sharded model.
        """
        if not self.is_sharded:
            return tensor_bytes(self._payload())
        team, sizes = self._all_ranks(), list[int]()
        sizes += team.run_on_all(lambda: memory_shards.bytes_of_node(self._objects))
        return team.from_rank_0(lambda: max(sizes))

    def all_agree(self, answer: Callable[[], bool | None]) -> bool | None:
        """Combine the results of ``answer`` on all ranks: True if all are true, None if one is
        None, else False. Collective.
        """
        team, answers = self._all_ranks(), list[bool | None]()
        answers += team.run_on_all(answer)
        return team.from_rank_0(lambda: None if None in answers else all(answers))

    @counted_as("snapshot")
    def replicate(self, steps: int) -> bool:
        """Copy the state so that another node has it if this node is lost. Call it on every rank
        after the same step. If every rank holds the whole state, each node saves its own; shards
        are also copied to the next node (collective). Return whether it succeeded.
        """
        if not self.is_sharded:
            return not leads_its_node() or self.save(steps) is not None
        moment = self.save(steps)
        return moment is not None and self._copy_shards(moment, self._neighbour)

    def hand_to_neighbour(self, moment: SnapshotTime) -> None:
        """Copy this node's shards of ``moment`` to the next node. Older copies stay.

        Raises:
            PeerError, OSError: the next node does not accept them.
        """
        if self.tier is not None and leads_its_node():
            to = self._neighbour(self.tier.address)
            memory_shards.hand_over(self.tier, moment, to, HEIR_SILENCE_S)

    def _neighbour(self, address: str) -> str:
        addresses = self._addresses
        return addresses[(addresses.index(address) + 1) % len(addresses)]

    def save_for_drain(self, heirs: tuple[str, ...], steps: int, outcomes: Outcomes) -> bool:
        """Copy the current state to a node of the next round. Collective for sharded models;
        otherwise only rank 0 calls it.

        Args:
            heirs: addresses of the keepers of the next round's nodes, in the order of ranks; only
                rank 0's are used.
            steps: number of steps done.
            outcomes: receives the result.

        Returns:
            Whether the state is there.
        """
        started = time.monotonic()
        if is_sharded(self._objects):
            heirs = self._all_ranks().from_rank_0(lambda: heirs)
        if not heirs or (moment := self.save(steps)) is None:
            return False
        if is_sharded(self._objects):
            addresses = self._addresses
            is_copied = self._copy_shards(
                moment,
                lambda own: own if own in heirs else heirs[addresses.index(own) % len(heirs)],
            )
        else:
            is_copied = self._copy_to_first(moment, heirs)
        if is_copied and rank_and_world()[0] == 0:
            seconds = time.monotonic() - started
            outcomes.report_in_memory(self.bytes, Attempt(seconds, *report.totals()))
        return is_copied

    def copy_to_one_of(self, heirs: tuple[str, ...]) -> bool:
        """Copy the state of the last drain to a node of ``heirs``, if the next round has changed
        since. Return whether it is there. Only for models that are not sharded, on rank 0.
        """
        return self.newest is not None and bool(heirs) and self._copy_to_first(self.newest, heirs)

    def _copy_shards(self, moment: SnapshotTime, target_for: Callable[[str], str]) -> bool:
        def give() -> None:
            if self.tier is not None and leads_its_node():
                to = target_for(self.tier.address)
                if to != self.tier.address:
                    memory_shards.hand_over(self.tier, moment, to, HEIR_SILENCE_S)

        try:
            self._all_ranks().run_on_all(give)
        except Exception as error:
            self._tell_once(error)
            return False
        self.settle(moment)
        return True

    def _copy_to_first(self, moment: SnapshotTime, heirs: tuple[str, ...]) -> bool:
        if self.tier is None or self.tier.address in heirs:
            return self.tier is not None
        for heir in heirs:
            try:
                memory_shards.hand_over(self.tier, moment, heir, HEIR_SILENCE_S)
            except Exception as error:  # the next node may accept it
                report.tell(f"{_sentence_for(error)} Trying another node.")
                continue
            return True
        return False


def _is_newer(disk: tuple[int, int] | None, snapshot: CompleteSnapshot | None) -> bool:
    return disk is not None and (snapshot is None or disk > snapshot.moment.age)


def _sentence_for(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror}: {error.filename}."
    return f"{error}" if str(error).endswith(".") else f"{type(error).__name__}: {error}."
