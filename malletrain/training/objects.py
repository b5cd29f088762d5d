"""Converts the script's objects to plain states for a snapshot, and restores them.

Decides which objects can be saved and what their state is without wrappers, and writes the messages
for states that do not fit. Accesses no disk (:mod:`malletrain.training.snapshot_file` does).

:func:`load_optimizer` loads the state of an optimizer that gets further parameter groups during
training, as in fine-tuning that unfreezes layers step by step. If the optimizer has all saved
groups, the state is loaded at once. Otherwise the state of its present groups is loaded at once,
and the full state right before its next update. Until then the script must add the other groups
with ``add_param_group()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from malletrain.training import parameter_order, report, rng
from malletrain.training.dict_objects import tell_copies
from malletrain.training.epochs import CountedEpochs
from malletrain.training.parameter_order import NamesByGroup
from malletrain.training.ranks import rank_and_world
from malletrain.training.snapshot_file import SnapshotError

SCRIPT_RATE = "malletrain_script_lr"
"""Entry of a parameter group during an update whose learning rate the library has scaled: the rate
that the script has set.
"""


def load_optimizer(
    optimizer: Any,
    state: Mapping[str, Any],
    source: str,
    saved_names: NamesByGroup | None = None,
    names: Callable[[], Mapping[int, str]] = dict,
    compared: tuple[str, ...] = (),
) -> None:
    """Load ``state`` into ``optimizer``.

    Args:
        optimizer: a ``torch.optim.Optimizer``.
        state: a result of its ``state_dict()``, with at least as many groups.
        source: description of the state, for messages.
        saved_names: names of the parameters when the state was taken; None if unknown.
        names: returns the present names by the parameter's id.
        compared: see :func:`malletrain.training.parameter_order.in_saved_order`.

    Raises:
        SnapshotError: at the optimizer's next update, if groups are still missing or do not fit.
        ValueError: the state does not fit for another reason (raised by torch, or see
            :func:`malletrain.training.parameter_order.in_saved_order`).
    """

    def in_saved_order() -> AbstractContextManager[None]:
        return parameter_order.in_saved_order(optimizer, state, saved_names, names, compared)

    saved = state["param_groups"]
    with in_saved_order():
        groups = optimizer.param_groups
        if len(groups) >= len(saved) or _sizes(groups) != _sizes(saved[: len(groups)]):
            _load_in_place(optimizer, state)
            return
        first = saved[: len(groups)]
        numbers = {number for group in first for number in group["params"]}
        entries = {key: entry for key, entry in state["state"].items() if key in numbers}
        _load_in_place(optimizer, {**state, "state": entries, "param_groups": first})

    def complete(optimizer: Any, *_: Any) -> None:
        handle.remove()
        try:
            with in_saved_order():
                load_all(optimizer)
        except ValueError as error:
            raise SnapshotError(f"{source} does not fit: {error}") from error

    def load_all(optimizer: Any) -> None:
        groups = optimizer.param_groups
        if _sizes(groups) != _sizes(saved):
            raise SnapshotError(
                f"{source} is of {len(saved)} parameter groups with {_sizes(saved)} tensors, and "
                f"the script's {type(optimizer).__name__} has {_sizes(groups)}. A script that adds "
                "groups while it trains must add them again after a restart, before the first "
                "step: write `if epoch >= 2 and len(optimizer.param_groups) == 1:`, not "
                "`if epoch == 2:`."
            )
        _load_in_place(optimizer, state)

    handle = optimizer.register_step_pre_hook(complete)


def _load_in_place(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load ``state`` into ``optimizer``, whose list of groups and whose groups stay the same
    objects. torch replaces both by new ones. A script, or a wrapper such as LARC, that refers to a
    group would then set the rate of one that the optimizer no longer uses.
    """
    own = optimizer.param_groups
    groups = list(own)
    optimizer.load_state_dict(state)
    loaded = optimizer.param_groups
    for group, options in zip(groups, loaded, strict=False):
        if group is not options:
            group.clear()
            group.update(options)
    groups[len(loaded) :] = []
    loaded[: len(groups)] = groups
    if loaded is not own:
        own[:] = loaded
        with contextlib.suppress(AttributeError):  # a wrapper may only show the list
            optimizer.param_groups = own


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def plain_attributes(module: Any) -> list[tuple[dict[str, Any], str]]:
    """Return (``__dict__`` of the submodule, attribute name) for the plain numbers, strings and
    flags of a module and its submodules, without the attributes that torch sets in every module.
    """
    from torch import nn

    without = vars(nn.Module())
    return [
        (vars(part), name)
        for part in module.modules()
        for name, value in vars(part).items()
        if (type(value) in (bool, int, float, str) or is_numpy_number(value))
        and name not in without
    ]


