"""The beginning of the step under way, kept so that a step can be discarded: buffers, plain dicts
and random number generators.

Parameters and optimizers need no copy: they change only in ``optimizer.step()``, which comes after
the last collective of the gradients. Dicts are copied one level deep.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch

from malletrain.training.torch_private import forget_unscaling


class StepStart:
    """What a forward pass may change. :meth:`keep` costs some microseconds and a copy of the
    buffers (running statistics), if any.
    """

    def __init__(
        self, modules: Iterable[torch.nn.Module], dicts: Iterable[dict[str, Any]] = ()
    ) -> None:
        self._modules = list(modules)
        self._dicts = list(dicts)
        self._before: list[dict[str, Any]] = []
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._random: tuple[Any, ...] = ()

    def keep(self) -> None:
        """A step begins here."""
        buffers = [b for module in self._modules for b in module.buffers()]
        if [id(b) for b in buffers] != [id(b) for b in self._buffers]:
            self._buffers = buffers
            self._copies = [b.detach().clone() for b in buffers]
        else:
            for copy, buffer in zip(self._copies, buffers, strict=True):
                copy.copy_(buffer.detach())
        self._before = [dict(one) for one in self._dicts]
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        numpy = sys.modules.get("numpy")
        self._random = (
            torch.get_rng_state(),
            cuda,
            random.getstate(),
            numpy.random.get_state() if numpy else None,
        )

    def restore(self, grad_scalers: Iterable[Any]) -> None:
        """Back to it; gradients are dropped."""
        with torch.no_grad():
            for copy, buffer in zip(self._copies, self._buffers, strict=True):
                buffer.copy_(copy)
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
