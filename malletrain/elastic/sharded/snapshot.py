"""Snapshots of a run whose groups change: all ranks write, at a step that they agree upon.

Decides only with whom: the ranks of the present group, whose collectives can be given up. The rest
is :class:`malletrain.Snapshot`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from malletrain.elastic.errors import ElasticError, is_peer_loss
from malletrain.elastic.group import library_collectives
from malletrain.training.side_group import Team
from malletrain.training.snapshot import Snapshot


class RunSnapshot(Snapshot):
    """See :class:`malletrain.Snapshot`."""

    _caller = "elastic.Run"
    _refusal = ElasticError

    def regroup(self, objects: Mapping[str, Any]) -> None:
        """Another group, with other modules."""
        self._objects = dict(objects)
        self._team = self._agreement = None
        self._looked = False
        self._request = 0
        self._announced = False  # the agent is to know anew that it saves on request

    def _all_ranks(self) -> Team:
        if self._team is None:
            several = dist.is_initialized() and dist.get_world_size() > 1
            self._team = Team(dist.group.WORLD if several else None)
        return self._team

    def _epoch_closed(self) -> None:
        try:
            with library_collectives():
                super()._epoch_closed()
        except RuntimeError as error:  # the next step meets it, too, and leaves the group
            if not is_peer_loss(error):
                raise

    def wait(self) -> None:
        """Nothing is written in the background."""