def is_numpy_number(value: Any) -> bool:
    """Return whether ``value`` is a number or flag of numpy, as ``numpy.maximum()`` returns."""
    return (
        type(value).__module__ == "numpy"
        and getattr(value, "ndim", 1) == 0
        and (not hasattr(value, "__setitem__") and value.dtype.kind in "biuf")
    )


_FSDP2_ADVICE = "shard it with torch.distributed.fsdp.fully_shard (FSDP2)"
_NOT_SAVABLE = {
    "FullyShardedDataParallel": f"FSDP1 keeps flattened shards; {_FSDP2_ADVICE}, "
    "and Snapshot saves it without another change",
    "ZeroRedundancyOptimizer": "its state is spread over the ranks; use an ordinary optimizer and "
    f"{_FSDP2_ADVICE} with the model",
    "DeepSpeedEngine": "DeepSpeed saves by itself and for one number of ranks; instead of ZeRO-3 "
    f"{_FSDP2_ADVICE}, instead of ZeRO-1 and 2 do so with reshard_after_forward=False",
    "ZeROOptimizer": "DeepSpeed saves by itself and for one number of ranks; use an ordinary "
    f"optimizer and {_FSDP2_ADVICE} with the model",
}
_NOT_LIVE = {
    "FSDPModule": "give elastic.Run the functions that make and shard it, build= and parallelize=, "
    "or train it in restart mode, with malletrain.Snapshot",
}
_METRICS = {
    *("torchmetrics.metric.Metric", "torchmetrics.collections.MetricCollection"),
    *("torcheval.metrics.metric.Metric", "ignite.metrics.metric.Metric"),
}
"""Classes whose objects accumulate the data of one rank."""
_INNER_STATE = "malletrain_state_of_part"
"""Key that marks the state of an object inside another object's state."""
_INSIDE_COMPILED = "_orig_mod"
"""Attribute in which torch.compile stores the module; torch has no public name for it."""
_WRAPPER_NAMES = {_INSIDE_COMPILED, "_checkpoint_wrapped_module"}
"""Name components that torch.compile and activation checkpointing add."""


def check_object(caller: str, name: str, value: Any, sharded: bool = False) -> None:
    """Check that the state of ``value`` can be saved.

    Args:
        caller: name of the caller, for the message.
        name: name of the object in the script.
        value: the object.
        sharded: whether the caller can save sharded models.

    Raises:
        TypeError: the state cannot be saved.
    """
    refused = _NOT_SAVABLE if sharded else {**_NOT_SAVABLE, **_NOT_LIVE}
    for cls in type(value).__mro__:
        if cls.__name__ in refused:
            raise TypeError(
                f"{caller}: {name} is a {cls.__name__}, which rank 0 cannot save alone: "
                f"{refused[cls.__name__]}."
            )
    if isinstance(value, dict):
        return
    if _is_metric(value):
        raise TypeError(
            f"{caller}: {name} is a {type(value).__name__}, a metric that holds what one rank has "
            "seen: the parts of the other ranks would be lost in a change of nodes, and that of "
            "rank 0 would count for each. Add up over all ranks at each step, and pass the sums in "
            "a dict."
        )
    _tell_inner_metrics(caller, name, value)
    if isinstance(getattr(value, "batch_sampler", None), CountedEpochs):
        raise TypeError(
            f"{caller}: {name} is a {type(value).__name__} over an ElasticSampler, which knows the "
            "position in the data itself: the loader would leave out the same batches again. Pass "
            "the sampler, and not the loader."
        )
    if isinstance(value, list | tuple):
        raise TypeError(
            f"{caller}: {name} is a {type(value).__name__}. Pass each of its items under a name of "
            "its own, and a list of numbers in a dict."
        )
    if not (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    ):
        raise TypeError(
            f"{caller}: {name} is a {type(value).__name__} without state_dict() and "
            "load_state_dict(). Pass objects that have them, "
            "or a dict of plain values."
        )


def _is_metric(value: Any) -> bool:
    names = {f"{cls.__module__}.{cls.__name__}" for cls in type(value).__mro__}
    return not names.isdisjoint(_METRICS)


