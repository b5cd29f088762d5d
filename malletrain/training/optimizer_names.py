"""An optimizer's state by the names of its parameters.

Decides which parameter a saved state belongs to. torch numbers the parameters, so that one that is
frozen, added or moved to another group makes a state unreadable; and
``torch.distributed.checkpoint.state_dict`` takes a step with zero gradients before it looks at an
optimizer that has none yet, and reads no key of a group that is not in both (a scheduler's
``initial_lr``). By name none of that happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from malletrain.training.objects import plain_name
from malletrain.training.report import tell

_NOT_SAVED = {"params", "param_names"}
"""Keys of a group that are of the script's own now, whatever was saved."""


def names_of(modules: Mapping[str, Any]) -> dict[int, str]:
    """The name of each parameter, with the name of its module before it, by its id."""
    names: dict[int, str] = {}
    for name, module in modules.items():
        for path, parameter in module.named_parameters():
            names.setdefault(id(parameter), f"{name}.{plain_name(path)}")
    return names


def _labels(optimizer: Any, names: Mapping[int, str]) -> list[str]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [names.get(id(p), f"#{number}") for number, p in enumerate(parameters)]


def parameters_by_name(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """The optimizer's parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return dict(zip(_labels(optimizer, names), parameters, strict=True))


def by_name(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """The state of ``optimizer`` with names for numbers."""
    return from_numbers(optimizer, optimizer.state_dict(), names)


def from_numbers(
    optimizer: Any, state: Mapping[str, Any], names: Mapping[int, str]
) -> dict[str, Any]:
    """A state of ``optimizer`` with names for numbers.

    Raises:
        ValueError: when it is of an optimizer with another number of parameters.
    """
    labels = _labels(optimizer, names)
    numbered = sum(len(group["params"]) for group in state["param_groups"])
    if numbered != len(labels):
        raise ValueError(f"it is of {numbered} parameters, and this optimizer has {len(labels)}.")
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
    """Have ``optimizer`` be as ``saved`` says: parameters that were not saved begin anew, and those
    that are no longer trained are left out.

    Raises:
        ValueError: when none of its parameters was saved.
    """
    labels = _labels(optimizer, names)
    home = {label: group for group in saved["param_groups"] for label in group["params"]}
    if labels and home and not set(labels) & set(home):
        raise ValueError(
            f"none of its parameters was saved ({labels[0]}, …), but {next(iter(home))}, …"
        )
    groups = []
    for group in optimizer.state_dict()["param_groups"]:
        source: Mapping[str, Any] = next(
            (home[labels[n]] for n in group["params"] if labels[n] in home), {}
        )
        settings = {key: value for key, value in source.items() if key not in _NOT_SAVED}
        groups.append({**group, **settings})
    gone = sorted(set(home) - set(labels))
    if gone:
        tell(
            f"{len(gone)} parameters are not trained by this optimizer any more ({gone[0]}, …); "
            "their state is left out."
        )
    state = {
        number: saved["state"][label]
        for number, label in enumerate(labels)
        if label in saved["state"]
    }
    optimizer.load_state_dict({**saved, "state": state, "param_groups": groups})
