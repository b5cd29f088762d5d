"""The beginning of the step under way, kept so that a step can be discarded: buffers, plain numbers
of modules, plain dicts, random number generators and, where it is needed, parameters.

Decides when parameters are copied. Most scripts change them only in ``optimizer.step()``, which
comes after the last collective of the gradients, and need no copy. Three kinds do: scripts that
move the parameters between two passes of one step (SAM), from the second such step on; updates with
a closure (LBFGS), which pass through the group while they change the model; and steps of several
updates, each from gradients of its own (a GAN's two networks), from the second such step on: of
those the whole state is copied (:class:`StateCopy`). Dicts are copied one level deep.
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
from malletrain.training.module_numbers import places
from malletrain.training.torch_private import forget_unscaling, versions

_LOOKED_AT = 8
"""Parameters of which one element is compared: a change through ``parameter.data`` is not counted
in their versions.
"""


class StepStart:
    """What a forward pass may change. :meth:`keep` costs some microseconds and a copy of the
    buffers (running statistics), if any.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        dicts: Iterable[dict[str, Any]] = (),
        parameters: bool = True,
    ) -> None:
        self._modules = list(modules)
        self._dicts = list(dicts)
        self._before: list[dict[str, Any]] = []
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._places: list[tuple[dict[str, Any], str]] | None = None
        self._numbers: list[Any] = []
        self._random: tuple[Any, ...] = ()
        self._watched = self._modules if parameters else []
        """Modules whose parameters are looked after."""
        self._parameters: list[torch.Tensor] | None = None
        self._versions: list[int] = []
        self._elements: list[Any] = []
        self._moves_parameters = False
        """The script changes them within a step, before the optimizer does."""
        self._values: list[torch.Tensor] | None = None
        """Of the parameters at the beginning of this step."""
        self._optimizer: tuple[torch.optim.Optimizer, dict[str, Any]] | None = None
        """One that makes an update with a closure, and its state before."""

    def forget_parameters(self) -> None:
        """The modules may have other parameters from now on."""
        self._parameters = self._values = self._optimizer = self._places = None

    def _of_modules(self) -> list[torch.Tensor]:
        if self._parameters is None:
            self._parameters = [p for module in self._watched for p in module.parameters()]
        return self._parameters

    def _samples(self) -> list[Any]:
        return [
            p.detach()[tuple(size // 2 for size in p.shape)].item()
            for p in self._of_modules()[:_LOOKED_AT]
            if p.device.type == "cpu" and p.numel()  # a GPU would be waited for
        ]

    @property
    def _moved(self) -> bool:
        return versions(self._of_modules()) != self._versions or self._samples() != self._elements

    def before_update(self) -> None:
        """The first update of the step is about to be made, without a closure."""
        if not self._moves_parameters and self._moved:
            self._moves_parameters = True

    def before_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` is about to make an update with a closure."""
        if self._values is None:
            self._values = [p.detach().clone() for p in self._of_modules()]
        if self._optimizer is None:
            self._optimizer = optimizer, copy.deepcopy(optimizer.state_dict())

    def keep(self) -> None:
        """A step begins here."""
        buffers = [b for module in self._modules for b in module.buffers()]
        if [id(b) for b in buffers] != [id(b) for b in self._buffers]:
            self._buffers = buffers
            self._copies = [b.detach().clone() for b in buffers]
        else:
            for saved, buffer in zip(self._copies, buffers, strict=True):
                saved.copy_(buffer.detach())
        if self._places is None:
            self._places = [place for module in self._modules for place in places(module)]
        self._numbers = [attributes.get(name) for attributes, name in self._places]
        parameters = self._of_modules()
        self._versions, self._elements = versions(parameters), self._samples()
        self._optimizer = None
        if not self._moves_parameters:
            self._values = None
        elif self._values is None:
            self._values = [p.detach().clone() for p in parameters]
        else:
            for value, parameter in zip(self._values, parameters, strict=True):
                value.copy_(parameter.detach())
        self._before = [dict(one) for one in self._dicts]
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        numpy = sys.modules.get("numpy")
        self._random = (
            torch.get_rng_state(),
            cuda,
            random.getstate(),
            numpy.random.get_state() if numpy else None,
        )

    def restore(self, grad_scalers: Iterable[Any]) -> bool:
        """Go back to it; gradients are dropped. Returns False when parameters were changed and not
        copied, so that they are not as they were.
        """
        whole = True
        with torch.no_grad():
            for saved, buffer in zip(self._copies, self._buffers, strict=True):
                buffer.copy_(saved)
            for (attributes, name), value in zip(self._places or (), self._numbers, strict=True):
                attributes[name] = value
            if self._values is not None:
                for value, parameter in zip(self._values, self._of_modules(), strict=True):
                    parameter.copy_(value)
            elif self._moved:
                self._moves_parameters, whole = True, False
        if self._optimizer is not None:
            optimizer, state = self._optimizer
            optimizer.load_state_dict(state)
        for one, before in zip(self._dicts, self._before, strict=True):
            one.clear()
            one.update(before)
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
            # else the repeated unscale_() is refused as a second one
            forget_unscaling(scaler)
        return whole


class StateCopy:
    """A copy of everything that a run was given, so that also a step of which some updates were
    made can be discarded. It takes the memory of the state once more.
    """

    def __init__(self, state: Holder) -> None:
        self._state = state
        self._skeleton = b""
        self._tensors: list[torch.Tensor] = []

    def keep(self) -> None:
        """Copy the state as it is now. Raises StateError where some of it cannot be taken."""
        self._skeleton, tensors = self._state.pack({})
        if [(t.shape, t.dtype, t.device) for t in tensors] != [
            (t.shape, t.dtype, t.device) for t in self._tensors
        ]:
            self._tensors = [t.clone() for t in tensors]
            return
        for saved, tensor in zip(self._tensors, tensors, strict=True):
            saved.copy_(tensor)

    def restore(self) -> bool:
        """Put the copy back, once. Returns False when there is none."""
        if not self._skeleton:
            return False
        self._state.put_back(pickle.loads(self._skeleton), self._tensors)
        self.forget()  # optimizers hold the copied tensors themselves from now on
        return True

    def forget(self) -> None:
        """There is no copy any more."""
        self._skeleton, self._tensors = b"", []
