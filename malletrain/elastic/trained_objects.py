"""Checks that the modules and optimizers that a script trains belong to the state of its run.

A module that does not would start at its initial values in every process that joins, and the models
of the ranks would diverge silently. Decides what belongs to the state, and the error messages.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from malletrain.elastic.errors import ElasticError
from malletrain.elastic.training import Training


def _parameter_ids(training: Training) -> set[int]:
    modules = training.state.modules().values()
    return {id(parameter) for module in modules for parameter in module.parameters()}


def check_model(training: Training, module: torch.nn.Module, call: str) -> None:
    """Raise ElasticError if ``module`` is not part of the run's state.

    Args:
        training: the objects of the run.
        module: the module that the script passes.
        call: the function that it is passed to, for the message.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    parameter_ids = _parameter_ids(training)
    if unknown := [p for p in trained if id(p) not in parameter_ids]:
        raise ElasticError(
            f"{call}: {len(unknown)} of {len(trained)} parameters are of no module that "
            "elastic.Run was given, so that no other process would get them. Pass the module by "
            "name: elastic.Run(model=model, …)."
        )


class Optimizers:
    """The optimizers of a run. Checks each before its updates, and rejects every other optimizer
    that trains parameters of the run.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._sizes: dict[int, int] = {}
        self._others: WeakSet[torch.optim.Optimizer] = WeakSet()
        """Optimizers that were checked and train no parameter of the run."""
        _global_hook.begin(self)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check, before an update, that an optimizer of the run trains only parameters of the run's
        modules. Raises ElasticError.
        """
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._sizes.get(id(optimizer)) == size:
            return
        parameter_ids = _parameter_ids(self._training)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if unknown := [p for p in params if id(p) not in parameter_ids]:
            raise ElasticError(
                f"The optimizer trains {len(unknown)} parameters that are of no module that "
                "elastic.Run was given, so that no other process would get them. Pass the module "
                "that has them, too: elastic.Run(model=model, criterion=criterion, …)."
            )
        self._sizes[id(optimizer)] = size

    def refuse_others(self, optimizer: torch.optim.Optimizer) -> None:
        """Check, before an update of any optimizer of the process, that it is one of the run's or
        trains no parameter of the run. Raises ElasticError.
        """
        if optimizer in self._others or any(optimizer is o for o in self._training.optimizers):
            return
        parameter_ids = _parameter_ids(self._training)
        if any(id(p) in parameter_ids for group in optimizer.param_groups for p in group["params"]):
            raise ElasticError(
                f"This {type(optimizer).__name__} trains the run's model and is not of the run's "
                "state: a process that joins would begin without its momentum. Pass it by name: "
                "elastic.Run(model=model, optimizer=optimizer, …)."
            )
        self._others.add(optimizer)


class _GlobalHook:
    """torch's hook for all optimizers of the process, which calls the newest run."""

    def __init__(self) -> None:
        self._handle: Any = None

    def begin(self, optimizers: Optimizers) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = register_optimizer_step_pre_hook(
            lambda optimizer, *_: optimizers.refuse_others(optimizer)
        )


_global_hook = _GlobalHook()
