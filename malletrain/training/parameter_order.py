"""Loads the state of an optimizer at the parameters that it was saved of.

torch numbers the parameters of an optimizer by their position in its groups. A script that builds
the groups from sets of names has another order in each process, and the averages of one parameter
would go to another. Snapshots and joiners get the names, and an optimizer is put in the saved order
while a state is loaded by position. The order within a group stays the saved one, because options
of a group and the state of LBFGS may depend on it; the groups go back to the script's order.

Decides whether the order differs, by the names. They decide nothing, and the state is loaded by
position, unless all parameters have names and these are the saved ones: a wrapper that adds a
prefix, a script that trains other parameters, or a layer that swaps one of its several names with
another layer, changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

NamesByGroup = list[list[str]]
"""Names of the parameters of an optimizer, by group, in its order."""
_WRAPPERS = {"AcceleratedOptimizer", "_FabricOptimizer"}
"""Classes that load a state into their attribute ``optimizer``."""
_HOOKS = (
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
    "_optimizer_state_dict_post_hooks",
)
"""Attributes of torch's optimizers: functions of the script that change a state."""
_RATES = ("lr", "initial_lr")
"""Options of a group that schedulers keep in lists, by the position of the group."""
_STATE_METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict")
"""Methods of a module that decide by what its parameters are loaded."""


