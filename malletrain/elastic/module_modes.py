"""The settings of a ``torch.nn.Module`` that its state dict does not contain: which parameters are
frozen, and which submodules are in evaluation mode.

Decides nothing. Parameter names omit the wrappers that ``torch.compile`` and activation
checkpointing add, so that they are the same on ranks with and without them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from malletrain.elastic.peer_pickles import exchanged
from malletrain.training.objects import plain_name


@exchanged
@dataclass(frozen=True)
class ModuleModes:
    """The settings of one module."""

    requires_grad: dict[str, bool]
    """``requires_grad`` of each parameter."""
    training: dict[str, bool]
    """Whether each submodule is in training mode."""


def named_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by their names without wrappers."""
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


def named_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers by their names without wrappers."""
    return {plain_name(name): buffer for name, buffer in module.named_buffers()}


def modes_of(module: torch.nn.Module) -> ModuleModes:
    """Return the settings of ``module``."""
    return ModuleModes(
        {name: parameter.requires_grad for name, parameter in named_parameters(module).items()},
        {plain_name(name): part.training for name, part in module.named_modules()},
    )


def set_modes(module: torch.nn.Module, modes: ModuleModes) -> None:
    """Apply the settings to ``module``."""
    for name, parameter in named_parameters(module).items():
        parameter.requires_grad_(modes.requires_grad.get(name, parameter.requires_grad))
    for name, part in module.named_modules():
        part.training = modes.training.get(plain_name(name), part.training)
