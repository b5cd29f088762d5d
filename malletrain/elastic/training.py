"""What this process holds of the training: the objects, how far they have come, and what it takes
to discard a step.

Decides when a step counts and what a discarded one leaves behind. It knows no group and no peers;
who has the state that counts is decided by :mod:`malletrain.elastic.sharing`.
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
from malletrain.elastic.rooms import described
from malletrain.elastic.state import Holder
from malletrain.elastic.undo import StateCopy, StepStart
from malletrain.training import report
from malletrain.training.objects import unwrapped
from malletrain.training.sampler import ElasticSampler
from malletrain.training.schedulers import Schedulers


@dataclass(frozen=True, order=True)
class Standing:
    """How far a process is; the larger one is ahead. ``whole``: no step broke off between two of
    its updates.
    """

    has_state: bool
    updates: int
    steps: int
    whole: bool
    epoch_closed: bool = field(default=True, compare=False)
    """It is not in the code that follows the steps of an epoch. That code changes what each process
    holds for itself, so that it makes nobody ahead; but a joiner is to get the state of after it.
    """


class Training:
    """The objects of one run. Arguments: see :class:`malletrain.elastic.Run`."""

    undoes_parameters = True
    """A step that changed parameters before it was given up can be undone."""

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
        self.undo = StepStart(
            self.state.modules().values(),
            [value for value in plain if isinstance(value, dict)],
            parameters=self.undoes_parameters,
        )
        self.several_updates = False
        """A step makes several updates, each from gradients of its own."""
        self._went_through = False
        """A step of this process did: how many updates one makes is known."""
        self._before = StateCopy(self.state)
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
        """The last epoch that was iterated from its first sample on."""
        self._schedulers = Schedulers("elastic.Run", objects, ElasticError)
        self.optimizers = [value for value in plain if isinstance(value, torch.optim.Optimizer)]
        self._scalers = [value for value in plain if hasattr(value, "_per_optimizer_states")]
        self.steps = self.samples = self.updates = 0
        self.catching_up = False
        """An update is being made that others have made in the step before."""
        self.has_state = False
        self._torn = False
        self._lost_share = 0
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
        """A step begins: keep what it takes to discard it."""
        self.undo.keep()
        self._updates_before = self.updates
        if self.several_updates:
            self._before.keep()

    def commit(self, share: int, whole: int, batches: int, torn: bool) -> None:
        """A step counts. ``share``: samples of this process, ``whole``: of all; ``torn``: it ended
        with an error all the same.
        """
        self.steps += 1
        self.samples += whole
        self._torn = torn
        self._went_through = self._went_through or not torn
        if self.sampler is not None and batches:
            self.sampler.advance(batches)
        if share:
            report.report(share)

    def before_update(self, group: Group) -> None:
        """The gradients are good, and the optimizer is about to use them."""

    def before_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to make an update with a closure."""
        self.undo.before_closure(optimizer)

    def discard(self, share: int) -> bool:
        """The step never was. Returns False when the state is not as it was before it: it was
        changed and not copied.
        """
        self._lost_share = share
        whole = self.undo.restore(self._scalers)
        if self.updates == self._updates_before:
            return whole
        self.updates = self._updates_before
        return self._before.restore()

    @property
    def one_update_is_all(self) -> bool:
        """Whether a step that ends with an error after its first update has made all of them."""
        if not self.undoes_parameters:
            return True
        return self._went_through and not self.several_updates

    def another_update(self) -> None:
        """Gradients of another update of the step under way are about to go through the group: from
        the next step on the state before it is copied.
        """
        self.several_updates = True

    def digest(self) -> str:
        """See :attr:`malletrain.elastic.Run.digest`."""
        return self.state.digest()

    # --- beside those of peers ---

    def standing(self) -> Standing:
        """How far this process is."""
        return Standing(
            self.has_state, self.updates, self.steps, not self._torn, not self.between_epochs
        )

    @property
    def between_epochs(self) -> bool:
        """Whether the steps of an epoch are done and the code that follows them is not."""
        return self.sampler is not None and self.sampler.between_epochs

    def pack(self) -> tuple[bytes, list[torch.Tensor]]:
        """See :meth:`Holder.pack`."""
        return self.state.pack(self._counted())

    def take_over(self, skeleton: Any, tensors: list[torch.Tensor], had: bool) -> None:
        """Hold what a peer sent. ``had``: there was state here before."""
        before = self.steps
        self._count_from(self.state.put_back(skeleton, tensors))
        if had and self.steps == before + 1 and self._lost_share:
            report.report(
                self._lost_share
            )  # the step given up here counts after all: somebody had finished it

    def for_joiners(self) -> str:
        """What joiners need memory for (:mod:`malletrain.elastic.rooms`)."""
        return described(self.optimizers) if self.has_state else "[]"

    def make_room(self, data: str) -> None:
        """Have that memory ready, where there is no state yet."""
        if not self.has_state:
            self.state.rooms.make(data)

    def settled(self) -> None:
        """All peers hold the same by now."""
        self.undo.forget_parameters()
        self._before.forget()
        self.state.rooms.clear()
        self.has_state, self._torn, self._lost_share = True, False, 0
        if self.snapshot is not None:
            self.snapshot.round_entered()

    def _counted(self) -> dict[str, int]:
        """What goes along with the objects to a peer."""
        return {
            **self._counters_now(),
            "between_epochs": int(self.between_epochs),
            "iterated_epoch": self.iterated_epoch,
        }

    def _counters_now(self) -> dict[str, int]:
        return {"steps": self.steps, "samples": self.samples, "updates": self.updates}

    def _count_from(self, counters: dict[str, Any]) -> None:
        self.steps, self.samples, self.updates = (
            int(counters.get(name, 0)) for name in ("steps", "samples", "updates")
        )
        self.iterated_epoch = int(counters.get("iterated_epoch", -1))
        if self.sampler is not None:
            self.sampler.between_epochs = bool(counters.get("between_epochs"))

    # --- on disk ---

    def restore_snapshot(self) -> None:
        """Go on from the newest snapshot, if there is one. Raises SnapshotError."""
        if self.snapshot is not None and self.snapshot.restore():
            self._count_from(self._counters)

    def snapshot_step(self) -> None:
        """After a step, where the group stays: a snapshot, if one is due or asked for."""
        if self.snapshot is not None:
            self._counters.update(self._counters_now())
            self.snapshot.step()

    def save(self) -> bool:
        """Write the snapshot now. Returns whether this process wrote it."""
        self._counters.update(self._counters_now())
        return self.snapshot is not None and self.snapshot.save()
