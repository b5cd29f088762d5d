"""Detects that the training set of a resumed run has other samples than that of the snapshot.

This happens with a ``Subset`` from ``random_split`` without a seed: each start of the script draws
another one. Samples of the test set would become training samples unnoticed.

Decides which subsets must be equal: those of one epoch. A script may choose another subset for the
next epoch, so a difference between epochs is only reported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from malletrain.training.report import tell

_ADVICE = (
    "The script runs again at each change of nodes, so its random choice of samples needs a seed: "
    "random_split(data, sizes, generator=torch.Generator().manual_seed(0))."
)


class SubsetCheck:
    """The subsets that the loaders of one sampler read."""

    def __init__(self) -> None:
        self._newest = ""
        """Fingerprint of the newest subset; empty if there is none."""
        self._epoch = -1
        """Epoch in which it was read."""
        self._loaded = False
        """Whether the newest one comes from a loaded state, and no loader has read since."""

    def state(self) -> dict[str, Any]:
        """Return the entries for the sampler's state; none without a subset."""
        if not self._newest:
            return {}
        return {
            "subset": self._newest,
            "subset_epoch": self._epoch,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from the entries of a sampler's state."""
        self._newest = str(state.get("subset", ""))
        self._epoch = int(state.get("subset_epoch", -1))
        self._loaded = bool(self._newest)

    def read(self, dataset: Any, epoch: int) -> None:
        """Note that a loader is about to read ``dataset`` in ``epoch``.

        Raises:
            ValueError: the loaded state has another subset for this epoch.
        """
        if epoch == self._epoch and not self._loaded:
            return
        own, loaded, self._loaded = fingerprint(dataset), self._loaded, False
        if loaded and own != self._newest:
            if self._epoch == epoch:
                raise ValueError(
                    "The training set is another Subset than before the restart: the job would "
                    f"train on samples that it may have set aside for tests. {_ADVICE}"
                )
            tell(
                "The training set is another Subset than in the epoch before the restart. "
                f"{_ADVICE}",
                once="another subset",
            )
        self._newest, self._epoch = own, epoch


def fingerprint(dataset: Any) -> str:
    """Return a hash of the samples that a ``torch.utils.data.Subset`` chooses, which may itself
    contain a Subset; empty for any other dataset.
    """
    sha, depth = hashlib.sha256(), 0
    while _is_subset(type(dataset)):
        for number in _indices(dataset):
            sha.update(number)
        dataset, depth = dataset.dataset, depth + 1
    return sha.hexdigest() if depth else ""


def _is_subset(kind: type) -> bool:
    return any(
        cls.__name__ == "Subset" and cls.__module__.startswith("torch.utils.data")
        for cls in kind.__mro__
    )


def _indices(subset: Any) -> tuple[bytes, ...]:
    import torch

    try:
        numbers = torch.as_tensor(subset.indices, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError):  # indices of another kind, such as names
        return (repr(subset.indices).encode(),)
    return (numbers.numpy().tobytes(), b".")
