"""Hugging Face ``Trainer``: progress, and a checkpoint before the job is moved.

callback = MalleTrainCallback()
trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
trainer.train(resume_from_checkpoint=callback.latest(args.output_dir))
"""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from malletrain.integrations.guard import Guard


class MalleTrainCallback(TrainerCallback):
    """Add it to the callbacks of the ``Trainer``. The output folder must be one that all nodes
    share.

    For a loss without notice set ``save_strategy="steps"`` and ``save_steps`` as usual: only a loss
    with notice asks for a checkpoint.
    """

    def __init__(self) -> None:
        self._guard = Guard()
        self._wanted = False
        self._began = 0.0

    @staticmethod
    def latest(output_dir: str) -> str | None:
        """The newest checkpoint to resume from; None in a new run."""
        try:
            found: str | None = get_last_checkpoint(output_dir)
        except FileNotFoundError:
            return None
        return found

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """One optimizer step is done."""
        self._wanted = self._guard.step(
            args.per_device_train_batch_size * args.gradient_accumulation_steps * max(1, args.n_gpu)
        )
        if self._wanted:
            self._began = time.monotonic()
            control.should_save = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint was written."""
        if self._wanted:
            self._wanted = False
            self._guard.saved(args.output_dir, self._began)
