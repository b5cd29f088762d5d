"""Lightning: progress, the same steps at any number of ranks, and a checkpoint before the job is
moved.

callback = MalleTrainCallback("checkpoints")
loader = callback.loader(data, batch_size=8, global_batch_size=48)
trainer = Trainer(callbacks=[callback], …)
trainer.fit(model, loader, ckpt_path=callback.latest())

Decides the batches and the accumulation of gradients, and translates a checkpoint's count of
batches, so that Lightning counts the same steps and epochs whatever the number of ranks. The loop,
the schedule and what is in a checkpoint stay the library's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from torch.utils.data import DataLoader

from malletrain.integrations.constant_batch import ConstantBatch
from malletrain.integrations.guard import StateGuard
from malletrain.training import report

NAME = "malletrain.ckpt"


class Loader:
    """What ``fit`` takes its batches from. No DataLoader itself: Lightning would share the batches
    of one out a second time.
    """

    def __init__(self, loader: DataLoader[Any], batches: ConstantBatch) -> None:
        self._loader = loader
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: it begins where the callback says. Lightning asks whether it can resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


class MalleTrainCallback(Callback):
    """Saves ``malletrain.ckpt`` in ``folder``, which all nodes must share, when MalleTrain asks for
    it and every ``every_s`` seconds. The training data must come from :meth:`loader`.

    Args:
        folder: of the checkpoint.
        every_s: seconds between checkpoints.
    """

    def __init__(self, folder: str | os.PathLike[str], every_s: float = 600.0) -> None:
        self._guard = StateGuard()
        self.path = os.path.join(os.path.abspath(os.fspath(folder)), NAME)
        self._every_s = every_s
        self._due = time.monotonic() + every_s
        self._batches: ConstantBatch | None = None
        self._loader: Loader | None = None
        self._epoch = self._step = 0

    def latest(self) -> str | None:
        """The checkpoint to resume from; None in a new run."""
        return self.path if os.path.exists(self.path) else None

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        global_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        **options: Any,
    ) -> Loader:
        """The training data, for ``trainer.fit(model, …)``: the same global batches at every number
        of ranks.

        Args:
            dataset: with a length and indices.
            batch_size: samples that a rank takes at once, at most; larger shares are accumulated.
            global_batch_size: samples of a step over all ranks; by default ``batch_size`` on each
                of the ranks that the job may have at most.
            seed: of the order.
            shuffle: False takes the samples in order.
            drop_last: drop a remainder smaller than a global batch.
            options: of torch's DataLoader.

        Raises:
            ValueError: when the sizes do not fit each other.
        """
        self._batches = ConstantBatch(
            len(dataset), batch_size, global_batch_size, 1, seed, shuffle, drop_last
        )
        plain: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._batches, **options)
        self._loader = Loader(plain, self._batches)
        return self._loader

    # --- hooks ---

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before anything is loaded. Raises ValueError when the steps cannot be kept."""
        if stage != "fit":
            return
        if self._batches is None:
            raise ValueError(
                "MalleTrainCallback: the training data must come from callback.loader(dataset, "
                "batch_size=…): with a loader of its own a change of nodes would change "
                "Lightning's steps, epochs and samples."
            )
        if not pl_module.automatic_optimization:
            raise ValueError(
                "MalleTrainCallback: with manual optimization the module counts its own steps, and "
                "they cannot be kept over a change of nodes."
            )
        world = self._batches.plan.world_size
        if trainer.world_size != world:
            raise ValueError(
                f"MalleTrainCallback: the trainer has {trainer.world_size} processes, but torchrun "
                f"or MalleTrain started {world}. Start all of them so, with devices=1 per process "
                "or the number of processes of a node."
            )
        own = any(isinstance(one, GradientAccumulationScheduler) for one in trainer.callbacks)
        if own or trainer.accumulate_grad_batches != 1:
            raise ValueError(
                "MalleTrainCallback: accumulation follows from the global batch. Leave "
                "accumulate_grad_batches out and say callback.loader(global_batch_size=…)."
            )
        trainer.accumulate_grad_batches = self._batches.accumulate

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raises ValueError when the data is not from here."""
        if trainer.train_dataloader is not self._loader:
            raise ValueError(
                "MalleTrainCallback: give trainer.fit() what callback.loader() returned."
            )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """What the script does now is done once."""
        report.training_over()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Its iterator is made after this."""
        assert self._batches is not None
        self._batches.epoch = self._epoch = trainer.current_epoch

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Lightning divides a loss by the number of micro-batches, and DDP averages over ranks;
        what a micro-batch of another size weighs goes into its gradient.
        """
        batches = self._batches
        assert batches is not None
        step, micro = divmod(trainer.fit_loop.batch_idx, batches.accumulate)
        weight = batches.weight(step, micro) * batches.accumulate / batches.batch(step)[1]
        if weight != 1.0:
            loss.register_hook(lambda gradient: gradient * weight)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A micro-batch is done; with the last of its step, the step."""
        batches = self._batches
        assert batches is not None
        step, micro = divmod(batch_idx, batches.accumulate)
        if micro + 1 < batches.batch(step)[1]:
            return
        self._step = step + 1
        wanted = self._guard.step(batches.share(step))
        # rank 0's clock counts
        late = bool(trainer.strategy.broadcast(time.monotonic() >= self._due))
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

    # --- what a checkpoint says ---

    def state_dict(self) -> dict[str, Any]:
        """Where in the data it is, and what its steps count."""
        if self._batches is None:
            return {}
        return {"epoch": self._epoch, "step": self._step, **self._counts()}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Begin where the checkpoint says, and count its batches as those of this number of ranks.

        Raises:
            ValueError: when its steps count other samples than those of now.
        """
        batches = self._batches
        saved = checkpoint.get("callbacks", {}).get(self.state_key)
        if batches is None:  # not a fit
            return
        if saved is None or "step" not in saved:
            raise ValueError(
                f"{self.path} does not say where in the data it was written (it is of an earlier "
                "release). Begin anew in another folder."
            )
        changed = [
            f"{key} {saved[key]}, now {value}"
            for key, value in self._counts().items()
            if saved[key] != value
        ]
        if changed:
            raise ValueError(
                f"The steps of {self.path} count other samples ({'; '.join(changed)}). Go on with "
                "the same data, the same global batch and the same largest number of ranks, or "
                "begin anew in another folder."
            )
        over = saved["step"] >= batches.steps_per_epoch
        self._epoch, self._step = saved["epoch"] + over, 0 if over else saved["step"]
        batches.epoch = self._epoch
        batches.resumed = (self._epoch, self._step)
        # Lightning's own count of an epoch is one behind after a checkpoint at the end of one.
        loops = checkpoint["loops"]["fit_loop"]
        done = self._step * batches.accumulate
        steps = checkpoint["global_step"]
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] = steps
        _set(loops["epoch_loop.batch_progress"]["current"], done, done)
        before = self._epoch * len(batches)
        _set(loops["epoch_loop.batch_progress"]["total"], before + done, before + done)
        loops["epoch_loop.batch_progress"]["is_last_batch"] = False
        for counts in loops["epoch_progress"].values():
            _set(counts, self._epoch + 1, self._epoch)

    def _counts(self) -> dict[str, int]:
        assert self._batches is not None
        return {
            "global_batch_size": self._batches.plan.global_batch_size,
            "num_samples": self._batches.plan.num_samples,
            "steps_per_epoch": self._batches.steps_per_epoch,
        }


def _set(counts: dict[str, int], begun: int, over: int) -> None:
    """Have one of Lightning's trackers say so."""
    counts.update(ready=begun, started=begun, processed=over, completed=over)