def _tell_inner_metrics(caller: str, name: str, value: Any) -> None:
    if rank_and_world()[0] != 0 or not hasattr(value, "named_modules"):
        return
    paths = [path for path, part in unwrapped(value).named_modules() if _is_metric(part)]
    if paths:
        report.tell(
            f"{caller}: {name} has metrics in it ({', '.join(paths[:3])}), which add up what one "
            "rank has seen: after a change of nodes they begin anew, or count a part several "
            "times. Add up over all ranks at each step, and keep the sums in a dict that "
            f"{caller} is given.",
            once=f"metrics in {name}",
        )


def all_epochs_of(objects: Mapping[str, Any]) -> list[CountedEpochs]:
    """Return the samplers and streams among ``objects``, which know where an epoch ends."""
    return [value for value in objects.values() if isinstance(value, CountedEpochs)]


def after_epoch_fingerprint(objects: Mapping[str, Any]) -> str:
    """Return a text of the state that the code after an epoch usually changes, for a comparison
    later in the same process: the states of all objects other than modules, optimizers and
    samplers, the optimizers' group options, plain numbers of the modules, and the version counter
    of each of their tensors.
    """
    states: dict[str, Any] = {}
    for name, value in objects.items():
        target = unwrapped(value)
        if isinstance(target, dict):
            states[name] = target
        elif groups := getattr(target, "param_groups", None):
            states[name] = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        elif hasattr(target, "named_parameters"):
            tensors = (*target.parameters(), *target.buffers())
            versions = [tensor._version for tensor in tensors]  # noqa: SLF001 (no other name)
            states[name] = (
                versions,
                [attributes[key] for attributes, key in plain_attributes(target)],
            )
        elif not isinstance(target, CountedEpochs):
            states[name] = state_of(target)
    return repr(states)


def has_schedulers(objects: Mapping[str, Any]) -> bool:
    """Return whether there is a scheduler (torch's or another library's), or its state in a dict,
    among ``objects``.
    """
    targets = [unwrapped(value) for value in objects.values()]
    excluded = ("param_groups", "named_parameters", "unscale_")  # optimizers, modules, GradScaler
    return has_scheduler_state(objects) or any(
        hasattr(target, "optimizer")
        or hasattr(target, "optimizers")
        or hasattr(target, "_optimizer")
        for target in targets
        if not isinstance(target, dict) and not any(hasattr(target, name) for name in excluded)
    )


def has_scheduler_state(objects: Mapping[str, Any]) -> bool:
    """Return whether a dict among ``objects`` contains the state of a scheduler."""
    dicts = [value for value in objects.values() if isinstance(value, dict)]
    return any(
        isinstance(state, dict) and "last_epoch" in state for d in dicts for state in d.values()
    )


def unwrapped(value: Any) -> Any:
    """Return the module inside DDP, DataParallel and torch.compile wrappers, in any order."""
    while True:
        names = {cls.__name__ for cls in type(value).__mro__}
        if names & {"DistributedDataParallel", "DataParallel"}:
            value = value.module
        elif "OptimizedModule" in names:
            value = getattr(value, _INSIDE_COMPILED)
        else:
            return value


def plain_name(path: str) -> str:
    """Return the name of a module's tensor without the components that wrappers add."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPER_NAMES)


def names_by_id(objects: Mapping[str, Any]) -> dict[int, str]:
    """Return the name of each parameter of the modules among ``objects``, by the parameter's id:
    all names that it has, sorted, joined by ``=``. Parameters of modules with load methods of their
    own are left out.
    """
    names: dict[int, set[str]] = {}
    unnamed: set[int] = set()
    for name, value in objects.items():
        module = unwrapped(value)
        if not hasattr(module, "named_parameters"):
            continue
        for path, parameter in parameter_order.named_parameters(module):
            names.setdefault(id(parameter), set()).add(f"{name}.{plain_name(path)}")
        unnamed |= parameter_order.loaded_by_own_methods(module)
    return {key: "=".join(sorted(labels)) for key, labels in names.items() if key not in unnamed}


def names_by_optimizer(objects: Mapping[str, Any]) -> dict[str, NamesByGroup]:
    """Return the names of the parameters of each optimizer among ``objects``, by the optimizer's
    name, as far as they are known.
    """
    targets = {name: unwrapped(value) for name, value in objects.items()}
    optimizers = {name: t for name, t in targets.items() if hasattr(t, "add_param_group")}
    names = names_by_id(objects) if optimizers else {}
    by_optimizer = {
        name: parameter_order.names_by_group(target, names) for name, target in optimizers.items()
    }
    return {name: groups for name, groups in by_optimizer.items() if groups is not None}


def states(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of each of ``objects``, by name."""
    states_by_name: dict[str, Any] = {}
    for name, value in objects.items():
        states_by_name[name] = state_of(unwrapped(value))
    return states_by_name


