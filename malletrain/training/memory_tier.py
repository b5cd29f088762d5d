"""The snapshots of one run in the memory of the nodes.

:class:`MemoryTier` is the memory of this node. Decides the names of snapshots, checks them before
they are offered to other nodes, and removes older ones. :mod:`malletrain.memory.peers` sends files
to other nodes.

:class:`MemoryRestore` collects the nodes' offers, and distributes the newest complete snapshot to
the nodes that lack it. Decides with all ranks together, so that all restore the same snapshot.
Snapshots are ordered by the round that took them, then by the steps done. So a snapshot of an older
round, on a node that was not in the later ones, never precedes a later one.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from malletrain.memory.folder import MemoryFolder, NoRoomError, remove, unfinished
from malletrain.memory.peers import SILENCE_S, RemoteKeeper
from malletrain.protocol import env
from malletrain.protocol.job_keys import job_secret
from malletrain.training import owner, report, shard_files, snapshot_file
from malletrain.training.disk_tier import snapshot_index
from malletrain.training.owner import RunIdentity
from malletrain.training.ranks import leads_its_node
from malletrain.training.side_group import Team
from malletrain.training.snapshot_file import SnapshotError

FILE = ".pt"
_OVERHEAD_BYTES = 1 << 14
"""Bytes to reserve for a snapshot file in addition to its tensors."""


class SnapshotTime(NamedTuple):
    """Identifies a snapshot by when it was taken. A larger moment is newer."""

    generation: int
    """Number of the round."""
    steps: int
    """Number of steps done since the beginning of the run."""
    milliseconds: int
    """Time on the node that took it, milliseconds since the epoch."""
    rank: int
    """Rank that took it."""

    def __str__(self) -> str:
        return "-".join(map(str, self))

    @property
    def age(self) -> tuple[int, int]:
        """(generation, steps), for comparisons. Larger is newer."""
        return self.generation, self.steps

    @classmethod
    def parse(cls, text: str) -> SnapshotTime | None:
        """Return the moment of which ``text`` is the ``str()``; None if there is none."""
        parts = text.split("-")
        return cls(*map(int, parts)) if len(parts) == 4 and all(map(str.isdigit, parts)) else None


def age_of(payload: Mapping[str, Any]) -> tuple[int, int]:
    """Return the age of a snapshot, as :attr:`SnapshotTime.age`."""
    return int(payload.get("generation", 0)), int(payload.get("steps", 0))


@dataclass(frozen=True)
class NodeSnapshot:
    """The good files of one snapshot on one node."""

    moment: SnapshotTime
    """Time of the snapshot."""
    files: frozenset[str]
    """Names of its shard files on the node."""
    needed: frozenset[str] = frozenset()
    """Names of all its shard files."""
    size: int = 0
    """Size of the snapshot file, bytes."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Size of each shard file in ``needed``, bytes."""


@dataclass(frozen=True)
class NodeOffer:
    """The snapshots that a node can offer."""

    address: str
    """Address of its keeper; empty if it has none, and hence no memory for snapshots."""
    snapshots: tuple[NodeSnapshot, ...] = ()
    """Snapshots in its memory."""
    on_disk: tuple[tuple[int, int], str] | None = None
    """(age, id) of the newest snapshot that it sees on disk; None if it sees none."""


@dataclass(frozen=True)
class CompleteSnapshot:
    """The newest snapshot of which the nodes together have all files."""

    moment: SnapshotTime
    """Time of the snapshot."""
    holders: tuple[str, ...]
    """Addresses of the keepers that have the snapshot file."""
    files: dict[str, str] = field(default_factory=dict)
    """Address of a keeper that has the file, by name of the shard file."""
    size: int = 0
    """Size of the snapshot file, bytes."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Size of each shard file, bytes."""


def newest(offers: Sequence[NodeOffer]) -> CompleteSnapshot | None:
    """Return the newest snapshot of which the nodes together have all files; None if there is none.

    Args:
        offers: offers of the nodes, in the order of ranks.
    """
    moments = {snapshot.moment for offer in offers for snapshot in offer.snapshots}
    for moment in sorted(moments, key=_order, reverse=True):
        offers_of_moment = [
            (o.address, h) for o in offers for h in o.snapshots if h.moment == moment
        ]
        files = {
            name: address
            for address, snapshot in reversed(offers_of_moment)
            for name in snapshot.files
        }
        if set(offers_of_moment[0][1].needed) <= set(files):
            snapshot = offers_of_moment[0][1]
            return CompleteSnapshot(
                moment, tuple(a for a, _ in offers_of_moment), files, snapshot.size, snapshot.sizes
            )
    return None


