"""A loop written with Accelerate: progress, and ``save_state`` before the job is moved.

guard = Guard(accelerator, "checkpoints")
guard.resume()
for batch in loader:
    …
    optimizer.step()
    guard.step(len(batch))
"""

from __future__ import annotations

import os
import time
from typing import Any

from malletrain.integrations import guard


class Guard(guard.Guard):
    """Saves the state of ``accelerator`` to ``folder`` when MalleTrain asks for it, and every
    ``every_s`` seconds.

    Everything that belongs to the state must be prepared by, or registered with, the accelerator
    (``register_for_checkpointing``).
    """

    def __init__(
        self, accelerator: Any, folder: str | os.PathLike[str], every_s: float = 600.0
    ) -> None:
        super().__init__()
        self._accelerator = accelerator
        self.folder = os.path.abspath(os.fspath(folder))
        self._every_s = every_s
        self._due = time.monotonic() + every_s

    def resume(self) -> bool:
        """Load the newest state, after ``prepare()``; False in a new run."""
        newest = self.newest()
        if newest is not None:
            self._accelerator.load_state(newest)
        return newest is not None

    def newest(self) -> str | None:
        """The folder of the newest whole state."""
        try:
            with open(os.path.join(self.folder, "newest")) as file:
                return os.path.join(self.folder, file.read().strip())
        except FileNotFoundError:
            return None

    def step(self, samples: float) -> bool:
        """A step is done, with so many samples of this process; saves if that is due. Returns
        whether it saved.
        """
        wanted = super().step(samples)
        late = time.monotonic() >= self._due
        if not wanted and not (
            guard.any_rank(late) if self._accelerator.num_processes > 1 else late
        ):
            return False
        began = time.monotonic()
        self.save()
        self.saved(self.folder, began)
        return True

    def save(self) -> None:
        """Save now; the state before stays until the new one is whole."""
        before = self.newest()
        name = "state-b" if before is not None and before.endswith("state-a") else "state-a"
        self._accelerator.save_state(os.path.join(self.folder, name))
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            pointer = os.path.join(self.folder, "newest")
            with open(pointer + ".tmp", "w") as file:
                file.write(name)
                file.flush()
                os.fsync(file.fileno())
            os.replace(pointer + ".tmp", pointer)
        self._due = time.monotonic() + self._every_s
