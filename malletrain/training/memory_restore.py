"""Restores a snapshot from the nodes' memory: collects the nodes' offers, and distributes the
newest complete snapshot to the nodes that lack it.

Decides with all ranks together, so that all restore the same snapshot.
:mod:`malletrain.training.memory_choice` decides which one is the newest.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from malletrain.memory.folder import NoRoomError, remove, unfinished
from malletrain.memory.peers import SILENCE_S, RemoteKeeper
from malletrain.protocol import env
from malletrain.protocol.job_keys import job_secret
from malletrain.training import owner, report, shard_files, snapshot_file
from malletrain.training.memory_choice import (
    CompleteSnapshot,
    NodeOffer,
    SnapshotTime,
    age_of,
    newest,
    relays,
)
from malletrain.training.memory_tier import MemoryTier
from malletrain.training.owner import Owner
from malletrain.training.ranks import leads_its_node
from malletrain.training.side_group import Team
from malletrain.training.snapshot_file import SnapshotError


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
        self, tier: MemoryTier | None, label: str, path: str, run: Owner, team: Team
    ) -> None:
        self._tier = tier
        self._label = label
        self._path = path
        self._owner = run
        self._team = team
        self._read: dict[str, dict[str, Any]] = {}

    def survey(self) -> Survey:
        """Collect the offers of the nodes.

        Raises:
            Exception: the error of a rank, on all ranks.
        """
        offers = self._team.everywhere(self._offer)
        return self._team.from_rank_0(lambda: _survey_of(offers))

    def _offer(self) -> NodeOffer | None:
        if not leads_its_node():
            return None
        on_disk_payload = snapshot_file.peek(snapshot_file.resumable(self._path))
        run_on_disk = owner.owner_of(on_disk_payload) if on_disk_payload else None
        own = on_disk_payload is not None and (
            run_on_disk is None or run_on_disk.is_same(self._owner)
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
            self._team.everywhere(partial(self._fetch_in_turn, snapshot, turn))

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

        self._team.everywhere(copy)


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
