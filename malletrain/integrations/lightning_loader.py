"""The loader that ``MalleTrainCallback.loader()`` returns for ``trainer.fit()``.

Decides when torch's generator advances: as with torch's loader alone, also where a run resumes and
Lightning makes the iterator in another place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from malletrain.integrations.constant_batch import ConstantBatch
from malletrain.training import rng


class Loader:
    """The batches for ``fit``. Not a DataLoader, because Lightning would distribute its batches
    over the ranks a second time.
    """

    def __init__(self, loader: DataLoader[Any], batches: ConstantBatch) -> None:
        self._loader = loader
        self._batches = batches
        self._draws = False
        """Whether torch's loader drew a number the last time."""
        self.is_late = False
        """Whether the generators were set after the iterator was made, to a state before that."""

    def __iter__(self) -> Iterator[Any]:
        """Start to read. The seed of the loader's workers follows from the state of torch's
        generator and from the position: where a run resumes, Lightning calls this in another place
        than in a run without changes. The generator advances as with the loader alone.
        """
        state = torch.get_rng_state()
        rng.branch(self._batches.samples_done)
        before = torch.get_rng_state()
        try:
            batches = iter(self._loader)
            draws = not torch.equal(before, torch.get_rng_state())
        finally:
            torch.set_rng_state(state)
        self._draws, self.is_late = draws, False
        self.draw()
        return batches

    def draw(self) -> None:
        """Advance torch's generator as its loader does when it draws that seed."""
        if self._draws:
            torch.empty((), dtype=torch.int64).random_()

    def __len__(self) -> int:
        return len(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state; Lightning calls it to see whether the loader can resume. The
        callback sets the start.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""
