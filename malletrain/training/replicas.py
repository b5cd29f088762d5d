"""When another node has a copy of what a node holds of the state.

Decides when it is made: after so many steps where the script says so, and by itself, whenever a
snapshot is due, where a node holds more than it can hand over within its notice. What a copy
consists of is :mod:`malletrain.training.memory_snapshots`'s.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from malletrain.protocol import env
from malletrain.protocol.sizes import shown
from malletrain.training import report
from malletrain.training.ranks import nodes, rank_and_world

if TYPE_CHECKING:
    from malletrain.training.memory_moment import Moment
    from malletrain.training.memory_snapshots import MemorySnapshots


class HandOver:
    """Shards on their way to another node while the training goes on."""

    def __init__(self, memory: MemorySnapshots, moment: Moment) -> None:
        self.moment = moment
        """Of the snapshot that they are of."""
        self._memory = memory
        self._failed = False
        # A daemon: a script that ends needs no copy.
        self._thread = threading.Thread(target=self._send, name="malletrain-replica", daemon=True)
        self._thread.start()

    def _send(self) -> None:
        try:
            self._memory.hand_to_neighbour(self.moment)
        # the node is gone, or what was to go there is superseded: the copy of before counts
        except Exception:
            self._failed = True

    def arrived(self) -> bool | None:
        """Whether they have; None while they are on their way."""
        return None if self._thread.is_alive() else not self._failed


class Replicas:
    """Those of one run.

    Args:
        every: steps after which there is one, as the script says; 0: it says nothing.
        memory: of the nodes; None: snapshots go to disk only.
    """

    def __init__(self, every: int, memory: MemorySnapshots | None) -> None:
        self.every = every
        """Steps from one to the next; 0: none, or by themselves."""
        self.exist = every > 0
        """Whether another node has, or is about to have, what a node holds."""
        self._memory = memory
        self._room = _bytes_in_time()
        self._behind: HandOver | None = None

    def after_step(self, steps: int) -> None:
        """Make one if the script wants one after so many ``steps``. Every rank calls it after the
        same step.
        """
        if self._memory is not None and self.every > 0 and steps % self.every == 0:
            self._memory.replicate(steps)

    def with_snapshot(self, steps: int) -> None:
        """Make one if what a node holds cannot be handed over in time. Every rank calls it when a
        snapshot is due; for a sharded model after the same step (collective).

        Shards go to the other node while the training goes on. Until all have arrived the copy of
        before stays; one that takes longer than until the next snapshot is due is waited for.
        """
        memory = self._memory
        if memory is None or self.every or not self._room or nodes() < 2:
            return
        try:
            node_bytes = memory.bytes_per_node()
            self.exist = node_bytes > self._room and self._renew(memory, steps)
        except Exception as error:  # a state that cannot be had stops no training
            self.exist = False
            report.tell(f"No copy on another node: {error}", once=f"no copy {type(error)}")
            return
        if self.exist and rank_and_world()[0] == 0:
            report.tell(
                f"A node holds {shown(node_bytes)} of the state and can hand over "
                f"{shown(self._room)} within its notice: another node has a copy, renewed with "
                "every snapshot.",
                once="copies by themselves",
            )

    def _renew(self, memory: MemorySnapshots, steps: int) -> bool:
        if memory.is_sharded:
            return self._shards(memory, steps)
        return rank_and_world()[0] == 0 or memory.replicate(steps)  # rank 0's node has its own

    def _shards(self, memory: MemorySnapshots, steps: int) -> bool:
        """Begin a new copy once the one before has arrived. Returns whether there is one now, or
        on its way.
        """
        before = self._behind
        if before is not None:
            arrived = memory.agreed(before.arrived)
            if arrived is None:
                return True
            if arrived:
                memory.settle(before.moment)
        moment = memory.save(steps)
        self._behind = HandOver(memory, moment) if moment is not None else None
        return moment is not None


def _bytes_in_time() -> float:
    """How much a node that leaves can hand over, as the daemon reckons; 0: it does not say."""
    try:
        return max(0.0, float(os.environ.get(env.HAND_OVER, "0")))
    except ValueError:
        return 0.0
