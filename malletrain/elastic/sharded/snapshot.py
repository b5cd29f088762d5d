"""Snapshots of a sharded run: all ranks write, at a step on which they agree.

Decides only which ranks write: those of the current group, whose collectives can be aborted. All
else is done by :class:`malletrain.Snapshot`.
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
    """A :class:`malletrain.Snapshot` for groups that change."""

    _caller = "elastic.Run"
    _refusal = ElasticError

    def regroup(self, objects: Mapping[str, Any]) -> None:
        """Use the current default group, and ``objects`` with the new module."""
        self._objects = dict(objects)
        self._team = self._agreement = None
        self._looked = False
        self._request = 0
        self._announced = False  # tell the agent again that this process saves on request

    def _all_ranks(self) -> Team:
        if self._team is None:
            several = dist.is_initialized() and dist.get_world_size() > 1
            self._team = Team(dist.group.WORLD if several else None)
        return self._team

    def _epoch_closed(self) -> None:
        try:
            with library_collectives():
                super()._epoch_closed()
        except RuntimeError as error:  # the next step fails as well, and the group is left
            if not is_peer_loss(error):
                raise

    def wait(self) -> None:
        """Does nothing, because nothing is written in the background."""
