"""Saves an optimizer's state by the names of its parameters.

Decides which parameter a saved state belongs to. torch numbers the parameters, so a parameter that
is frozen, added or moved to another group makes a state unreadable.
``torch.distributed.checkpoint.state_dict`` does a step with zero gradients if an optimizer has no
state yet, and ignores group keys that are not in both (a scheduler's ``initial_lr``). Names avoid
both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from malletrain.training.objects import plain_name
from malletrain.training.report import tell

_NOT_SAVED = {"params", "param_names"}
"""Keys of a group for which the script's current value is used instead of the saved one."""


def names_of(modules: Mapping[str, Any]) -> dict[int, str]:
    """Return the name of each parameter, prefixed by the name of its module, by the parameter's
    id.
    """
    names: dict[int, str] = {}
    for name, module in modules.items():
        for path, parameter in module.named_parameters():
            names.setdefault(id(parameter), f"{name}.{plain_name(path)}")
    return names


def _labels(optimizer: Any, names: Mapping[int, str]) -> list[str]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [names.get(id(p), f"#{number}") for number, p in enumerate(parameters)]


def parameters_by_name(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the optimizer's parameters by name."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return dict(zip(_labels(optimizer, names), parameters, strict=True))


def by_name(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the state of ``optimizer`` with names in place of parameter numbers."""
    return from_numbers(optimizer, optimizer.state_dict(), names)


def from_numbers(
    optimizer: Any, state: Mapping[str, Any], names: Mapping[int, str]
) -> dict[str, Any]:
    """Return a state of ``optimizer`` with names in place of parameter numbers.

    Args:
        optimizer: the optimizer.
        state: a state with parameter numbers.
        names: parameter names by the parameter's id.

    Raises:
        ValueError: the state has another number of parameters.
    """
    labels = _labels(optimizer, names)
    numbered = sum(len(group["params"]) for group in state["param_groups"])
    if numbered != len(labels):
        raise ValueError(f"it has {numbered} parameters, but this optimizer has {len(labels)}.")
    return {
        **state,
        "state": {
            labels[key] if isinstance(key, int) else key: entry
            for key, entry in state["state"].items()
        },
        "param_groups": [
            {**group, "params": [labels[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def load(optimizer: Any, saved: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Load a state with names into ``optimizer``. Parameters that were not saved start without
    state; the state of parameters that it no longer trains is dropped.

    Args:
        optimizer: the optimizer.
        saved: the state, by parameter name.
        names: parameter names by the parameter's id.

    Raises:
        ValueError: none of its parameters was saved.
    """
    labels = _labels(optimizer, names)
    group_of = {label: group for group in saved["param_groups"] for label in group["params"]}
    if labels and group_of and not set(labels) & set(group_of):
        raise ValueError(
            f"none of its parameters was saved ({labels[0]}, …), but {next(iter(group_of))}, …"
        )
    groups = []
    for group in optimizer.state_dict()["param_groups"]:
        source: Mapping[str, Any] = next(
            (group_of[labels[n]] for n in group["params"] if labels[n] in group_of), {}
        )
        settings = {key: value for key, value in source.items() if key not in _NOT_SAVED}
        groups.append({**group, **settings})
    dropped = sorted(set(group_of) - set(labels))
    if dropped:
        tell(
            f"{len(dropped)} parameters are not trained by this optimizer any more "
            f"({dropped[0]}, …); their state is left out."
        )
    state = {
        number: saved["state"][label]
        for number, label in enumerate(labels)
        if label in saved["state"]
    }
    optimizer.load_state_dict({**saved, "state": state, "param_groups": groups})
