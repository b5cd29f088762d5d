"""The random generators of a trainer's run, over a change of the number of ranks.

Lightning saves no generators. Trainer and Accelerate save a file for each rank, so that a rank of a
larger round finds none. Such a rank would start at the script's seed again and draw, after each
change of nodes, the random numbers of the beginning of the training: the same dropout masks, noise
and masked tokens.

Decides from which state such a rank continues: from that of rank 0, or from one of its own if the
script seeds its ranks differently (:class:`malletrain.training.rng.RankSeeds`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from malletrain.training import rng

FILE = "malletrain-rng.pt"
"""Name of the file, in a checkpoint's folder, with the states of rank 0."""


def save_states(folder: str) -> None:
    """Write the present states to ``folder``. Call it on rank 0 only."""
    path = os.path.join(folder, FILE)
    torch.save(rng.state(), path + ".tmp")
    os.replace(path + ".tmp", path)


def read_states(folder: str) -> dict[str, Any]:
    """Return the states in ``folder``; empty if there are none."""
    path = os.path.join(folder, FILE)
    if not os.path.exists(path):  # of an earlier release, or of the library alone
        return {}
    states: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return states


class RandomStates:
    """The states from which this rank continues. Created on every rank, before the library loads
    the states of its own. Collective.

    Args:
        of_rank_0: the states of rank 0 at the checkpoint (:func:`malletrain.training.rng.state`);
            empty if unknown. Then nothing is loaded.
        from_rank_0: a broadcast: returns on every rank the text that rank 0 passes to it.
    """

    def __init__(self, of_rank_0: dict[str, Any], from_rank_0: Callable[[str], str]) -> None:
        seeds, now = rng.RankSeeds(from_rank_0), rng.state()
        self._states = of_rank_0
        if of_rank_0:
            rng.load(of_rank_0)
            seeds.separate()
            self._states = rng.state()
            rng.load(now)

    def load(self) -> None:
        """Set the generators to these states."""
        rng.load(self._states)

    def load_for_loader(self, steps: int) -> None:
        """Set the generators to states that follow from these, for a loader that is iterated in the
        middle of an epoch: its workers must not repeat the numbers of the run. Call :meth:`load`
        after it. ``steps``: number of steps of the run.
        """
        if self._states:
            rng.load(self._states)
            rng.branch(steps)