def _order(moment: SnapshotTime) -> tuple[int, int, int, int]:
    # Ranks that saved at the same step have the same state; the first rank's is used.
    return (*moment.age, -moment.rank, moment.milliseconds)


def relays(holders: Iterable[str], wanting: Iterable[str]) -> list[dict[str, str]]:
    """Plan the distribution of a file, in turns. In each turn, a node that has it gives it to one
    other node.

    Args:
        holders: keepers that have the file.
        wanting: keepers that need it.

    Returns:
        For each turn: source by fetching keeper.
    """
    have = list(dict.fromkeys(holders))
    remaining = [keeper for keeper in dict.fromkeys(wanting) if keeper not in have]
    turns: list[dict[str, str]] = []
    while remaining and have:
        turn = dict(zip(remaining, have, strict=False))
        remaining = remaining[len(turn) :]
        have += turn
        turns.append(turn)
    return turns


def superseded(moments: Iterable[SnapshotTime], complete: SnapshotTime) -> list[SnapshotTime]:
    """Return the moments that are no longer needed once the snapshot ``complete`` is in place."""
    return [moment for moment in moments if _order(moment) < _order(complete)]


class MemoryTier:
    """The snapshots of one run in the node's folder.

    Args:
        folder: folder of the job on this node.
        label: name that distinguishes the run from others of the job (:func:`label_of`).
        address: address of the node's keeper.
    """

    def __init__(self, folder: MemoryFolder, label: str, address: str) -> None:
        self.folder = folder
        self.address = address
        self.label = label
        self.home = folder.path / label

    @classmethod
    def of_this_node(cls, label: str) -> MemoryTier | None:
        """Return the tier in the folder that the agent has created. None without such a folder, or
        without a keeper that serves it to other nodes (for example under torchrun).
        """
        folder, limit = os.environ.get(env.MEMORY, ""), os.environ.get(env.MEMORY_LIMIT, "0")
        keeper = os.environ.get(env.KEEPER, "")
        if not keeper or not folder or not limit.isdigit() or not os.path.isdir(folder):
            return None
        return cls(MemoryFolder(Path(folder), int(limit)), label, keeper)

    # --- names ---

    def name(self, moment: SnapshotTime, file: str = "") -> str:
        """Return the keepers' name of the snapshot of ``moment``, or of one of its shard files."""
        return f"{self.label}/{moment}/{file}" if file else f"{self.label}/{moment}{FILE}"

    def file(self, moment: SnapshotTime) -> Path:
        """Return the path of the snapshot file."""
        return self.folder.file(self.name(moment))

    def shards(self, moment: SnapshotTime) -> Path:
        """Return the folder of its shards."""
        return self.home / str(moment)

    def moments(self) -> list[SnapshotTime]:
        """Return the moments of the snapshot files here, newest first."""
        moments_ = (
            SnapshotTime.parse(path.name.removesuffix(FILE)) for path in self.home.glob(f"*{FILE}")
        )
        return sorted((moment for moment in moments_ if moment is not None), reverse=True)

    # --- write ---

    def write(self, moment: SnapshotTime, payload: dict[str, Any]) -> int:
        """Write a snapshot file: a whole snapshot, or the part that is the same for all shards.
        Return its size, bytes.

        Raises:
            NoRoomError, OSError: it cannot be written; the snapshots here are unchanged.
        """
        self.home.mkdir(mode=0o700, exist_ok=True)
        self.folder.claim(tensor_bytes(payload) + _OVERHEAD_BYTES)
        final = self.file(moment)
        temporary = unfinished(final)
        try:
            with open(temporary, "xb") as file:
                size = snapshot_file.write_to(file, payload)
            os.replace(temporary, final)
        except BaseException:
            remove(temporary)
            raise
        return size

    def begin(self) -> None:
        """Remove unfinished files of killed workers, and shards without a snapshot file. Only one
        process of the node calls it, while no other process writes.
        """
        self.folder.remove_unfinished()
        names = {str(moment) for moment in self.moments()}
        if self.home.is_dir():
            for path in self.home.iterdir():
                if path.is_dir() and path.name not in names:
                    remove(path)

    def remove_superseded(self, complete: SnapshotTime) -> None:
        """Remove the snapshots that are not needed once the snapshot ``complete`` is in place."""
        for moment in superseded(self.moments(), complete):
            self.drop(moment)

    def drop(self, moment: SnapshotTime) -> None:
        """Remove one snapshot and its shards."""
        remove(self.file(moment))
        remove(self.shards(moment))

    # --- read ---

    def snapshots(self) -> list[tuple[NodeSnapshot, dict[str, Any]]]:
        """Return the good snapshots, newest first, each with its payload. Damaged files are
        removed, and the user gets a message.
        """
        snapshots = []
        for moment in self.moments():
            name = str(self.file(moment))
            try:
                payload = snapshot_file.read(name)
                needed = payload.get(shard_files.KEY, {}).get("files", {})
                good_files = self._good_files(moment, needed)
                size = os.path.getsize(name)
            except (SnapshotError, OSError) as error:
                report.tell(f"A snapshot in this node's memory is passed over: {error}")
                self.drop(moment)
                continue
            sizes = {file: length for file, (length, _) in needed.items()}
            snapshot = NodeSnapshot(moment, frozenset(good_files), frozenset(needed), size, sizes)
            snapshots.append((snapshot, payload))
        return snapshots

    def _good_files(self, moment: SnapshotTime, needed: Mapping[str, tuple[int, int]]) -> list[str]:
        good = []
        for file, (size, total) in needed.items():
            path = self.shards(moment) / file
            if not path.exists():
                continue
            if sum_of(path) == (size, total):
                good.append(file)
            else:
                report.tell(
                    f"A part of a snapshot in this node's memory is damaged and passed over: {path}"
                )
                remove(path)
        return good


