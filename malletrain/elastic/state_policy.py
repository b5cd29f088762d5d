"""What a change of the group does with the state: one policy for a state that every rank holds as a
whole, one for a state in shards. :mod:`malletrain.elastic.sharing` and
:mod:`malletrain.elastic.sharded.sharing` carry them out.
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
    """Every rank holds the whole state."""

    sharded = False
    """A group is needed for one process, too; leavers hand over; torch exchanges the gradients."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._on_cpu = training.device.type == "cpu"
        self.backend = abortable.BACKEND if self._on_cpu else PLAIN_BACKEND
        """Of the groups. torch would have the first for all devices, instead of NCCL."""

    def rehearse(self) -> None:
        """Do once, alone, what a change of the group needs, so that it is warm when the others wait
        for it.
        """
        rehearse()

    @property
    def joins(self) -> bool:
        """Whether this process is to :meth:`rehearse_at` the place that a round gives it."""
        return False

    def rehearse_at(self, place: Place) -> None:
        """Do once, alone, what is looked up for this place."""

    def holding(self) -> str | None:
        """What this process tells the members of the next round, for :meth:`order`; None for
        nothing.
        """
        return None

    def order(self, holdings: list[str]) -> list[int]:
        """The rank of each member of the next round, by what they told."""
        return list(range(len(holdings)))

    def hand_over(self, group: Group, invited: Callable[[int], Invited]) -> bool:
        """Called on all ranks of a group that is about to be left; False to stay.

        Args:
            invited: what this process knows of the next round; waits for everyone to be there
                where that is the generation it is called with.
        """
        return True

    def share(self, group: Group) -> None:
        """Have all ranks of a new group hold what they are to hold."""
        sharing.share(self._training, group)


class ShardedState(WholeState):
    """Every rank holds its shards."""

    sharded = True

    def __init__(self, training: ShardedTraining) -> None:
        super().__init__(training)
        self._sharded = training

    def rehearse(self) -> None:
        if self._on_cpu:
            rehearsal.rehearse(self._sharded, self.backend)
        else:  # nobody has tried it
            super().rehearse()

    @property
    def joins(self) -> bool:
        training = self._sharded
        return self._on_cpu and not training.has_state and not training.in_nodes

    def rehearse_at(self, place: Place) -> None:
        rehearsal.rehearse_at(self._sharded, place)

    def holding(self) -> str:
        part = self._sharded.holding()
        return json.dumps(None if part is None else [part.part, part.parts, part.rows])

    def order(self, holdings: list[str]) -> list[int]:
        parts = [json.loads(one) for one in holdings]
        return best_order(
            [
                None if one is None else StatePart(one[0], one[1], tuple((n, b) for n, b in one[2]))
                for one in parts
            ]
        )

    def hand_over(self, group: Group, invited: Callable[[int], Invited]) -> bool:
        return shards.hand_over(self._sharded, group, invited)

    def share(self, group: Group) -> None:
        size = group.place.size
        in_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        shards.share_shards(self._sharded, group, in_node if self._sharded.in_nodes else size)


def state_policy(training: Training) -> WholeState:
    """The policy for the state of ``training``."""
    if isinstance(training, ShardedTraining):
        return ShardedState(training)
    return WholeState(training)
