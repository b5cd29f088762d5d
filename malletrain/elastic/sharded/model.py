"""The sharded model of a run: the two functions of the script, and the module that they made for
the current group.

Decides how a module is made: built on ``meta``, sharded by the script, then given memory.
:mod:`malletrain.elastic.sharded.sharing` fills in the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from malletrain.elastic.errors import ElasticError
from malletrain.elastic.module_modes import named_parameters
from malletrain.training import rng
from malletrain.training.objects import plain_name
from malletrain.training.torch_private import wrong_gradients

Build = Callable[[], torch.nn.Module]
Parallelize = Callable[[torch.nn.Module, Any], Any]


class ShardedModel(torch.nn.Module):
    """The sharded model as the script uses it. ``module`` is the module of the current group: a new
    one after each change, with the same names.

    Args:
        build: returns the model.
        parallelize: called with a model on ``meta`` and a mesh; applies ``fully_shard``.
        device: device of the shards.
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
        rng.load(before)  # a change of the group must not advance the generators
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"elastic.Run: build() returned a {type(module).__name__}; it must return the "
                "model."
            )
        return module

    def whole(self) -> torch.nn.Module:
        """Return the unsharded model with its initial values, in host memory."""
        with torch.device("cpu"):
            return self._build()

    def sharded(self, mesh: Any) -> torch.nn.Module:
        """Return a module for ``mesh``, with memory and undefined values. Raises ElasticError, also
        if this torch computes wrong gradients for it.
        """
        module = self.without_memory(mesh)
        if problem := wrong_gradients(module):
            raise ElasticError(f"elastic.Run: {problem}")
        return module.to_empty(device=self._device)

    def without_memory(self, mesh: Any) -> torch.nn.Module:
        """Return a module for ``mesh``, on ``meta``. Raises ElasticError."""
        module = self._on_meta()
        returned = self._parallelize(module, mesh)
        module = returned if isinstance(returned, torch.nn.Module) else module
        if not hasattr(module, "reset_iter_state") and not hasattr(module, "reshard"):
            raise ElasticError(
                "elastic.Run: parallelize(model, mesh) must apply fully_shard(model, mesh=mesh) to "
                "the model itself, after its parts."
            )
        return module

    def reset_iteration(self) -> None:
        """Reshard the module after a step that was interrupted within it."""
        reset = getattr(self.module, "reset_iter_state", None)
        if reset is not None:
            reset()
            return
        for part in self.module.modules():  # an older torch without reset_iter_state()
            reshard = getattr(part, "reshard", None)
            if callable(reshard):
                reshard()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        self.used()
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict into the module."""
        return self.module.load_state_dict(*args, **kwargs)


def release(module: torch.nn.Module) -> None:
    """Free the memory of a module that is no longer used. FSDP modules are part of reference
    cycles, and would keep the memory until the next garbage collection.
    """
    for tensor in module.parameters():
        tensor.grad = None
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.device.type != "meta":
            local.detach().untyped_storage().resize_(0)


def saved_names(module: torch.nn.Module) -> set[str]:
    """Return the names, without wrappers, of all entries of the module's state dict."""
    return {plain_name(name) for name in module.state_dict()}


def exchange_parameters(
    optimizer: torch.optim.Optimizer, old: torch.nn.Module, new: torch.nn.Module
) -> Callable[[], None]:
    """Make ``optimizer`` train the parameters of ``new`` instead of those of ``old``, and clear its
    state.

    Args:
        optimizer: the optimizer.
        old: the module that it trains.
        new: the module that it is to train.

    Returns:
        A function that undoes the exchange.

    Raises:
        ElasticError: a parameter of the optimizer is not in ``old``, or not in ``new``.
    """
    names = {id(parameter): plain_name(name) for name, parameter in old.named_parameters()}
    new_parameters = named_parameters(new)
    before = [list(group["params"]) for group in optimizer.param_groups]
    state = dict(optimizer.state)
    unknown = [p for params in before for p in params if id(p) not in names]
    if unknown:
        raise ElasticError(
            f"The optimizer trains {len(unknown)} parameters that are not of the model that "
            "build() makes. Make it of model.parameters() in the function that you pass as "
            "`optimizer`."
        )
    missing = [
        name for params in before for p in params if (name := names[id(p)]) not in new_parameters
    ]
    if missing:
        raise ElasticError(
            f"parallelize(model, mesh) made a model without the parameter {missing[0]} of "
            "build()'s. It may wrap and shard the parts of the model, but every parameter must "
            "keep its name."
        )
    for group, params in zip(optimizer.param_groups, before, strict=True):
        group["params"] = [new_parameters[names[id(p)]] for p in params]
    optimizer.state.clear()

    def undo() -> None:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
        optimizer.state.clear()
        optimizer.state.update(state)

    return undo
