"""Lightning: progress, and a checkpoint before the job is moved.

callback = MalleTrainCallback("checkpoints")
trainer = Trainer(callbacks=[callback], …)
trainer.fit(model, data, ckpt_path=callback.latest())
"""

from __future__ import annotations

import os
import time
from typing import Any

from lightning.pytorch.callbacks import Callback

from malletrain.integrations.guard import Guard

NAME = "malletrain.ckpt"


class MalleTrainCallback(Callback):
    """Saves ``malletrain.ckpt`` in ``folder``, which all nodes must share, when MalleTrain asks for
    it and every ``every_s`` seconds.
    """

    def __init__(self, folder: str | os.PathLike[str], every_s: float = 600.0) -> None:
        self._guard = Guard()
        self.path = os.path.join(os.path.abspath(os.fspath(folder)), NAME)
        self._every_s = every_s
        self._due = time.monotonic() + every_s

    def latest(self) -> str | None:
        """The checkpoint to resume from; None in a new run."""
        return self.path if os.path.exists(self.path) else None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is done."""
        wanted = self._guard.step(_size(batch))
        late = bool(
            trainer.strategy.broadcast(time.monotonic() >= self._due)
        )  # rank 0's clock counts
        if not (wanted or late):
            return
        began = time.monotonic()
        # First under another name: a crash while saving must leave the one before.
        trainer.save_checkpoint(self.path + ".new")
        if trainer.is_global_zero:
            os.replace(self.path + ".new", self.path)
        trainer.strategy.barrier("malletrain")
        self._due = time.monotonic() + self._every_s
        self._guard.saved(self.path, began)


def _size(batch: Any) -> int:
    """Samples in a batch: the length of the first tensor in it."""
    while isinstance(batch, dict | list | tuple) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) else 1
