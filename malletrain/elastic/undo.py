"""A copy of the state at the beginning of the current step, so that the step can be discarded:
buffers, plain attributes of modules (numbers, strings, flags), plain dicts, the states of random
number generators and, if needed, parameters.

Decides when parameters are copied. Most scripts change them only in ``optimizer.step()``, after the
last collective of the gradients, and need no copy. Three kinds of scripts need one:

* Scripts that change the parameters between two passes of one step (SAM). The first such step is
  only detected and cannot be discarded; copies are made from the second on.
* Updates with a closure (LBFGS), which exchange gradients while they change the model.
* Scripts with several updates in one step, each from gradients of its own (the two networks of a
  GAN). The first such step is only detected; from the second on the whole state is copied
  (:class:`StateCopy`).

Dicts are copied one level deep.
"""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch

from malletrain.elastic.state import Holder
from malletrain.training.module_numbers import plain_attributes
from malletrain.training.torch_private import forget_unscaling, versions

_ABSENT = object()
"""Value of an attribute that the script had deleted when the state was recorded."""
_SAMPLED_PARAMETERS = 8
"""Number of parameters of which one element is compared with its earlier value. The version counter
is not enough: a change through ``parameter.data`` does not increment it.
"""


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
        if [id(b) for b in buffers] != [id(b) for b in self._buffers]:
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
        """Restore the recorded state and drop gradients. Returns False if parameters were changed
        and not copied, so that they could not be restored, or if no state was recorded.
        """
        if not self._random:
            return False
        restored = True
        with torch.no_grad():
            for saved, buffer in zip(self._buffer_copies, self._buffers, strict=True):
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
    """A copy of all objects of a run, so that a step can be discarded after some of its updates.
    The copy needs as much memory as the state itself.
    """

    def __init__(self, state: Holder) -> None:
        self._state = state
        self._skeleton = b""
        self._tensors: list[torch.Tensor] = []

    def keep(self) -> None:
        """Copy the current state. Raises StateError if the state of an object cannot be read."""
        self._skeleton, tensors = self._state.pack({})
        if [(t.shape, t.dtype, t.device) for t in tensors] != [
            (t.shape, t.dtype, t.device) for t in self._tensors
        ]:
            self._tensors = [t.clone() for t in tensors]
            return
        for saved, tensor in zip(self._tensors, tensors, strict=True):
            saved.copy_(tensor)

    def restore(self) -> bool:
        """Restore the copy, once. Returns False if there is none."""
        if not self._skeleton:
            return False
        self._state.restore(pickle.loads(self._skeleton), self._tensors)
        self.forget()  # the optimizers now use the copied tensors as their state
        return True

    def forget(self) -> None:
        """Drop the copy."""
        self._skeleton, self._tensors = b"", []
