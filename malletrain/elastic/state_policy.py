"""The policies for the state when the group changes: one for state that every rank has in full, one
for sharded state. :mod:`malletrain.elastic.sharing` and :mod:`malletrain.elastic.sharded.sharing`
carry them out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from malletrain.elastic import abortable, sharing
from malletrain.elastic.group import PLAIN_BACKEND, Group, rehearse
from malletrain.elastic.invited import Invited
from malletrain.elastic.link import Place
from malletrain.elastic.sharded import rehearsal
from malletrain.elastic.sharded import sharing as shards
from malletrain.elastic.sharded.assignment import StatePart, best_order
from malletrain.elastic.sharded.training import ShardedTraining
from malletrain.elastic.training import Training


class WholeState:
    """The policy for state that every rank has in full."""

    sharded = False
    """Whether the state is sharded. If so, a single process needs a group as well, leavers hand
    over their shards, and torch exchanges the gradients.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._on_cpu = training.device.type == "cpu"
        self.backend = abortable.BACKEND if self._on_cpu else PLAIN_BACKEND
        """Backend of the groups. With GPUs it is the plain one, because torch would use the
        abortable one for all devices, instead of NCCL.
        """

    def rehearse(self) -> None:
        """Run the code of a change of the group once, without peers, so that it is warm when the
        other ranks wait for it.
        """
        rehearse()

    @property
    def joins(self) -> bool:
        """Whether this process calls :meth:`rehearse_at` when it knows its rank."""
        return False

    def rehearse_at(self, place: Place) -> None:
        """Run once, without peers, the code whose results are cached per rank."""

    def holding(self) -> str | None:
        """Returns a description of the state of this process for :meth:`order`, which the members
        of the next round exchange; None if they exchange none.
        """
        return None

    def order(self, holdings: list[str]) -> list[int]:
        """Returns the rank of each member of the next round, given their :meth:`holding`."""
        return list(range(len(holdings)))

    def hand_over(self, group: Group, invited: Callable[[int], Invited]) -> bool:
        """Move state from the leavers to the ranks that stay. Called on all ranks of a group before
        they leave it. Returns False if the group is not to be left now.

        Args:
            group: the group that is about to be left.
            invited: returns what this process knows of the next round. If that round has the
                generation that it is called with, it waits until all members have checked in.
        """
        return True

    def share(self, group: Group) -> None:
        """Give all ranks of a new group the state that they need."""
        sharing.share(self._training, group)


class ShardedState(WholeState):
    """The policy for sharded state."""

    sharded = True

    def __init__(self, training: ShardedTraining) -> None:
        super().__init__(training)
        self._sharded = training

    def rehearse(self) -> None:
        if self._on_cpu:
            rehearsal.rehearse(self._sharded, self.backend)
        else:  # the sharded rehearsal is not tested on GPUs
            super().rehearse()

    @property
    def joins(self) -> bool:
        training = self._sharded
        return self._on_cpu and not training.has_state and not training.is_hsdp

    def rehearse_at(self, place: Place) -> None:
        rehearsal.rehearse_at(self._sharded, place)

    def holding(self) -> str:
        part = self._sharded.holding()
        return json.dumps(None if part is None else [part.part, part.parts, part.rows])

    def order(self, holdings: list[str]) -> list[int]:
        parts = [json.loads(text) for text in holdings]
        return best_order(
            [
                None if p is None else StatePart(p[0], p[1], tuple((n, b) for n, b in p[2]))
                for p in parts
            ]
        )

    def hand_over(self, group: Group, invited: Callable[[int], Invited]) -> bool:
        return shards.hand_over(self._sharded, group, invited)

    def share(self, group: Group) -> None:
        size = group.place.size
        in_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        shards.share_shards(self._sharded, group, in_node if self._sharded.is_hsdp else size)


def state_policy(training: Training) -> WholeState:
    """Returns the policy for the state of ``training``."""
    if isinstance(training, ShardedTraining):
        return ShardedState(training)
    return WholeState(training)
