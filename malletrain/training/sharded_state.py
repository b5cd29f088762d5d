"""Extracts the shards from the states of sharded objects, and restores them in any other layout.

:func:`take_apart` and :func:`put_together` decide which parts of a state are shards (DTensors:
FSDP2, HSDP and tensor parallelism create only these) and which are the same on all ranks, and into
which layout a saved tensor is read. They access no disk (:mod:`malletrain.training.shard_files`
does).

:func:`state_by_name` and :func:`load_by_name` save and load the state of an optimizer by the names
of its parameters, and decide which parameter a saved state belongs to. torch numbers the
parameters, so a parameter that is frozen, added or moved to another group makes a state unreadable.
``torch.distributed.checkpoint.state_dict`` does a step with zero gradients if an optimizer has no
state yet, and drops group keys that are missing on either side (a scheduler's ``initial_lr``). To
save by name avoids both problems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from malletrain.training.objects import plain_name, unwrapped
from malletrain.training.report import tell
from malletrain.training.snapshot_file import SnapshotError

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


def state_by_name(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
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


def load_by_name(optimizer: Any, saved: Mapping[str, Any], names: Mapping[int, str]) -> None:
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
            "none of its parameters was saved: the snapshot has "
            f"{next(iter(group_of))}, …; the optimizer has {labels[0]}, …"
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


MARK = "malletrain_shards"
"""Key that replaces a sharded tensor in a skeleton; its value is the tensor's key in the shards."""
Shapes = Mapping[str, tuple[tuple[int, ...], Any]]
"""(shape, dtype) by key of the tensor in the shards."""


def _is_dtensor(value: Any) -> bool:
    return any(cls.__name__ == "DTensor" for cls in type(value).__mro__)


def is_sharded(objects: Mapping[str, Any]) -> bool:
    """Return whether a module or optimizer among ``objects`` has sharded parameters."""
    for value in map(unwrapped, objects.values()):
        parameters: Any = ()
        if callable(getattr(value, "parameters", None)):
            parameters = value.parameters()
        elif isinstance(getattr(value, "param_groups", None), list):
            parameters = (p for group in value.param_groups for p in group["params"])
        if any(_is_dtensor(parameter) for parameter in parameters):
            return True
    return False


def check_gradients(objects: Mapping[str, Any]) -> None:
    """Check that the installed torch computes the gradients of sharded modules among ``objects``
    as it should.

    Raises:
        SnapshotError: it does not, over the backend of their process groups.
    """
    from malletrain.training.torch_private import wrong_gradients

    for name, value in objects.items():
        module = unwrapped(value)
        if callable(getattr(module, "modules", None)) and (problem := wrong_gradients(module)):
            raise SnapshotError(f"Snapshot: {name}: {problem}")


# --- taking apart ---