def label_of(run: RunIdentity, path: str) -> str:
    """Return the keepers' name for the snapshots of a run: a hash of its script, its arguments, and
    the number of the Snapshot object. It is the same on all nodes, even if their folders on disk
    differ.
    """
    text = f"{run.script} {run.arguments} {snapshot_index(path)}"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def tensor_bytes(value: Any) -> int:
    """Return the bytes of the tensors in ``value``, with some bytes for other entries."""
    if isinstance(value, Mapping):
        return sum(map(tensor_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(tensor_bytes, value))
    if hasattr(value, "element_size") and hasattr(value, "numel"):
        return int(value.numel()) * int(value.element_size())
    return len(value) if isinstance(value, bytes | str) else 32


def sum_of(path: Path) -> tuple[int, int]:
    """Return (size in bytes, CRC-32) of a file."""
    return shard_files.sum_of(str(path))


def moment_now(generation: int, steps: int, rank: int) -> SnapshotTime:
    """Return the moment of a snapshot that is about to be taken.

    Args:
        generation: number of the round.
        steps: number of steps done since the beginning of the run.
        rank: rank of this process.
    """
    return SnapshotTime(generation, steps, int(time.time() * 1000), rank)


__all__ = ["MemoryTier", "NoRoomError", "label_of", "moment_now", "sum_of", "tensor_bytes"]


def peer(address: str, silence_s: float = SILENCE_S) -> RemoteKeeper:
    """Connect to the keeper at ``address`` of this process's job. It counts as lost after
    ``silence_s`` seconds without a message.
    """
    return RemoteKeeper(address, job_secret(), os.environ.get(env.JOB, ""), silence_s)


@dataclass(frozen=True)
class Survey:
    """The snapshots from which the job can resume."""

    newest: CompleteSnapshot | None
    """Newest complete snapshot in memory; None if there is none."""
    addresses: tuple[str, ...]
    """Addresses of the keepers of all nodes, in the order of ranks."""
    disk: tuple[int, int] | None
    """Age of the newest snapshot on disk; None if there is none."""
    disk_at: str
    """Address of the keeper of a node that sees it, if not all nodes do; empty if all nodes see it
    or there is none.
    """


class MemoryRestore:
    """One restore. Collective: every rank makes the same calls.

    Args:
        tier: snapshots in this node's memory; None if it has no memory for them.
        label: label of the run (:func:`malletrain.training.memory_tier.label_of`).
        path: path of the snapshots on disk.
        run: the run. Only its own snapshots on disk take precedence over those in memory.
        team: all ranks.
    """

    def __init__(
        self, tier: MemoryTier | None, label: str, path: str, run: RunIdentity, team: Team
    ) -> None:
        self._tier = tier
        self._label = label
        self._path = path
        self._run = run
        self._team = team
        self._read: dict[str, dict[str, Any]] = {}

    def survey(self) -> Survey:
        """Collect the offers of the nodes.

        Raises:
            Exception: the error of a rank, on all ranks.
        """
        offers = self._team.run_on_all(self._offer)
        return self._team.from_rank_0(lambda: _survey_of(offers))

    def _offer(self) -> NodeOffer | None:
        if not leads_its_node():
            return None
        on_disk_payload = snapshot_file.peek(snapshot_file.resumable(self._path))
        run_on_disk = owner.owner_of(on_disk_payload) if on_disk_payload else None
        own = on_disk_payload is not None and (
            run_on_disk is None or run_on_disk.is_same(self._run)
        )
        on_disk = (
            (age_of(on_disk_payload), str(on_disk_payload.get("id")))
            if on_disk_payload and own
            else None
        )
        if self._tier is None:
            return NodeOffer("", (), on_disk)
        self._tier.begin()
        snapshots = self._tier.snapshots()
        self._read = {str(snapshot.moment): payload for snapshot, payload in snapshots}
        return NodeOffer(self._tier.address, tuple(snapshot for snapshot, _ in snapshots), on_disk)

    def distribute(self, snapshot: CompleteSnapshot, addresses: tuple[str, ...]) -> None:
        """Copy the snapshot file to every node that has memory for it."""
        wanting = [a for a in addresses if a]
        for turn in relays(snapshot.holders, wanting):
            self._team.run_on_all(partial(self._fetch_in_turn, snapshot, turn))

    def _fetch_in_turn(self, snapshot: CompleteSnapshot, turn: Mapping[str, str]) -> None:
        tier = self._tier
        source = turn.get(tier.address) if tier is not None and tier.address else None
        if tier is None or source is None or not leads_its_node():
            return
        final = tier.file(snapshot.moment)
        try:
            tier.folder.claim(snapshot.size)
        except NoRoomError:
            return  # it is fetched without this node's memory, see payload()
        final.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = unfinished(final)
        try:
            with open(temporary, "wb") as file, peer(source) as remote:
                pieces = [(0, snapshot.size)]
                remote.fetch(tier.name(snapshot.moment), pieces, lambda at, data: file.write(data))
            snapshot_file.read(str(temporary))
            os.replace(temporary, final)
        except BaseException:
            remove(temporary)
            raise

    def payload(self, snapshot: CompleteSnapshot) -> tuple[dict[str, Any], str]:
        """Return (snapshot, name for messages), from this process, this node or another node."""
        if payload_ := self._read.get(str(snapshot.moment)):
            return payload_, self._name(snapshot)
        if self._tier is not None and (local_file := self._tier.file(snapshot.moment)).exists():
            return snapshot_file.read(str(local_file), check=False), str(local_file)
        with tempfile.NamedTemporaryFile(prefix="malletrain-") as file:
            with peer(snapshot.holders[0]) as remote:
                name = f"{self._label}/{snapshot.moment}.pt"
                remote.fetch(name, [(0, snapshot.size)], lambda at, data: file.write(data))
            file.flush()
            return snapshot_file.read(file.name), self._name(snapshot)

    def _name(self, snapshot: CompleteSnapshot) -> str:
        return (
            str(self._tier.file(snapshot.moment)) if self._tier else f"{snapshot.moment} in memory"
        )

    def copy_from_disk(self, holder: str) -> None:
        """Copy the snapshot that only ``holder`` sees on disk into its memory. If that fails, the
        user gets a message. Collective.
        """

        def copy() -> None:
            tier = self._tier
            if tier is None or tier.address != holder or not leads_its_node():
                return
            try:
                payload = snapshot_file.read(snapshot_file.resumable(self._path))
                if payload.get(shard_files.KEY):
                    return  # its shards are on the same disk, too
                generation, steps = age_of(payload)
                moment = SnapshotTime(generation, steps, int(payload.get("time", 0) * 1000), 0)
                tier.write(moment, payload)
            except (SnapshotError, OSError) as error:
                report.tell(f"{self._path} does not go to other nodes by memory: {error}")

        self._team.run_on_all(copy)


def _survey_of(offers: list[NodeOffer | None]) -> Survey:
    nodes = [offer for offer in offers if offer is not None]
    on_disk = {offer.on_disk for offer in nodes}
    newest_on_disk = max((o.on_disk for o in nodes if o.on_disk), default=None)
    holder = ""
    if newest_on_disk is not None and len(on_disk) > 1:
        holder = next((o.address for o in nodes if o.on_disk == newest_on_disk), "")
    return Survey(
        newest(nodes),
        tuple(o.address for o in nodes),
        newest_on_disk[0] if newest_on_disk else None,
        holder,
    )
