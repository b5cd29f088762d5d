"""What a script sets of a module and no state has: what is frozen, what is evaluated only.

Decides nothing; by names without wrappings, because ``parallelize`` may compile parts of a sharded
model, or have their activations computed anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from malletrain.training.objects import plain_name


@dataclass(frozen=True)
class Switches:
    """Those of one module."""

    trained: dict[str, bool]
    """``requires_grad`` of each parameter."""
    training: dict[str, bool]
    """Whether each part is in training mode."""


def named_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters by their names without wrappings."""
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


def named_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The same of the buffers."""
    return {plain_name(name): buffer for name, buffer in module.named_buffers()}


def switches_of(module: torch.nn.Module) -> Switches:
    """Those of ``module``."""
    return Switches(
        {name: parameter.requires_grad for name, parameter in named_parameters(module).items()},
        {plain_name(name): part.training for name, part in module.named_modules()},
    )


def set_switches(module: torch.nn.Module, switches: Switches) -> None:
    """Have ``module`` have them."""
    for name, parameter in named_parameters(module).items():
        parameter.requires_grad_(switches.trained.get(name, parameter.requires_grad))
    for name, part in module.named_modules():
        part.training = switches.training.get(plain_name(name), part.training)
