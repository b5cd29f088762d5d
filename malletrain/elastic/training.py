"""The training state of this process: the objects, the progress counters, and the copies with which
a step can be discarded.

Decides what a step that counts changes, and what a discarded step leaves behind. It knows no group
and no peers; :mod:`malletrain.elastic.sharing` decides which rank's state counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from malletrain.elastic.background import BackgroundSnapshot
from malletrain.elastic.errors import ElasticError
from malletrain.elastic.group import Group
from malletrain.elastic.rooms import describe_tensors
from malletrain.elastic.state import Holder
from malletrain.elastic.undo import StateBeforeStep, StateCopy
from malletrain.training import report
from malletrain.training.objects import unwrapped
from malletrain.training.sampler import ElasticSampler
from malletrain.training.schedulers import Schedulers


@dataclass(frozen=True, order=True)
class Standing:
    """The progress of a process. The larger of two is ahead."""

    has_state: bool
    """The process has trained, or has received or loaded state."""
    updates: int
    """Number of optimizer updates."""
    steps: int
    """Number of steps that count."""
    whole: bool
    """The last step was not interrupted between two of its updates."""
    epoch_closed: bool = field(default=True, compare=False)
    """The process is not in the code that follows the steps of an epoch. That code changes state
    that each process has for itself, so it puts no process ahead; but a joiner must get the state
    from after it.
    """


class Training:
    """The objects of one run. Arguments: see :class:`malletrain.elastic.Run`."""

    undoes_parameters = True
    """Whether a step that changed parameters can be undone."""

    def __init__(
        self,
        objects: dict[str, Any],
        device: torch.device,
        snapshot: str | os.PathLike[str] | bool | None,
        every_s: float,
    ) -> None:
        self.device = device
        self.state = Holder(objects, device)
        plain = [unwrapped(value) for value in objects.values()]
        self.undo = StateBeforeStep(
            self.state.modules().values(),
            [value for value in plain if isinstance(value, dict)],
            parameters=self.undoes_parameters,
        )
        self.several_updates = False
        """A step makes several updates, each from gradients of its own."""
        self._has_finished_step = False
        """This process has finished a step, so that the number of updates per step is known."""
        self._state_before = StateCopy(self.state)
        """State before the current step, if a step makes several updates."""
        self._updates_before = 0
        samplers = [value for value in plain if isinstance(value, ElasticSampler)]
        if len(samplers) > 1:
            raise TypeError(
                "elastic.Run was given several samplers, and a step counts the samples of one. "
                "Choose what goes along with a batch by the numbers of its samples, or train in "
                "restart mode, with malletrain.Snapshot."
            )
        self.sampler = samplers[0] if samplers else None
        self.iterated_epoch = -1
        """Number of the last epoch that was iterated from its first sample on."""
        self._schedulers = Schedulers("elastic.Run", objects, ElasticError)
        self.optimizers = [value for value in plain if isinstance(value, torch.optim.Optimizer)]
        self._scalers = [value for value in plain if hasattr(value, "_per_optimizer_states")]
        self.steps = self.samples = self.updates = 0
        self.catching_up = False
        """This process makes an update that other ranks made in the step before."""
        self.has_state = False
        self._torn = False
        """The last step that counts ended with an error."""
        self._discarded_samples = 0
        """Samples of this process in the last step that was discarded."""
        self._counters: dict[str, Any] = {}
        self.snapshot: BackgroundSnapshot | None = None
        if snapshot is not None and snapshot is not False:
            path = None if snapshot is True else snapshot
            self.snapshot = BackgroundSnapshot(path, every_s, run=self._counters, **objects)

    # --- steps ---

    def rehearse(self, warmup: Callable[[], None]) -> None:
        """Call ``warmup`` and undo what it does to buffers, gradients and random numbers."""
        self.undo.keep()
        warmup()
        self.undo.restore(self._scalers)

    def begin_step(self) -> None:
        """Begin a step: record the state that is needed to discard it."""
        self.undo.keep()
        self._updates_before = self.updates
        if self.several_updates:
            self._state_before.keep()

    def commit(self, share: int, whole: int, batches: int, torn: bool) -> None:
        """Count a step.

        Args:
            share: samples of this process in the step.
            whole: samples of all ranks.
            batches: batches of this process.
            torn: whether the step ended with an error.
        """
        self.steps += 1
        self.samples += whole
        self._torn = torn
        self._has_finished_step = self._has_finished_step or not torn
        if self.sampler is not None and batches:
            self.sampler.advance(batches)
        if share:
            report.report(share)

    def before_update(self, group: Group) -> None:
        """Hook that is called when the exchange of gradients has succeeded, before the optimizer
        uses them.
        """

    def before_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """Record what is needed to undo an update with a closure, before it is made."""
        self.undo.before_closure(optimizer)

    def discard(self, share: int) -> bool:
        """Undo the current step. Returns False if the state could not be restored, because it was
        changed and not copied. ``share``: samples of this process in the step.
        """
        self._discarded_samples = share
        whole = self.undo.restore(self._scalers)
        if self.updates == self._updates_before:
            return whole
        self.updates = self._updates_before
        return self._state_before.restore()

    @property
    def one_update_is_all(self) -> bool:
        """Whether a step that fails after its first update has made all its updates."""
        if not self.undoes_parameters:
            return True
        return self._has_finished_step and not self.several_updates

    def another_update(self) -> None:
        """Note that the current step exchanges gradients for a second update. From the next step
        on, the state is copied at the beginning of each step.
        """
        self.several_updates = True

    def digest(self) -> str:
        """See :attr:`malletrain.elastic.Run.digest`."""
        return self.state.digest()

    # --- exchange with peers ---

    def standing(self) -> Standing:
        """Returns the progress of this process."""
        return Standing(
            self.has_state, self.updates, self.steps, not self._torn, not self.between_epochs
        )

    @property
    def between_epochs(self) -> bool:
        """Whether the steps of an epoch are done and the code that follows them is not."""
        return self.sampler is not None and self.sampler.between_epochs

    def pack(self) -> tuple[bytes, list[torch.Tensor]]:
        """See :meth:`Holder.pack`."""
        return self.state.pack(self._counters_for_peers())

    def take_over(self, skeleton: Any, tensors: list[torch.Tensor], had: bool) -> None:
        """Replace the state of this process by the one that a peer sent.

        Args:
            skeleton: skeleton of the received state (:meth:`Holder.pack`).
            tensors: its tensors.
            had: whether this process had state before.
        """
        before = self.steps
        self._load_counters(self.state.restore(skeleton, tensors))
        if had and self.steps == before + 1 and self._discarded_samples:
            # The step that was discarded here counts after all, because a peer had finished it.
            report.report(self._discarded_samples)

    def for_joiners(self) -> str:
        """Returns the tensors for which joiners need memory (:mod:`malletrain.elastic.rooms`)."""
        return describe_tensors(self.optimizers) if self.has_state else "[]"

    def make_room(self, data: str) -> None:
        """Allocate memory for the state to come, if there is no state yet. ``data``: what a peer's
        :meth:`for_joiners` returned.
        """
        if not self.has_state:
            self.state.rooms.make(data)

    def settled(self) -> None:
        """Note that all peers now have the same state."""
        self.undo.forget_parameters()
        self._state_before.forget()
        self.state.rooms.clear()
        self.has_state, self._torn, self._discarded_samples = True, False, 0
        if self.snapshot is not None:
            self.snapshot.round_entered()

    def _counters_for_peers(self) -> dict[str, int]:
        """Returns the counters that are sent to a peer with the objects."""
        return {
            **self._progress_counters(),
            "between_epochs": int(self.between_epochs),
            "iterated_epoch": self.iterated_epoch,
        }

    def _progress_counters(self) -> dict[str, int]:
        return {"steps": self.steps, "samples": self.samples, "updates": self.updates}

    def _load_counters(self, counters: dict[str, Any]) -> None:
        self.steps, self.samples, self.updates = (
            int(counters.get(name, 0)) for name in ("steps", "samples", "updates")
        )
        self.iterated_epoch = int(counters.get("iterated_epoch", -1))
        if self.sampler is not None:
            self.sampler.between_epochs = bool(counters.get("between_epochs"))

    # --- on disk ---

    def restore_snapshot(self) -> None:
        """Continue from the newest snapshot, if there is one. Raises SnapshotError."""
        if self.snapshot is not None and self.snapshot.restore():
            self._load_counters(self._counters)

    def snapshot_step(self) -> None:
        """Take a snapshot after a step, if one is due or was requested."""
        if self.snapshot is not None:
            self._counters.update(self._progress_counters())
            self.snapshot.step()

    def save(self) -> bool:
        """Write the snapshot now. Returns whether this process wrote it."""
        self._counters.update(self._progress_counters())
        return self.snapshot is not None and self.snapshot.save()