def named_parameters(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, parameter) for each name of each parameter; nothing if it is no torch module."""
    from torch.nn import Module

    if isinstance(module, Module):
        yield from Module.named_parameters(module, remove_duplicate=False)


def loaded_by_own_methods(module: Any) -> set[int]:
    """Return the ids of the parameters of those modules within ``module`` that have a
    ``state_dict()`` or ``load_state_dict()`` of their own. These may go by something else than the
    names of the parameters, such as the numbers of experts.
    """
    from torch.nn import Module

    plain = [getattr(Module, name) for name in _STATE_METHODS]
    modules = Module.modules(module) if isinstance(module, Module) else ()
    return {
        id(parameter)
        for part in modules
        if [getattr(type(part), name) for name in _STATE_METHODS] != plain
        or not vars(part).keys().isdisjoint(_STATE_METHODS)
        for _, parameter in named_parameters(part)
    }


def names_by_group(target: Any, names: Mapping[int, str]) -> NamesByGroup | None:
    """Return the names of an optimizer's parameters; None if it has parameters without a name, if
    a name occurs twice, or if ``target`` is no optimizer that loads states by position.

    Args:
        target: an object of the script.
        names: names by the parameter's id.
    """
    optimizer = _loads_by_position(target)
    if optimizer is None or not all(isinstance(g["params"], list) for g in optimizer.param_groups):
        return None
    by_group = [[names.get(id(p), "") for p in g["params"]] for g in optimizer.param_groups]
    flat = _flat(by_group)
    return by_group if all(flat) and len(set(flat)) == len(flat) else None


def _loads_by_position(target: Any) -> Any | None:
    """Return the torch optimizer that ``target`` is or wraps; None if it is another object, or has
    its own way to load a state, which may go by names.
    """
    if not hasattr(target, "add_param_group"):
        return None
    from torch.optim import Optimizer

    while not _WRAPPERS.isdisjoint(cls.__name__ for cls in type(target).__mro__):
        target = target.optimizer
    cls = type(target)
    is_torch = isinstance(target, Optimizer) and (
        cls.load_state_dict is Optimizer.load_state_dict and cls.state_dict is Optimizer.state_dict
    )
    return target if is_torch and not any(vars(target).get(hook) for hook in _HOOKS) else None


@contextmanager
def in_saved_order(
    target: Any,
    state: Mapping[str, Any],
    saved: NamesByGroup | None,
    names: Callable[[], Mapping[int, str]],
    compared: tuple[str, ...] = (),
) -> Iterator[None]:
    """Put the groups of an optimizer in the order of ``state``, if they are the saved ones in
    another order. Within the context the state can be loaded by position.

    Args:
        target: the optimizer.
        state: a result of its ``state_dict()``, with at least as many groups.
        saved: result of :func:`names_by_group` when the state was taken; None if unknown.
        names: returns the present names by the parameter's id.
        compared: options of a group that processes which train together compare by the position of
            the group; () in a process that restores a snapshot.

    Raises:
        ValueError: the parameters are the saved ones, but the state cannot be loaded: they are
            grouped differently, or groups with different learning rates or options in ``compared``
            are in another order. A scheduler loads the rates by position. An optimizer without
            averages is refused only if such options would differ between processes.
    """
    own = names_by_group(target, names()) if saved else None
    if saved is None or own is None or not _is_permuted(own, saved := saved[: len(own)]):
        yield
        return
    places = _places(own, saved)
    keys = {*_RATES, *compared}
    options = [_options(group, keys) for group in state["param_groups"][: len(own)]]
    if places is None or any(options[i] != options[place] for i, place in enumerate(places)):
        differ = any(option != options[0] for option in options)
        if (compared and differ) or _moves_state(state, own, saved):
            raise ValueError(
                "its parameter groups are in another order than the saved ones, or contain "
                "other parameters. Sets of names have another order in each process: build the "
                "groups from lists. The saved groups begin with "
                f"{', '.join(labels[0] for labels in saved if labels)}."
            )
        yield
        return
    optimizer = _loads_by_position(target)
    assert optimizer is not None
    groups = optimizer.param_groups
    for place, labels in zip(places, saved, strict=True):
        _reorder(groups[place], own[place], labels)
    groups[:] = [groups[place] for place in places]
    try:
        yield
    finally:
        group_at = dict(zip(places, optimizer.param_groups, strict=True))
        optimizer.param_groups[:] = [group_at[place] for place in sorted(places)]


def _flat(by_group: NamesByGroup) -> list[str]:
    return list(chain.from_iterable(by_group))


def _is_permuted(own: NamesByGroup, saved: NamesByGroup) -> bool:
    if own == saved or len(own) != len(saved):
        return False
    return sorted(_flat(own)) == sorted(_flat(saved))


def _places(own: NamesByGroup, saved: NamesByGroup) -> list[int] | None:
    """Return the index of each saved group among the present ones; None if there is another
    grouping.
    """
    own_sets, saved_sets = ([frozenset(labels) for labels in groups] for groups in (own, saved))
    if own_sets == saved_sets:
        return list(range(len(own)))
    if sorted(map(sorted, own_sets)) != sorted(map(sorted, saved_sets)):
        return None
    places = [own_sets.index(labels) for labels in saved_sets]
    return places if len(set(places)) == len(places) else None  # several groups may be empty


def _options(group: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: _plain(group.get(key)) for key in keys}


def _plain(value: Any) -> Any:
    """Return tensors as exact Python numbers, also those within a tuple."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _moves_state(state: Mapping[str, Any], own: NamesByGroup, saved: NamesByGroup) -> bool:
    """Return whether an entry of the state that is more than numbers would go to another
    parameter.
    """
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    entries = [
        state["state"].get(number)
        for number, label, own_label in zip(numbers, _flat(saved), _flat(own), strict=False)
        if label != own_label
    ]
    return any(
        hasattr(value, "numel") and value.numel() > 1
        for entry in entries
        if isinstance(entry, Mapping)
        for value in entry.values()
    )


def _reorder(group: dict[str, Any], own: list[str], labels: list[str]) -> None:
    place_of = {label: place for place, label in enumerate(own)}
    places = [place_of[label] for label in labels]
    group["params"][:] = [group["params"][place] for place in places]
    torch_names = group.get("param_names")
    if isinstance(torch_names, list) and len(torch_names) == len(places):
        torch_names[:] = [torch_names[place] for place in places]


def by_name(state: dict[str, Any], names: NamesByGroup) -> dict[str, Any]:
    """Return the state of an optimizer in an order that does not depend on its groups, so that it
    can be compared with that of another process.

    Args:
        state: a result of its ``state_dict()``.
        names: result of :func:`names_by_group` at the same time.
    """
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    label_of = dict(zip(numbers, _flat(names), strict=True))
    entries = {label_of.get(key, str(key)): entry for key, entry in state["state"].items()}
    groups = [
        {**group, "params": sorted(labels), "param_names": None}
        for group, labels in zip(state["param_groups"], names, strict=True)
    ]
    return {
        **state,
        "state": {label: entries[label] for label in sorted(entries)},
        "param_groups": sorted(groups, key=lambda group: group["params"]),
    }
