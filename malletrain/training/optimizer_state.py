"""Loads the state of an optimizer. Decides which parameter a saved state belongs to, and when it is
loaded.

torch numbers the parameters of an optimizer by their position in its groups. A script that builds
the groups from sets of names has another order in each process, so the names are saved with the
state, and the saved numbers are put in the order that the optimizer has here.

An optimizer may get further groups during training, as in fine-tuning that unfreezes layers step by
step. If the optimizer has all saved groups, the state is loaded at once. Otherwise the state of its
present groups is loaded at once, and the full state right before its next update. Until then the
script must add the other groups with ``add_param_group()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from malletrain.training.snapshot_file import SnapshotError

NamesByGroup = list[list[str]]
"""Names of the parameters of an optimizer, by group, in its order."""
_ORDER_IN_STATE = {"LBFGS"}
"""Optimizers whose state has all parameters in one vector, in their order."""


def names_by_group(optimizer: Any, names: Mapping[int, str]) -> NamesByGroup | None:
    """Return the names of the optimizer's parameters; None if it has parameters without a name.

    Args:
        optimizer: a ``torch.optim.Optimizer``, or another object.
        names: names by the parameter's id.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list):
        return None
    by_group = [[names.get(id(p), "") for p in group["params"]] for group in groups]
    return by_group if all(all(group) for group in by_group) else None


def load(
    optimizer: Any,
    state: Mapping[str, Any],
    source: str,
    saved_names: NamesByGroup | None = None,
    names: Callable[[], Mapping[int, str]] = dict,
) -> None:
    """Load ``state`` into ``optimizer``.

    Args:
        optimizer: a ``torch.optim.Optimizer``.
        state: a result of its ``state_dict()``, with at least as many groups.
        source: description of the state, for messages.
        saved_names: result of :func:`names_by_group` when the state was taken; None if unknown.
            Then the state is loaded by position.
        names: returns the present names by the parameter's id.

    Raises:
        SnapshotError: at the optimizer's next update, if groups are still missing or have other
            parameters.
        ValueError: a group has other parameters than when the state was taken, or they are in
            another order and the state depends on it; or the state does not fit for another reason
            (raised by torch).
    """

    def in_own_order() -> Mapping[str, Any]:
        own_names = names_by_group(optimizer, names())
        if saved_names is None or own_names is None:
            return state
        return _reordered(optimizer, state, saved_names, own_names)

    ordered = in_own_order()
    saved = ordered["param_groups"]
    groups = optimizer.param_groups
    if len(groups) >= len(saved) or _sizes(groups) != _sizes(saved[: len(groups)]):
        optimizer.load_state_dict(ordered)
        return
    first = saved[: len(groups)]
    numbers = {number for group in first for number in group["params"]}
    entries = {key: entry for key, entry in state["state"].items() if key in numbers}
    optimizer.load_state_dict({**state, "state": entries, "param_groups": first})

    def complete(optimizer: Any, *_: Any) -> None:
        handle.remove()
        groups = optimizer.param_groups
        if _sizes(groups) != _sizes(saved):
            raise SnapshotError(
                f"{source} is of {len(saved)} parameter groups with {_sizes(saved)} tensors, and "
                f"the script's {type(optimizer).__name__} has {_sizes(groups)}. A script that adds "
                "groups while it trains must add them again after a restart, before the first "
                "step: write `if epoch >= 2 and len(optimizer.param_groups) == 1:`, not "
                "`if epoch == 2:`."
            )
        try:
            optimizer.load_state_dict(in_own_order())
        except ValueError as error:
            raise SnapshotError(f"{source} does not fit: {error}") from error

    handle = optimizer.register_step_pre_hook(complete)


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _reordered(
    optimizer: Any, state: Mapping[str, Any], saved: NamesByGroup, own: NamesByGroup
) -> Mapping[str, Any]:
    """Return ``state`` with its numbers in the order of the optimizer's parameters. Raises
    ValueError.
    """
    groups = state.get("param_groups")
    if not isinstance(groups, list) or _is_renamed(saved, own):
        return state
    ordered = list(groups)
    for index, (group, names, own_names) in enumerate(zip(groups, saved, own, strict=False)):
        if names == own_names or not len(group["params"]) == len(names) == len(own_names):
            continue  # torch refuses another number of parameters itself
        if missing := sorted(set(own_names) - set(names)):
            raise ValueError(
                f"its parameter group {index} has other parameters than the saved one: "
                f"{', '.join(missing[:3])} {'was' if len(missing) == 1 else 'were'} not in it. "
                "Build the groups in the same order in every process."
            )
        _check_order_is_free(optimizer, index)
        places = [names.index(name) for name in own_names]
        ordered[index] = {**group, "params": [group["params"][place] for place in places]}
        labels = group.get("param_names")
        if isinstance(labels, list) and len(labels) == len(places):
            ordered[index]["param_names"] = [labels[place] for place in places]
    return {**state, "param_groups": ordered}


def _is_renamed(saved: NamesByGroup, own: NamesByGroup) -> bool:
    """Return whether the names are of other modules: the script now passes them under others."""
    modules, own_modules = (
        {name.partition(".")[0] for group in groups for name in group} for groups in (saved, own)
    )
    return modules.isdisjoint(own_modules)


def _check_order_is_free(optimizer: Any, index: int) -> None:
    from torch.optim import Optimizer

    cls = type(optimizer)
    loads_by_number = getattr(cls, "load_state_dict", None) is Optimizer.load_state_dict
    if not loads_by_number or cls.__name__ in _ORDER_IN_STATE:
        raise ValueError(
            f"the parameters of its group {index} are in another order than when it was saved, and "
            f"the state of {cls.__name__} depends on the order. Build the groups from lists: sets "
            "of names have another order in each process."
        )
