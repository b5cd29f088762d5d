"""Reads Slurm's accounts and shares at the start and periodically. :mod:`malletrain.daemon.parties`
decides what follows from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from malletrain.daemon.core import Core
from malletrain.daemon.daemon_state import DaemonState
from scavenger.interface import SchedulerError
from scavenger.slurm.associations import Associations

log = structlog.get_logger(__name__)


class AssociationWatch:
    """Keeps the parties of one daemon up to date. ``read``: queries Slurm; None if accounts are not
    read from Slurm.
    """

    def __init__(
        self, core: Core, state: DaemonState, read: Callable[[], Associations] | None
    ) -> None:
        self._core = core
        self._state = state
        self._read = read

    async def learn(self) -> None:
        """Read the associations once. If Slurm does not answer, the last ones stay."""
        if self._read is None:
            return
        try:
            associations = await asyncio.to_thread(self._read)
        except SchedulerError as error:
            log.warning("associations not read", reason=str(error))
            return
        with self._core.transaction():
            self._state.parties.learned(associations)
            self._state.controller.shares.set_weights(self._state.parties.weights())

    async def run(self) -> None:
        """Read the associations periodically, until cancelled."""
        interval_s = self._state.config.shares.refresh
        while self._read is not None:
            await asyncio.sleep(interval_s)
            await self.learn()
