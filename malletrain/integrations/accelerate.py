"""A loop written with Accelerate: progress, every sample of an epoch once, and ``save_state``
before the job is moved.

sampler = malletrain.ElasticSampler(len(data), global_batch_size=64)
loader = DataLoader(data, batch_sampler=sampler)
model, optimizer = accelerator.prepare(model, optimizer)
guard = Guard(accelerator, "checkpoints", sampler)
guard.resume()
for epoch in sampler.epochs(10):
    for batch in loader:
        loss = criterion(model(batch.to(accelerator.device))) * sampler.loss_weight
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        guard.step()
guard.save()

Decides when the state is saved and where in the data it was. What is in it is the accelerator's,
the order of the data the sampler's.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from malletrain.integrations import guard
from malletrain.training.sampler import ElasticSampler

POSITION = "malletrain.json"
"""In the folder of a state: the sampler's."""


class Guard(guard.StateGuard):
    """Saves the state of ``accelerator`` when MalleTrain asks for it, and every so often.

    Everything that belongs to the state must be prepared by, or registered with, the accelerator
    (``register_for_checkpointing``). Leave out of ``prepare()``: the loader, whose batches are this
    rank's already, and the scheduler, which Accelerate would step once per rank (register it).

    Args:
        accelerator: Accelerate's.
        folder: of the states, which all nodes must share.
        sampler: the loader's ``batch_sampler``: how far the training is.
        every_s: seconds between states saved without being asked for.

    Raises:
        TypeError: without a sampler.
    """

    def __init__(
        self,
        accelerator: Any,
        folder: str | os.PathLike[str],
        sampler: ElasticSampler | None = None,
        every_s: float = 600.0,
    ) -> None:
        super().__init__()
        if not isinstance(sampler, ElasticSampler):
            raise TypeError(
                "Guard needs the sampler, to go on where the training was: "
                "Guard(accelerator, folder, sampler), with sampler = "
                "malletrain.ElasticSampler(len(data), global_batch_size=…) and "
                "DataLoader(data, batch_sampler=sampler)."
            )
        self._accelerator = accelerator
        self.folder = os.path.abspath(os.fspath(folder))
        self.sampler = sampler
        self._every_s = every_s
        self._due = time.monotonic() + every_s

    def resume(self) -> bool:
        """Load the newest state, after ``prepare()``.

        Returns:
            False in a new run.

        Raises:
            ValueError: when the state does not say where in the data it was saved or is that of
                other data, or a schedule would depend on the number of ranks.
        """
        # Accelerate has no public name for what was prepared.
        schedulers = getattr(self._accelerator, "_schedulers", [])
        if schedulers and not self._accelerator.split_batches:
            raise ValueError(
                "Guard: accelerator.prepare(scheduler) steps a scheduler once per rank, so that "
                "the learning rate would depend on the number of nodes. Leave it out of prepare() "
                "and call accelerator.register_for_checkpointing(scheduler)."
            )
        newest = self.newest()
        if newest is None:
            return False
        try:
            with open(os.path.join(newest, POSITION)) as file:
                position = json.load(file)
        except FileNotFoundError as error:
            raise ValueError(
                f"The state {newest} does not say where in the data it was saved (it is of an "
                "earlier release). Begin anew in another folder."
            ) from error
        self.sampler.load_state_dict(position)
        self._accelerator.load_state(newest)
        return True

    def newest(self) -> str | None:
        """The folder of the newest whole state."""
        try:
            with open(os.path.join(self.folder, "newest")) as file:
                return os.path.join(self.folder, file.read().strip())
        except FileNotFoundError:
            return None

    def step(self, samples: float | None = None, batches: int = 1) -> bool:
        """An optimizer step is done: moves the sampler on, reports, and saves if that is due.

        Args:
            samples: of this process; those of the sampler's batches when not given.
            batches: how many the step took from the loader (more than 1 with accumulation).

        Returns:
            Whether it saved.
        """
        if samples is None:
            samples = sum(own for own, _ in self.sampler.upcoming(batches))
        self.sampler.advance(batches)
        wanted = super().step(samples)
        late = time.monotonic() >= self._due
        if not wanted and not guard.any_rank(late):
            return False
        began = time.monotonic()
        self.save()
        self.saved(self.folder, began)
        return True

    def save(self) -> None:
        """Save now, on every rank; the state before stays until the new one is whole."""
        before = self.newest()
        name = "state-b" if before is not None and before.endswith("state-a") else "state-a"
        # nobody writes into the one after it before all know which it is
        self._accelerator.wait_for_everyone()
        self._accelerator.save_state(os.path.join(self.folder, name))
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            position = json.dumps(self.sampler.state_dict())
            _write(os.path.join(self.folder, name, POSITION), position)
            _write(os.path.join(self.folder, "newest"), name)
        self._due = time.monotonic() + self._every_s


def _write(path: str, text: str) -> None:
    with open(path + ".tmp", "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)
