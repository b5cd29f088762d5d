"""The random numbers that a DataLoader draws when it is iterated: the seeds of its workers.

A loader draws one number from torch's generator, or from one of its own, each time it is iterated.
Decides which number that is where a process begins or resumes in the middle of an epoch. An
uninterrupted epoch draws it once, so a resumed epoch must leave torch's generator as it was. And
the number must not be one that was drawn before, or is drawn again: the workers would repeat the
random numbers of another part of the training.
"""

from __future__ import annotations

from typing import Any

from malletrain.training import rng


class LoaderSeeds:
    """The numbers that the loaders of one sampler draw."""

    def __init__(self) -> None:
        self._saved: Any = None
        """State of torch's generator before a loader drew from it in the middle of an epoch."""
        self._begins = True
        """No loader has been iterated in this process."""

    def begin(self, generator: Any, number: int) -> None:
        """Seed a loader's own generator, which no snapshot includes, where this process begins.

        Args:
            generator: the loader's own; None if it has none.
            number: number of samples that were trained on before.
        """
        begins, self._begins = self._begins, False
        if begins and generator is not None and number:
            rng.branch(number, generator)

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
