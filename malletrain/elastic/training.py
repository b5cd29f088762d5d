"""The training state of this process: the objects, the progress counters, and the copies with which
a step can be discarded.

:class:`Training` decides what a step that counts changes, and what a discarded step leaves behind.
It knows no group and no peers; :mod:`malletrain.elastic.state_policy` decides which rank's state
counts.

:class:`StateBeforeStep` copies what a forward pass may change, at the beginning of each step:
buffers, plain attributes of modules (numbers, strings, flags), plain dicts (one level deep), the
states of random number generators and, if needed, parameters. It decides when parameters are
copied. Most scripts change them only in ``optimizer.step()``, after the last collective of the
gradients, and need no copy. Three kinds of scripts need one:

* Scripts that change the parameters between two passes of one step (SAM). The first such step is
  only detected and cannot be discarded; copies are made from the second on.
* Updates with a closure (LBFGS), which exchange gradients while they change the model.
* Scripts with several updates in one step, each from gradients of its own (the two networks of a
  GAN). The first such step is only detected; from the second on the whole state is copied
  (:class:`StateCopy`).

The whole state is also copied to host memory before the last step of each epoch, and kept until the
code after that step has run on all ranks (:meth:`Training.reopen_epoch`). Without enough memory
there is no copy, and that code does not run again.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from malletrain.elastic.background import BackgroundSnapshot
from malletrain.elastic.errors import ElasticError
from malletrain.elastic.group import Group
from malletrain.elastic.state import Holder, describe_tensors
from malletrain.memory.folder import available, bound
from malletrain.training import report
from malletrain.training.batch_change import check_batch_norm
from malletrain.training.epoch_begin import EpochBegin
from malletrain.training.objects import plain_attributes, unwrapped
from malletrain.training.ranks import leads_its_node
from malletrain.training.sampler import ElasticSampler
from malletrain.training.schedulers import Schedulers
from malletrain.training.step_times import counted_as
from malletrain.training.torch_private import forget_unscaling, versions

_ABSENT = object()
"""Value of an attribute that the script had deleted when the state was recorded."""
_SAMPLED_PARAMETERS = 8
"""Number of parameters of which one element is compared with its earlier value. The version counter
is not enough: a change through ``parameter.data`` does not increment it.
"""
_EPOCH_END_SHARE = 0.25
"""Maximum part of the memory of this process's lease for the copies at the end of an epoch, of all
processes of the node.
"""


def epoch_end_bytes(free_bytes: int, lease_bytes: int, processes: int) -> int:
    """Return the maximum size of one process's copy at the end of an epoch, bytes.

    Args:
        free_bytes: memory of the node that is free.
        lease_bytes: the part of the lease's memory that the copies of all its processes may use.
        processes: number of processes of the job on the node, which copy at the same time.
    """
    return min(free_bytes // 2, lease_bytes) // max(1, processes)


class StateBeforeStep:
    """The state that a forward pass may change, as it was at the beginning of a step. :meth:`keep`
    costs a few microseconds, and a copy of the buffers (running statistics) if there are any.

    Args:
        modules: the modules of the run.
        dicts: the plain dicts of the run.
        parameters: whether to detect and undo changes of parameters.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        dicts: Iterable[dict[str, Any]] = (),
        parameters: bool = True,
    ) -> None:
        self._modules = list(modules)
        self._dicts = list(dicts)
        self._dicts_before: list[dict[str, Any]] = []
        self._buffers: list[torch.Tensor] = []
        self._buffer_copies: list[torch.Tensor] = []
        self._attributes: list[tuple[dict[str, Any], str]] | None = None
        """(``__dict__`` of a submodule, name) of each plain attribute; None if to be looked up."""
        self._attributes_before: list[tuple[dict[str, Any], str]] = []
        """Those of the recorded step, with their values in the same order."""
        self._attribute_values: list[Any] = []
        self._random: tuple[Any, ...] = ()
        self._watched = self._modules if parameters else []
        """Modules whose parameters are checked for changes."""
        self._parameters: list[torch.Tensor] | None = None
        self._versions: list[int] = []
        self._elements: list[Any] = []
        self._changes_parameters_in_step = False
        """The script changes parameters within a step, before the optimizer does."""
        self._parameter_copies: list[torch.Tensor] | None = None
        """Copies of the parameters at the beginning of this step; None if not copied."""
        self._optimizer: tuple[torch.optim.Optimizer, dict[str, Any]] | None = None
        """The optimizer that makes an update with a closure, and its state before the update."""

    def forget_parameters(self) -> None:
        """Look up the parameters again at the next step. Call it when the modules may have new
        parameters.
        """
        self._parameters = self._parameter_copies = self._optimizer = self._attributes = None

    def _watched_parameters(self) -> list[torch.Tensor]:
        if self._parameters is None:
            self._parameters = [p for module in self._watched for p in module.parameters()]
        return self._parameters

    def _sampled_elements(self) -> list[Any]:
        return [
            p.detach()[tuple(size // 2 for size in p.shape)].item()
            for p in self._watched_parameters()[:_SAMPLED_PARAMETERS]
            if p.device.type == "cpu" and p.numel()  # reading one on a GPU waits for the GPU
        ]

    @property
    def _parameters_changed(self) -> bool:
        return (
            versions(self._watched_parameters()) != self._versions
            or self._sampled_elements() != self._elements
        )

    def before_update(self) -> None:
        """Detect whether the script has changed parameters within this step. Call it before the
        first ``optimizer.step()`` that has no closure.
        """
        if not self._changes_parameters_in_step and self._parameters_changed:
            self._changes_parameters_in_step = True

    def before_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy parameters and optimizer state before an update with a closure."""
        if self._parameter_copies is None:
            self._parameter_copies = [p.detach().clone() for p in self._watched_parameters()]
        if self._optimizer is None:
            self._optimizer = optimizer, copy.deepcopy(optimizer.state_dict())

    def keep(self) -> None:
        """Record the state at the beginning of a step."""
        buffers = [b for module in self._modules for b in module.buffers()]
        copied = zip(self._buffers, self._buffer_copies, strict=True)
        if [(id(b), b.shape) for b in buffers] != [(id(b), c.shape) for b, c in copied]:
            self._buffers = buffers
            self._buffer_copies = [b.detach().clone() for b in buffers]
        else:
            for saved, buffer in zip(self._buffer_copies, buffers, strict=True):
                saved.copy_(buffer.detach())
        if self._attributes is None:
            self._attributes = [
                place for module in self._modules for place in plain_attributes(module)
            ]
        self._attributes_before = self._attributes
        self._attribute_values = [
            attributes.get(name, _ABSENT) for attributes, name in self._attributes
        ]
        parameters = self._watched_parameters()
        self._versions, self._elements = versions(parameters), self._sampled_elements()
        self._optimizer = None
        if not self._changes_parameters_in_step:
            self._parameter_copies = None
        elif self._parameter_copies is None:
            self._parameter_copies = [p.detach().clone() for p in parameters]
        else:
            for value, parameter in zip(self._parameter_copies, parameters, strict=True):
                value.copy_(parameter.detach())
        self._dicts_before = [dict(values) for values in self._dicts]
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        numpy = sys.modules.get("numpy")
        self._random = (
            torch.get_rng_state(),
            cuda,
            random.getstate(),
            numpy.random.get_state() if numpy else None,
        )

    def restore(self, grad_scalers: Iterable[Any]) -> bool:
        """Restore the recorded state and drop gradients. Return False if parameters were changed
        and not copied, so that they could not be restored, or if no state was recorded.
        """
        if not self._random:
            return False
        restored = True
        with torch.no_grad():
            for saved, buffer in zip(self._buffer_copies, self._buffers, strict=True):
                if buffer.shape != saved.shape:  # by an observer of a quantized layer
                    buffer.resize_(saved.shape)
                buffer.copy_(saved)
            for (attributes, name), value in zip(
                self._attributes_before, self._attribute_values, strict=True
            ):
                if value is _ABSENT:
                    attributes.pop(name, None)
                else:
                    attributes[name] = value
            if self._parameter_copies is not None:
                for value, parameter in zip(
                    self._parameter_copies, self._watched_parameters(), strict=True
                ):
                    parameter.copy_(value)
            elif self._parameters_changed:
                self._changes_parameters_in_step, restored = True, False
        if self._optimizer is not None:
            optimizer, state = self._optimizer
            optimizer.load_state_dict(state)
        for values, before in zip(self._dicts, self._dicts_before, strict=True):
            values.clear()
            values.update(before)
        on_cpu, on_cuda, of_python, of_numpy = self._random
        torch.set_rng_state(on_cpu)
        if on_cuda is not None:
            torch.cuda.set_rng_state(on_cuda)
        random.setstate(of_python)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(of_numpy)
        for module in self._modules:
            module.zero_grad(set_to_none=True)
        for scaler in grad_scalers:
            # otherwise the scaler rejects unscale_() of the repeated step as a second call
            forget_unscaling(scaler)
        return restored


class StateCopy:
    """A copy of all objects of a run, so that a step can be discarded after some of its updates, or
    after the code that follows it. The copy needs as much memory as the state itself.
    """

    def __init__(self, state: Holder) -> None:
        self._state = state
        self._skeleton = b""
        self._tensors: list[torch.Tensor] = []
        self._devices: list[torch.device] = []
        """Device of each tensor in the state; the copy may be in host memory."""

    def keep(self, counters: dict[str, Any]) -> None:
        """Copy the current state, and ``counters``. Raises StateError if the state of an object
        cannot be read.
        """
        self._skeleton, tensors = self._state.pack(counters, for_peer=False)
        self._devices = [t.device for t in tensors]
        if [(t.shape, t.dtype, t.device) for t in tensors] != [
            (t.shape, t.dtype, t.device) for t in self._tensors
        ]:
            self._tensors = [t.clone() for t in tensors]
            return
        for saved, tensor in zip(self._tensors, tensors, strict=True):
            saved.copy_(tensor)

    @counted_as("snapshot")
    def keep_in_host_memory(self, counters: dict[str, Any], most_bytes: int) -> bool:
        """As :meth:`keep`, in host memory. Makes no copy and returns False if the state is larger
        than ``most_bytes`` bytes.
        """
        self.forget()
        skeleton, tensors = self._state.pack(counters, for_peer=False)
        if sum(t.nbytes for t in tensors) > most_bytes:
            return False
        self._tensors = [t.to("cpu", copy=True) for t in tensors]
        self._skeleton, self._devices = skeleton, [t.device for t in tensors]
        return True

    def restore(self) -> dict[str, Any] | None:
        """Restore the copy, once. Return its counters; None if there is no copy."""
        if not self._skeleton:
            return None
        tensors = [t.to(d) for t, d in zip(self._tensors, self._devices, strict=True)]
        counters = self._state.restore(pickle.loads(self._skeleton), tensors)
        self.forget()  # the optimizers now use the copied tensors as their state
        return counters

    def forget(self) -> None:
        """Drop the copy."""
        self._skeleton, self._tensors, self._devices = b"", [], []


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
    epoch_run: bool = field(default=False, compare=False)
    """The process has run that code, and a peer was lost before all ranks had run it."""


class Training:
    """The objects of one run. Arguments: see :class:`malletrain.elastic.Run`."""

    undoes_parameters = True
    """Whether a step that changed parameters can be undone."""
    copies_epoch_ends = False
    """Whether the state is copied before the last step of each epoch."""

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
        self._dicts = {n: d for n, v in objects.items() if isinstance(d := unwrapped(v), dict)}
        self.undo = StateBeforeStep(
            self.state.modules().values(),
            self._dicts.values(),
            parameters=self.undoes_parameters,
        )
        self.several_updates = False
        """A step makes several updates, each from gradients of its own."""
        self.epoch_run = False
        """See :attr:`Standing.epoch_run`."""
        self._has_finished_step = False
        """This process has finished a step, so that the number of updates per step is known."""
        self._state_before = StateCopy(self.state)
        """State before the current step, if a step makes several updates; until an epoch is
        closed, the state before its last step.
        """
        self._updates_before = 0
        self._size_before: int | None = None
        """Global batch size that was requested before the current step."""
        samplers = [value for value in plain if isinstance(value, ElasticSampler)]
        if len(samplers) > 1:
            raise TypeError(
                "elastic.Run was given several samplers, and a step counts the samples of one. "
                "Choose what goes along with a batch by the numbers of its samples, or train in "
                "restart mode, with malletrain.Snapshot."
            )
        self.sampler = samplers[0] if samplers else None
        if self.sampler is not None:
            self.sampler.check_sizes(
                lambda smallest: check_batch_norm(self.state.modules(), smallest)
            )
        self.iterated_epoch = -1
        """Number of the last epoch that was iterated from its first sample on."""
        self._epoch_begin = EpochBegin(lambda: objects)
        if self.sampler is not None:
            self.sampler.watch_begin(self._epoch_begin)
        self._schedulers = Schedulers("elastic.Run", objects, ElasticError)
        self.optimizers = [value for value in plain if isinstance(value, torch.optim.Optimizer)]
        self.scalers = [value for value in plain if hasattr(value, "_per_optimizer_states")]
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

    def compared_objects(self) -> tuple[Callable[[], dict[str, Any]], dict[str, Any]]:
        """Return the arguments of :class:`malletrain.elastic.same_on_all.ChangedObjects`."""
        return self.state.modules, self._dicts

    def rehearse(self, warmup: Callable[[], None]) -> None:
        """Call ``warmup`` and undo what it does to buffers, gradients and random numbers."""
        self.undo.keep()
        warmup()
        self.undo.restore(self.scalers)

    def begin_step(self, batches: int = 0) -> None:
        """Begin a step: record the state that is needed to discard it. ``batches``: number of
        batches of this process in the step.
        """
        self.undo.keep()
        self._updates_before = self.updates
        if self.sampler is not None:
            self._size_before = self.sampler.requested_batch_size
        if self.several_updates:
            self._state_before.keep(self._counters_for_peers())
        elif self.copies_epoch_ends and self._ends_epoch(batches):
            self._copy_epoch_end()

    def _copy_epoch_end(self) -> None:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        most = epoch_end_bytes(available(), bound(_EPOCH_END_SHARE), processes)
        fits = self._state_before.keep_in_host_memory(self._counters_for_peers(), most)
        if not fits and leads_its_node():
            report.tell(
                "This node has too little free memory for a copy of the state at the end of an "
                f"epoch ({most / 1e6:.0f} MB for each process). If a process is lost in the code "
                "after an epoch, the work that it had to do there is lost.",
                once="copy of an epoch's end",
            )

    def _ends_epoch(self, batches: int) -> bool:
        """Return whether no batch of the epoch remains after a step of ``batches`` batches."""
        sampler = self.sampler
        return (
            sampler is not None
            and sampler.looping
            and 0 < len(sampler.upcoming(batches + 1)) <= batches
        )

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
        """Undo the current step. Return False if the state could not be restored, because it was
        changed and not copied. ``share``: samples of this process in the step.
        """
        self._discarded_samples = share
        whole = self.undo.restore(self.scalers)
        if self.sampler is not None:
            self.sampler.withdraw_size_request(self._size_before)
        if self.updates == self._updates_before:
            return whole
        self.updates = self._updates_before
        return self._state_before.restore() is not None

    def reopen_epoch(self) -> None:
        """Go back to the state before the last step of the epoch, so that this step and the code
        after it come again. Does nothing if that state was not copied.
        """
        counters = self._state_before.restore()
        if counters is not None:
            self._load_counters(counters)
            self._torn = False

    def epoch_closed(self) -> None:
        """Drop what was kept for :meth:`reopen_epoch`."""
        if not self.several_updates:
            self._state_before.forget()

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
        """Return the progress of this process."""
        return Standing(
            self.has_state,
            self.updates,
            self.steps,
            not self._torn,
            not self.between_epochs,
            self.epoch_run,
        )

    @property
    def between_epochs(self) -> bool:
        """Whether the steps of an epoch are done and the code that follows them is not."""
        return self.sampler is not None and self.sampler.between_epochs

    def pack(self, by_name: bool) -> tuple[bytes, list[torch.Tensor]]:
        """See :meth:`Holder.pack`."""
        return self.state.pack(self._counters_for_peers(), by_name=by_name)

    def take_over(self, skeleton: Any, tensors: list[torch.Tensor], had_state: bool) -> None:
        """Replace the state of this process by the one that a peer sent.

        Args:
            skeleton: skeleton of the received state (:meth:`Holder.pack`).
            tensors: its tensors.
            had_state: whether this process had state before.
        """
        before = self.steps
        self._load_counters(self.state.restore(skeleton, tensors))
        if had_state and self.steps == before + 1 and self._discarded_samples:
            # The step that was discarded here counts after all, because a peer had finished it.
            report.report(self._discarded_samples)

    def for_joiners(self) -> str:
        """Return the tensors for which joiners need memory
        (:mod:`~malletrain.elastic.state`).
        """
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
        if not self.between_epochs:
            self._state_before.forget()
        self.epoch_run = False
        self.state.rooms.clear()
        self.has_state, self._torn, self._discarded_samples = True, False, 0
        if self.snapshot is not None:
            self.snapshot.round_entered()

    def _counters_for_peers(self) -> dict[str, Any]:
        """Return the counters that are sent to a peer with the objects."""
        return {
            **self._progress_counters(),
            "between_epochs": int(self.between_epochs),
            "iterated_epoch": self.iterated_epoch,
        }

    def _progress_counters(self) -> dict[str, Any]:
        own = {"steps": self.steps, "samples": self.samples, "updates": self.updates}
        return {**own, **self._epoch_begin.state_dict()}

    def _load_counters(self, counters: dict[str, Any]) -> None:
        self.steps, self.samples, self.updates = (
            int(counters.get(name, 0)) for name in ("steps", "samples", "updates")
        )
        self.iterated_epoch = int(counters.get("iterated_epoch", -1))
        self._epoch_begin.load_state_dict(counters)
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
        """Write the snapshot now. Return whether this process wrote it."""
        self._counters.update(self._progress_counters())
        return self.snapshot is not None and self.snapshot.save()
