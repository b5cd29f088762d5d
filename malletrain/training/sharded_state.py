"""The states of sharded objects: shards taken out of them, and put back in any other layout.

Decides what of a state is a shard (a DTensor: FSDP2, HSDP and tensor parallelism make nothing
else) and what is the same on all ranks, and into what layout a saved tensor is read. It touches no
disk (:mod:`malletrain.training.shard_files`).

The state of an optimizer is kept by the names of its parameters
(:mod:`malletrain.training.optimizer_names`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from malletrain.training import optimizer_names
from malletrain.training.objects import unwrapped
from malletrain.training.snapshot_file import SnapshotError

MARK = "malletrain_shards"
"""Stands in a skeleton for a tensor that lies in the shards, with its key."""
Shapes = Mapping[str, tuple[tuple[int, ...], Any]]
"""(shape, dtype) of each tensor in the shards."""


def _is_dtensor(value: Any) -> bool:
    return any(cls.__name__ == "DTensor" for cls in type(value).__mro__)


def is_sharded(objects: Mapping[str, Any]) -> bool:
    """Whether a module or optimizer among ``objects`` has parameters that are spread over ranks.

    Raises:
        SnapshotError: when it has, and this torch is too old for them.
    """
    for value in map(unwrapped, objects.values()):
        parameters: Any = ()
        if callable(getattr(value, "parameters", None)):
            parameters = value.parameters()
        elif isinstance(getattr(value, "param_groups", None), list):
            parameters = (p for group in value.param_groups for p in group["params"])
        if any(_is_dtensor(parameter) for parameter in parameters):
            _require_torch()
            return True
    return False


def _require_torch() -> None:
    import torch
    import torch.distributed.tensor

    if not hasattr(torch.distributed.tensor, "DTensor"):
        raise SnapshotError(
            f"Snapshots of sharded models need torch 2.5 or newer; this is {torch.__version__}. "
            "Install a newer one, or train without fully_shard."
        )


# --- taking apart ---


def take_apart(objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(skeletons by name of the object, tensors by key). The tensors are the live ones; nothing is
    copied. A skeleton is the same on every rank.
    """
    skeletons: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    names = parameter_names(objects)
    for name, value in objects.items():
        skeletons[name] = _take_out(_state(unwrapped(value), names), name, tensors)
    return skeletons, tensors


def parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """The name of each parameter of the modules among ``objects``, by its id."""
    modules = {name: unwrapped(value) for name, value in objects.items()}
    return optimizer_names.names_of(
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
        return optimizer_names.by_name(target, names)
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
    """Have ``objects`` be as a snapshot says, each in the layout it has now.

    Args:
        objects: the script's.
        saved: skeletons, or whole states of a snapshot that is not sharded, by name of the object.
        shapes: of the tensors in the shards.
        by_name: optimizer states in ``saved`` are by the names of parameters, else by number.
        read: fills tensors, by key, from the shards. Collective.
        refuse: makes the error to raise for a state that does not fit its object.
        aside: what ``read`` brings is checked on the way: until it has brought all of it, nothing
            of the objects is changed. It takes the memory of the modules a second time, before
            there are gradients.
    """
    names = parameter_names(objects)
    rooms: dict[str, Any] = {}
    ready: list[tuple[str, Any, Callable[[], None]]] = []
    for name, value in objects.items():
        if name in saved:
            target = unwrapped(value)
            try:
                ready.append(
                    (
                        name,
                        target,
                        _fitted(target, saved[name], names, by_name, shapes, rooms, aside),
                    )
                )
            except Exception as error:
                raise refuse(name, target, error) from error
    read(rooms)
    for name, target, load in ready:
        try:
            load()
        except Exception as error:
            raise refuse(name, target, error) from error


def _fitted(
    target: Any,
    saved: Any,
    names: Mapping[int, str],
    by_name: bool,
    shapes: Shapes,
    rooms: dict[str, Any],
    aside: bool,
) -> Callable[[], None]:
    """What loads ``saved`` into ``target`` once the tensors in ``rooms`` are filled."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    if isinstance(target, torch.nn.Module):
        own: dict[str, Any] = get_model_state_dict(target)
        _same_names(own, saved)
        state = {k: _put_in(v, own[k], shapes, rooms, in_place=True) for k, v in saved.items()}
        in_place = [key for key, value in state.items() if value is own[key]]
        if aside:
            for key in in_place:
                state[key] = rooms[saved[key][MARK]] = torch.empty_like(own[key])
        if len(in_place) < len(state):
            return lambda: (set_model_state_dict(target, state), None)[1]
        return lambda: _copy(own, state)
    if isinstance(target, torch.optim.Optimizer):
        saved = saved if by_name else optimizer_names.from_numbers(target, saved, names)
        likes = optimizer_names.parameters_by_name(target, names)
        state = {
            **saved,
            "state": {
                label: _put_in(entry, likes.get(label), shapes, rooms)
                for label, entry in saved["state"].items()
                if label in likes
            },
        }
        return lambda: optimizer_names.load(target, state, names)
    own = dict(target) if isinstance(target, dict) else target.state_dict()
    state = _put_in(saved, own, shapes, rooms)
    return lambda: (
        target.update(state) if isinstance(target, dict) else target.load_state_dict(state)
    )


def _copy(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Have a module's tensors be as those of the same names, in the same layout."""
    for key, value in state.items():
        if value is not own[key]:
            _local(own[key].detach()).copy_(_local(value.detach()))


def _local(tensor: Any) -> Any:
    return tensor.to_local() if _is_dtensor(tensor) else tensor


def _same_names(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    missing = sorted(set(own) - set(saved))
    unknown = sorted(set(saved) - set(own))
    if missing or unknown:
        parts = [
            f"{what} {', '.join(values[:3])}{' and more' if len(values) > 3 else ''}."
            for what, values in (
                ("the snapshot has no", missing),
                ("the module has no", unknown),
            )
            if values
        ]
        raise ValueError(" ".join(parts))


def _put_in(
    saved: Any, like: Any, shapes: Shapes, rooms: dict[str, Any], in_place: bool = False
) -> Any:
    """``saved`` with room for each tensor of the shards, in the layout of ``like``: a tensor for
    all tensors below, or a state of the same form.
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
                rooms[key] = like.detach()
                return like
        rooms[key] = _room(shape, dtype, like, saved["placements"])
        return rooms[key]
    if isinstance(saved, torch.Tensor):
        return _spread(saved, like)
    inner = like if isinstance(like, torch.Tensor) else None
    if isinstance(saved, dict):
        return {
            k: _put_in(v, like.get(k) if isinstance(like, dict) else inner, shapes, rooms)
            for k, v in saved.items()
        }
    if type(saved) in (list, tuple):
        likes = like if type(like) in (list, tuple) else [inner] * len(saved)
        padded = [*likes, *[None] * max(0, len(saved) - len(likes))]
        return type(saved)(_put_in(v, padded[i], shapes, rooms) for i, v in enumerate(saved))
    return saved


def _room(shape: tuple[int, ...], dtype: Any, like: Any, placements: list[int | None]) -> Any:
    import torch

    if not _is_dtensor(like):
        if not isinstance(like, torch.Tensor):
            raise ValueError("a sharded tensor was saved where the script has none now.")
        return torch.empty(shape, dtype=dtype, device=like.device)
    if tuple(like.shape) == shape:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    # A state of another form than its parameter (Adafactor's rows and columns).
    from torch.distributed.tensor import Replicate, Shard, zeros

    mesh = like.device_mesh
    layout = [Replicate() if dim is None else Shard(dim) for dim in placements]
    if len(layout) != mesh.ndim:
        layout = [Replicate() for _ in range(mesh.ndim)]
    return zeros(*shape, dtype=dtype, device_mesh=mesh, placements=layout)


def _spread(full: Any, like: Any) -> Any:
    """``full``, which this rank has whole, in the layout of ``like``."""
    if not _is_dtensor(like) or full.ndim == 0 or tuple(full.shape) != tuple(like.shape):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full.detach().to(like.device), like.device_mesh, list(like.placements))
