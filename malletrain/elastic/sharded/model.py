"""The sharded model of a run: the script's two functions, and the module they made for the present
group.

Decides how a module comes to be: built on ``meta``, sharded by the script, given memory. What is in
it is filled in by :mod:`malletrain.elastic.sharded.sharing`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from malletrain.elastic.errors import ElasticError
from malletrain.elastic.switches import named_parameters
from malletrain.training import rng
from malletrain.training.objects import plain_name

Build = Callable[[], torch.nn.Module]
Parallelize = Callable[[torch.nn.Module, Any], Any]


class ShardedModel(torch.nn.Module):
    """Use it where a script uses its sharded model. ``module`` is that of the present group:
    another one after each change, with the same names.

    Args:
        build: makes the model.
        parallelize: called with a model on ``meta`` and a mesh; applies ``fully_shard``.
        device: where the shards are.
    """

    def __init__(self, build: Build, parallelize: Parallelize, device: torch.device) -> None:
        super().__init__()
        self._build, self._parallelize, self._device = build, parallelize, device
        self.used: Callable[[], None] = lambda: None
        """Called before each forward pass."""
        self.module = self._on_meta()

    def _on_meta(self) -> torch.nn.Module:
        before = rng.state()
        with torch.device("meta"):
            module = self._build()
        rng.load(before)  # a change of the group draws nothing
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"elastic.Run: build() returned a {type(module).__name__}; it must return the "
                "model."
            )
        return module

    def whole(self) -> torch.nn.Module:
        """A model with the numbers that the script begins with, in this process's memory."""
        with torch.device("cpu"):
            return self._build()

    def sharded(self, mesh: Any) -> torch.nn.Module:
        """A module for ``mesh``, with memory and any numbers in it. Raises ElasticError."""
        return self.without_memory(mesh).to_empty(device=self._device)

    def without_memory(self, mesh: Any) -> torch.nn.Module:
        """A module for ``mesh``, on ``meta``. Raises ElasticError."""
        module = self._on_meta()
        made = self._parallelize(module, mesh)
        module = made if isinstance(made, torch.nn.Module) else module
        if not hasattr(module, "reset_iter_state") and not hasattr(module, "reshard"):
            raise ElasticError(
                "elastic.Run: parallelize(model, mesh) must apply fully_shard(model, mesh=mesh) to "
                "the model itself, after its parts."
            )
        return module

    def let_go(self) -> None:
        """A step broke off within the module: have its shards be what they were before it."""
        reset = getattr(self.module, "reset_iter_state", None)
        if reset is not None:
            reset()
            return
        for part in self.module.modules():  # of torch that has no such method yet
            reshard = getattr(part, "reshard", None)
            if callable(reshard):
                reshard()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's."""
        self.used()
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, by its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the module."""
        return self.module.load_state_dict(*args, **kwargs)


def release(module: torch.nn.Module) -> None:
    """Give the memory of a module back that is not used any more. Modules of FSDP are part of
    circles, and would keep it until the interpreter looks for those.
    """
    for tensor in module.parameters():
        tensor.grad = None
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.device.type != "meta":
            local.detach().untyped_storage().resize_(0)


def saved_names(module: torch.nn.Module) -> set[str]:
    """The names, without wrappings, of all that is part of the module's state."""
    return {plain_name(name) for name in module.state_dict()}


def exchange_parameters(
    optimizer: torch.optim.Optimizer, old: torch.nn.Module, new: torch.nn.Module
) -> Callable[[], None]:
    """Have ``optimizer`` train the parameters of ``new`` in place of those of ``old``, without any
    state yet. Returns what undoes it.

    Raises:
        ElasticError: a parameter is not of the model, or not of the new one.
    """
    names = {id(parameter): plain_name(name) for name, parameter in old.named_parameters()}
    there = named_parameters(new)
    before = [list(group["params"]) for group in optimizer.param_groups]
    state = dict(optimizer.state)
    unknown = [p for params in before for p in params if id(p) not in names]
    if unknown:
        raise ElasticError(
            f"The optimizer trains {len(unknown)} parameters that are not of the model that "
            "build() makes. Make it of model.parameters() in the function that you pass as "
            "`optimizer`."
        )
    gone = [name for params in before for p in params if (name := names[id(p)]) not in there]
    if gone:
        raise ElasticError(
            f"parallelize(model, mesh) made a model without the parameter {gone[0]} of build()'s. "
            "It may wrap and shard the parts of the model, but every parameter must keep its name."
        )
    for group, params in zip(optimizer.param_groups, before, strict=True):
        group["params"] = [there[names[id(p)]] for p in params]
    optimizer.state.clear()

    def undo() -> None:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
        optimizer.state.clear()
        optimizer.state.update(state)

    return undo