def state_of(target: Any) -> Any:
    """Return the state of one object (without wrappers). Objects inside it, such as the inner
    scheduler of a scheduler, are replaced by their states: if they were pickled as objects, they
    would be restored with optimizers of their own.
    """
    if isinstance(target, dict):
        return dict(target)
    state = target.state_dict()
    return _parts_as_states(state) if _is_its_attributes(target, state) else state


def _is_its_attributes(target: Any, state: Any) -> bool:
    own = getattr(target, "__dict__", {})
    return (
        type(state) is dict
        and not hasattr(target, "named_parameters")
        and all(own.get(key) is value for key, value in state.items())
    )


def _has_state(value: Any) -> bool:
    methods = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
    return all(map(callable, methods)) and not isinstance(value, type)


def _parts_as_states(value: Any) -> Any:
    if _has_state(value):
        return {_INNER_STATE: state_of(value)}
    if type(value) is dict:
        return {key: _parts_as_states(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_parts_as_states(item) for item in value)
    return value


def _load_parts(own: Any, saved: Any, source: str) -> Any:
    """Return ``saved`` with the states of inner objects replaced by the objects of ``own``, which
    have loaded them.
    """
    if type(saved) is dict and saved.keys() == {_INNER_STATE}:
        if not _has_state(own):
            raise ValueError(
                "the saved one contains an object with a state, where the script has a "
                f"{type(own).__name__}, which cannot load one"
            )
        load_state(own, saved[_INNER_STATE], source)
        return own
    if type(saved) is dict:
        own_items = own if type(own) is dict else {}
        return {key: _load_parts(own_items.get(key), item, source) for key, item in saved.items()}
    if type(saved) in (list, tuple):
        fits = type(own) is type(saved) and len(own) == len(saved)
        pairs = zip(own if fits else [None] * len(saved), saved, strict=True)
        return type(saved)(_load_parts(part, item, source) for part, item in pairs)
    return saved


def restore(objects: Mapping[str, Any], payload: Mapping[str, Any], name: str) -> None:
    """Restore ``objects`` and the random number generators from a snapshot.

    Args:
        objects: the script's objects, by name; dicts are updated in place.
        payload: the snapshot.
        name: its path, for messages.

    Raises:
        SnapshotError: a state does not fit its object.
    """
    saved = payload["objects"]
    names = payload.get("parameter_names", {})
    report_differences(objects, payload, name)
    for key, value in objects.items():
        if key not in saved:
            continue
        target = unwrapped(value)
        try:
            source = f"The state of {key!r} in snapshot {name}"
            load_state(target, saved[key], source, objects, names.get(key))
        except (
            RuntimeError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            IndexError,
        ) as error:
            raise misfit_error(key, target, name, error) from error
    rng.load(payload.get("rng", {}))


def load_state(
    target: Any,
    state: Any,
    source: str,
    objects: Mapping[str, Any] | None = None,
    saved_names: NamesByGroup | None = None,
    compared: tuple[str, ...] = (),
) -> None:
    """Load ``state`` into one object (without wrappers); a dict is updated in place.

    Args:
        target: the object.
        state: its state.
        source: description of the state, for messages.
        objects: the script's objects, by name; they name the parameters of an optimizer.
        saved_names: an entry of :func:`names_by_optimizer` when the state was taken, or None.
        compared: see :func:`malletrain.training.parameter_order.in_saved_order`.

    Raises:
        Exception: the object's own error.
    """
    if isinstance(target, dict):
        tell_copies(target, state, source)
        target.update(state)
    elif hasattr(target, "add_param_group"):
        load_optimizer(
            target, state, source, saved_names, lambda: names_by_id(objects or {}), compared
        )
    elif _has_marks(state):
        target.load_state_dict(_load_parts(vars(target), state, source))
    else:
        target.load_state_dict(state)


def _has_marks(state: Any) -> bool:
    items = state.values() if type(state) is dict else state if type(state) in (list, tuple) else ()
    return (type(state) is dict and _INNER_STATE in state) or any(map(_has_marks, items))


def misfit_error(key: str, target: Any, name: str, error: Exception) -> SnapshotError:
    """Return the error for a state that cannot be loaded.

    Args:
        key: name of the object in the script.
        target: the object.
        name: path of the snapshot.
        error: the error of the object.
    """
    reason = " ".join(str(error).split())  # torch writes several lines
    return SnapshotError(
        f"The state of {key!r} in snapshot {name} does not fit the script's "
        f"{type(target).__name__}: {reason} "
        "If the script changed on purpose, give Snapshot another path."
    )


def report_differences(objects: Mapping[str, Any], payload: Mapping[str, Any], name: str) -> None:
    """Tell the user which objects only the script has, which only the snapshot has, whether the
    position in the data is unknown, and which options of schedulers the snapshot replaces.

    Args:
        objects: the script's objects, by name.
        payload: the snapshot.
        name: its path.
    """
    from malletrain.training.schedulers import tell_other_options  # it imports this module

    saved = payload["objects"]
    tell_other_options(objects, payload, name)
    if payload.get("steps") and not all_epochs_of(objects) and "run" not in objects:
        report.tell(
            f"This run goes on after step {payload['steps']}, but its position in the data is not "
            "known, because Snapshot was given no sampler. The data starts where the script starts "
            "it, so samples of the current epoch are repeated. Pass a malletrain.ElasticSampler or "
            "an ElasticStream.",
            once="no sampler",
        )
    ranks, world_size = payload.get("world_size"), rank_and_world()[1]
    for key, value in objects.items():
        if ranks not in (None, world_size) and _is_position_of_rank(value):
            report.tell(
                f"{key!r} is a {type(value).__name__}, whose state is the position of one of "
                f"{ranks} ranks, and there are {world_size} now: samples of the current epoch are "
                "repeated or left out. Use a malletrain.ElasticSampler.",
                once=f"position in {key}",
            )
    for key in objects:
        if key not in saved:
            report.tell(
                f"Snapshot {name} holds nothing called {key!r}; it starts as the script made it."
            )
    for key in saved:
        if key not in objects:
            report.tell(
                f"Snapshot {name} also holds {key!r}, which this script does not use; it is "
                "left out of later snapshots."
            )


def _is_position_of_rank(value: Any) -> bool:
    """Return whether ``value`` is a loader or sampler of torchdata that has a state."""
    names = {cls.__name__ for cls in type(value).__mro__}
    return not names.isdisjoint({"StatefulDataLoader", "StatefulDistributedSampler"})


def warn_about_unsaved_parameters(
    objects: Mapping[str, Any],
    caller: str = "Snapshot",
    advice: str = "Pass the module that has them, too, as in Snapshot(model=model, loss=loss, …).",
) -> None:
    """Tell the user about parameters that an optimizer among ``objects`` trains and no module among
    them has, such as those of a loss with parameters: the optimizer's state would be restored, and
    the parameters would not. There is no message if no parameter of the optimizer is in a module of
    ``objects``. Never raises.

    Args:
        objects: the script's objects, by name.
        caller: name of the class that was given the objects, for the message.
        advice: sentence of the message that says what to do.
    """
    targets = {name: unwrapped(value) for name, value in objects.items()}
    for name, value in targets.items():
        try:
            count = _outside_parameters(value, targets.values())
        except Exception:  # a diagnosis of a script's objects must not stop its training
            return
        if count:
            report.tell(
                f"The optimizer {name!r} trains {count} parameters that are of no module that "
                f"{caller} saves: after a rescale they begin anew. {advice}",
                once=f"left out {name}",
            )


def _outside_parameters(optimizer: Any, targets: Iterable[Any]) -> int:
    """Return the number of parameters of ``optimizer`` that are of no module among ``targets``; 0
    if all of them are.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list):
        return 0
    modules = (v for v in targets if callable(getattr(v, "named_parameters", None)))
    parameters = {id(p) for module in modules for p in module.parameters()}
    matches = [id(p) in parameters for group in groups for p in group["params"]]
    return matches.count(False) if any(matches) else 0


def parameter_count(objects: Mapping[str, Any]) -> int:
    """Return the number of parameters of all modules among ``objects``; 0 if it is unknown."""
    modules = [
        value
        for value in map(unwrapped, objects.values())
        if callable(getattr(value, "parameters", None))
    ]
    try:
        return sum(int(p.numel()) for module in modules for p in module.parameters())
    except Exception:  # an object whose parameters() are not tensors
        return 0
