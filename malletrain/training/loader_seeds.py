"""The random numbers that a DataLoader draws when it is iterated: the seeds of its workers.

A loader draws one number from torch's generator, or from one of its own, each time it is iterated.
Decides which number a loader draws first in a new process, and which one when it is iterated from
the middle of an epoch. An uninterrupted epoch draws once, so the second draw of a resumed epoch
must leave torch's generator unchanged. The number must also differ from all other draws of the run:
otherwise the workers would repeat the random numbers of another part of the training.
"""

from __future__ import annotations

from typing import Any

from malletrain.training import rng


class LoaderSeeds:
    """The numbers that the loaders of one sampler draw."""

    def __init__(self) -> None:
        self._saved: Any = None
        """State of torch's generator before a loader drew from it in the middle of an epoch."""
        self._samples_at_seed: int | None = None
        """Number of samples done when a loader's own generator was seeded; None before that."""

    def begin(self, generator: Any, samples_done: int) -> None:
        """Seed a loader's own generator before its first use in a resumed training, because no
        snapshot includes its state. Call it until this process has made a step: a script may look
        at a batch before it restores its snapshot.

        Args:
            generator: the loader's own; None if it has none.
            samples_done: number of samples that were trained on before.
        """
        if generator is not None and samples_done not in (0, self._samples_at_seed):
            self._samples_at_seed = samples_done
            rng.branch(samples_done, generator)

    def resume(self, position: int) -> None:
        """A loader is iterated from ``position`` of the epoch: save the state of torch's generator,
        and let the loader draw a number that follows from both.
        """
        import torch

        self._saved = torch.get_rng_state()
        rng.branch(position)

    def restore(self) -> None:
        """The loader has drawn: set torch's generator to the saved state, if there is one."""
        if self._saved is not None:
            import torch

            torch.set_rng_state(self._saved)
            self._saved = None

    def forget(self) -> None:
        """Drop the saved state."""
        self._saved = None