def take_apart(objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate states and shards. Return (skeletons by name of the object, tensors by key). A
    skeleton is the same on every rank. The tensors are the live ones; nothing is copied.
    """
    skeletons: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    names = parameter_names(objects)
    for name, value in objects.items():
        skeletons[name] = _take_out(_state(unwrapped(value), names), name, tensors)
    return skeletons, tensors


def parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """Return the name of each parameter of the modules among ``objects``, by the parameter's id."""
    modules = {name: unwrapped(value) for name, value in objects.items()}
    return names_of(
        {name: m for name, m in modules.items() if callable(getattr(m, "named_parameters", None))}
    )


def _state(target: Any, names: Mapping[int, str]) -> Any:
    import torch
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    if isinstance(target, dict):
        return dict(target)
    if isinstance(target, torch.nn.Module):
        return get_model_state_dict(target)
    if isinstance(target, torch.optim.Optimizer):
        return state_by_name(target, names)
    return target.state_dict()


def _take_out(state: Any, key: str, tensors: dict[str, Any]) -> Any:
    if _is_dtensor(state):
        while key in tensors:  # {"a.b": …} beside {"a": {"b": …}}
            key += "'"
        tensors[key] = state.detach() if state.requires_grad else state
        return {MARK: key, "placements": [getattr(p, "dim", None) for p in state.placements]}
    if isinstance(state, dict):
        return {k: _take_out(v, f"{key}.{k}", tensors) for k, v in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_take_out(v, f"{key}.{i}", tensors) for i, v in enumerate(state))
    return state


# --- putting together ---


def put_together(
    objects: Mapping[str, Any],
    saved: Mapping[str, Any],
    shapes: Shapes,
    by_name: bool,
    read: Callable[[dict[str, Any]], None],
    refuse: Callable[[str, Any, Exception], Exception],
    aside: bool = False,
) -> None:
    """Restore ``objects`` from a snapshot, each in its current layout.

    Args:
        objects: the script's objects, by name.
        saved: skeletons, or whole states of a snapshot that is not sharded, by name of the object.
        shapes: shape and dtype of the tensors in the shards.
        by_name: whether optimizer states in ``saved`` are by parameter name; else by number.
        read: fills tensors, by key, from the shards. Collective.
        refuse: creates the error for a state that does not fit its object.
        aside: whether modules are read into separate tensors, so that the objects stay unchanged
            until ``read``, which checks the data, has succeeded. Takes the memory of the modules a
            second time, before gradients exist.
    """
    names = parameter_names(objects)
    buffers: dict[str, Any] = {}
    ready: list[tuple[str, Any, Callable[[], None]]] = []
    for name, value in objects.items():
        if name in saved:
            target = unwrapped(value)
            try:
                ready.append(
                    (
                        name,
                        target,
                        _loader_for(target, saved[name], names, by_name, shapes, buffers, aside),
                    )
                )
            except Exception as error:
                raise refuse(name, target, error) from error
    read(buffers)
    for name, target, load in ready:
        try:
            load()
        except Exception as error:
            raise refuse(name, target, error) from error


def _loader_for(
    target: Any,
    saved: Any,
    names: Mapping[int, str],
    by_name: bool,
    shapes: Shapes,
    buffers: dict[str, Any],
    aside: bool,
) -> Callable[[], None]:
    """Return a function that loads ``saved`` into ``target`` once the tensors in ``buffers`` are
    filled.
    """
    import torch
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    if isinstance(target, torch.nn.Module):
        own: dict[str, Any] = get_model_state_dict(target)
        _same_names(own, saved)
        state = {k: _allocate(v, own[k], shapes, buffers, in_place=True) for k, v in saved.items()}
        in_place = [key for key, value in state.items() if value is own[key]]
        if aside:
            for key in in_place:
                state[key] = buffers[saved[key][MARK]] = torch.empty_like(own[key])
        if len(in_place) < len(state):
            return lambda: (set_model_state_dict(target, state), None)[1]
        return lambda: _copy(own, state)
    if isinstance(target, torch.optim.Optimizer):
        saved = saved if by_name else from_numbers(target, saved, names)
        likes = parameters_by_name(target, names)
        state = {
            **saved,
            "state": {
                label: _allocate(entry, likes.get(label), shapes, buffers)
                for label, entry in saved["state"].items()
                if label in likes
            },
        }
        return lambda: load_by_name(target, state, names)
    own = dict(target) if isinstance(target, dict) else target.state_dict()
    state = _allocate(saved, own, shapes, buffers)
    return lambda: (
        target.update(state) if isinstance(target, dict) else target.load_state_dict(state)
    )


def _copy(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Copy the tensors of ``state`` to those of the same names in ``own``, in the same layout."""
    for key, value in state.items():
        if value is not own[key]:
            _local(own[key].detach()).copy_(_local(value.detach()))


def _local(tensor: Any) -> Any:
    return tensor.to_local() if _is_dtensor(tensor) else tensor


def _same_names(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    missing = sorted(set(own) - set(saved))
    unknown = sorted(set(saved) - set(own))
    if missing or unknown:
        sentences = [
            f"{prefix} {', '.join(values[:3])}{' and more' if len(values) > 3 else ''}."
            for prefix, values in (
                ("the snapshot has no", missing),
                ("the module has no", unknown),
            )
            if values
        ]
        raise ValueError(" ".join(sentences))


def _allocate(
    saved: Any, like: Any, shapes: Shapes, buffers: dict[str, Any], in_place: bool = False
) -> Any:
    """Return ``saved`` with an empty tensor for each tensor of the shards, in the layout of
    ``like``: either one tensor whose layout applies to all tensors in ``saved``, or a state of the
    same structure.
    """
    import torch

    if isinstance(saved, dict) and MARK in saved:
        key = saved[MARK]
        shape, dtype = shapes[key]
        if in_place and isinstance(like, torch.Tensor):
            if tuple(like.shape) != shape:
                raise ValueError(
                    f"size mismatch for {key}: saved {shape}, here {tuple(like.shape)}."
                )
            if like.dtype == dtype:
                buffers[key] = like.detach()
                return like
        buffers[key] = _empty_tensor(shape, dtype, like, saved["placements"])
        return buffers[key]
    if isinstance(saved, torch.Tensor):
        return _distribute(saved, like)
    inner = like if isinstance(like, torch.Tensor) else None
    if isinstance(saved, dict):
        return {
            k: _allocate(v, like.get(k) if isinstance(like, dict) else inner, shapes, buffers)
            for k, v in saved.items()
        }
    if type(saved) in (list, tuple):
        likes = like if type(like) in (list, tuple) else [inner] * len(saved)
        padded = [*likes, *[None] * max(0, len(saved) - len(likes))]
        return type(saved)(_allocate(v, padded[i], shapes, buffers) for i, v in enumerate(saved))
    return saved


def _empty_tensor(
    shape: tuple[int, ...], dtype: Any, like: Any, placements: list[int | None]
) -> Any:
    import torch

    if not _is_dtensor(like):
        if not isinstance(like, torch.Tensor):
            raise ValueError("a sharded tensor was saved where the script has none now.")
        return torch.empty(shape, dtype=dtype, device=like.device)
    if tuple(like.shape) == shape:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    # A state whose shape differs from its parameter's (Adafactor's rows and columns).
    from torch.distributed.tensor import Replicate, Shard, zeros

    mesh = like.device_mesh
    layout = [Replicate() if dim is None else Shard(dim) for dim in placements]
    if len(layout) != mesh.ndim:
        layout = [Replicate() for _ in range(mesh.ndim)]
    return zeros(*shape, dtype=dtype, device_mesh=mesh, placements=layout)


def _distribute(full: Any, like: Any) -> Any:
    """Return ``full``, a tensor that this rank has in full, in the layout of ``like``."""
    if not _is_dtensor(like) or full.ndim == 0 or tuple(full.shape) != tuple(like.shape):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full.detach().to(like.device), like.device_mesh, list(like.placements))
