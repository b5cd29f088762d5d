"""Whether what a script trains belongs to the state of its run.

What does not would begin at its first values in every process that joins, and the ranks' models
would drift apart without a word. Decides what belongs, and the sentences where something does not.
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
    """Raises ElasticError where ``module``, given to ``call``, is not of the run's state."""
    trained = [p for p in module.parameters() if p.requires_grad]
    parameter_ids = _parameter_ids(training)
    if unknown := [p for p in trained if id(p) not in parameter_ids]:
        raise ElasticError(
            f"{call}: {len(unknown)} of {len(trained)} parameters are of no module that "
            "elastic.Run was given, so that no other process would get them. Pass the module by "
            "name: elastic.Run(model=model, …)."
        )


class Optimizers:
    """Those of a run: each is looked at before its updates, and any other that trains what belongs
    to the run is refused.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._sizes: dict[int, int] = {}
        self._others: WeakSet[torch.optim.Optimizer] = WeakSet()
        """Those that were looked at and train something else."""
        _watched.begin(self)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Before an update of one of the run's: all that it trains is of the run's modules. Raises
        ElasticError.
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
        """Before an update of any optimizer. Raises ElasticError."""
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


class _Watched:
    """torch's hook for all optimizers of the process, which asks the newest run."""

    def __init__(self) -> None:
        self._handle: Any = None

    def begin(self, optimizers: Optimizers) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = register_optimizer_step_pre_hook(
            lambda optimizer, *_: optimizers.refuse_others(optimizer)
        )


_watched = _Watched()
