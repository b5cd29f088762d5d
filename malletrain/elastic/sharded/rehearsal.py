"""Rehearses a change of the group with a sharded model: once before this process is ready, without
peers, on a mesh of one rank, while the other ranks train.

Decides what is rehearsed: the script's own functions, steps with FSDP, an update of the optimizer,
and taking apart, planning and putting together the state. Whatever is imported, compiled or cached
in it is then ready when the other ranks wait. The script's model stays on ``meta``, because one
rank may not have memory for all of it. Nothing depends on a rehearsal. If it fails, this is
reported.
"""

from __future__ import annotations

import gc
import pickle
from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from malletrain.elastic.link import Place
from malletrain.elastic.module_modes import named_parameters
from malletrain.elastic.sharded import moving
from malletrain.elastic.sharded.chunks import Chunk
from malletrain.elastic.sharded.training import MODEL, OPTIMIZER, ShardedTraining
from malletrain.elastic.sharded.transfer_plan import make_plan
from malletrain.training import report, rng
from malletrain.training.sharded_state import put_together, take_apart
from malletrain.training.torch_private import adopt_backend, leave_out_hooks

BACKEND = "malletrain_rehearsal"
"""Backend of a group whose other ranks do not exist. Nothing is sent, because the tensors are on
``meta``.
"""
ALONE = Place(0, 0, 1)
"""Membership in a round of one process."""


class _ImaginedGroup(dist.ProcessGroup):
    """A group of which only this rank exists. From torch 2.14 on it would have the size of its
    backend, 1.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub knows one form
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def _connect(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    group = _ImaginedGroup(rank, size)
    adopt_backend(group, dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout))
    return group


dist.Backend.register_backend(BACKEND, _connect, devices=["cpu"])


def rehearse(training: ShardedTraining, backend: str) -> None:
    """Rehearse a change as the only rank of a group. ``backend``: backend of collectives on CPUs.
    Errors of the script's functions are reported, not raised.
    """
    _rehearse_in_group(training, ALONE, backend)
    # Garbage collection takes longer the more objects exist. Everything imported so far stays,
    # so it is excluded from collections during a change of the group.
    gc.collect()
    gc.freeze()


def rehearse_at(training: ShardedTraining, place: Place) -> None:
    """Rehearse a change with the rank that this process will have, because DTensor's caches are per
    rank and number of ranks (:mod:`malletrain.elastic.sharded.training`).
    """
    if not training.meshes.is_cached(place):
        _rehearse_in_group(training, place, BACKEND)


def _rehearse_in_group(training: ShardedTraining, place: Place, backend: str) -> None:
    if dist.is_initialized():
        return
    random = rng.state()
    dist.init_process_group(backend, store=dist.HashStore(), rank=place.rank, world_size=place.size)
    world = dist.group.WORLD
    try:
        mesh = training.meshes.mesh_for(place, 1 if training.is_hsdp else place.size)
        if place is ALONE:
            _train_one_parameter(mesh, training.device)
        _rehearse_change(training, mesh, place)
    except Exception as error:
        reason = " ".join(str(error).split())
        report.tell(
            "The rehearsal of a change with the sharded model, by one rank alone, failed "
            f"({type(error).__name__}: {reason}). The run continues. Its next change of the group "
            "takes longer, because this work is then done while the others wait.",
            once="rehearsal",
        )
    finally:
        dist.destroy_process_group()
        rng.load(random)
        del world


def _train_one_parameter(mesh: Any, device: torch.device) -> None:
    from torch.distributed.fsdp import fully_shard  # takes half a second, only for sharded models

    model = torch.nn.Sequential(torch.nn.Linear(1, 1, device=device))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # FSDP records the order of its modules in the first pass
        model(torch.ones(1, 1, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _rehearse_change(training: ShardedTraining, mesh: Any, place: Place) -> None:
    module = training.model.without_memory(mesh)
    optimizer = twin_of(training.optimizer, training.model.module, module)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        type(optimizer).step(optimizer)
    objects = {MODEL: module, OPTIMIZER: optimizer}
    skeletons, tensors = take_apart(objects)
    if place is not ALONE:
        touch(tensors, training.device)
    skeletons_copy = pickle.loads(pickle.dumps(skeletons))
    layout = moving.layout_of(moving.parts_of(tensors))
    shapes = {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()}
    sizes = {key: dtype.itemsize for key, (_, dtype) in shapes.items()}

    whole = {key: [Chunk((0,) * len(shape), shape)] for key, (shape, _) in shapes.items()}
    make_plan([whole], [layout], sizes)

    def read(rooms: dict[str, Any]) -> None:
        make_plan([layout], [moving.layout_of(moving.parts_of(rooms))], sizes)

    put_together(objects, skeletons_copy, shapes, True, read, lambda _name, _target, error: error)


def touch(tensors: Mapping[str, Any], device: torch.device) -> None:
    """Allocate, write and free the memory for this rank's part of ``tensors``. The process keeps
    freed memory (:func:`malletrain.elastic.state.keep_freed`), so its pages are mapped when
    the part arrives.
    """
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors.values()]
    rooms = [torch.empty(t.shape, dtype=t.dtype, device=device).fill_(0) for t in local]
    del rooms


def twin_of(
    optimizer: torch.optim.Optimizer, old: torch.nn.Module, new: torch.nn.Module
) -> torch.optim.Optimizer:
    """Return a copy of ``optimizer`` without state, whose updates do not change ``optimizer``.

    Args:
        optimizer: the optimizer.
        old: the module that it trains.
        new: the module that the copy trains. Its parameters have the same names.
    """
    names = {id(parameter): name for name, parameter in named_parameters(old).items()}
    new_parameters = named_parameters(new)
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [new_parameters[names[id(p)]] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    leave_out_hooks(twin)
    return twin
