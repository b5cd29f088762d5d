"""What a change of the group does to a sharded model, done once before this process says that it is
ready: alone, on a mesh of one rank, while the others train.

Decides what is gone through: the script's own functions, FSDP at work, an update of the optimizer,
and a state taken apart, planned for and put together again. What is imported, compiled or looked up
for the first time in it is there when the others wait. The script's model stays on ``meta``: one
rank may not have memory for all of it. Nothing depends on a rehearsal; one that fails is told.
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
from malletrain.elastic.sharded import moving
from malletrain.elastic.sharded.chunks import Chunk
from malletrain.elastic.sharded.training import MODEL, OPTIMIZER, ShardedTraining
from malletrain.elastic.sharded.transfer_plan import make_plan
from malletrain.elastic.switches import named_parameters
from malletrain.training import report, rng
from malletrain.training.sharded_state import put_together, take_apart
from malletrain.training.torch_private import adopt_backend, leave_out_hooks

BACKEND = "malletrain_rehearsal"
"""Of a group whose other ranks are not there: nothing on ``meta`` goes to anybody."""
ALONE = Place(0, 0, 1)


def _connect(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    group = dist.ProcessGroup(rank, size)  # type: ignore[call-arg]  # the stub knows one form
    adopt_backend(group, dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout))
    return group


dist.Backend.register_backend(BACKEND, _connect, devices=["cpu"])


def rehearse(training: ShardedTraining, backend: str) -> None:
    """Go through a change alone, as one rank of one. ``backend``: of collectives on CPUs. Never
    raises for what the script's functions do.
    """
    _on_stage(training, ALONE, backend)
    # Looking for circles takes longer the more there is, and all that was imported by now is there
    # to stay: it is not looked through again when the group changes.
    gc.collect()
    gc.freeze()


def rehearse_at(training: ShardedTraining, place: Place) -> None:
    """The same as the rank that this process will be. What DTensor remembers of the operations is
    by rank and number of ranks (:mod:`malletrain.elastic.sharded.meshes`).
    """
    if not training.meshes.has(place):
        _on_stage(training, place, BACKEND)


def _on_stage(training: ShardedTraining, place: Place, backend: str) -> None:
    if dist.is_initialized():
        return
    random = rng.state()
    dist.init_process_group(backend, store=dist.HashStore(), rank=place.rank, world_size=place.size)
    world = dist.group.WORLD
    try:
        mesh = training.meshes.of(place, 1 if training.in_nodes else place.size)
        if place is ALONE:
            _train_one_number(mesh, training.device)
        _go_through(training, mesh, place)
    except Exception as error:
        reason = " ".join(str(error).split())
        report.tell(
            "The rehearsal of a change with the sharded model, by one rank alone, failed "
            f"({type(error).__name__}: {reason}). The run goes on; what it would have done "
            "beforehand is done at the next change of the group, while the others wait.",
            once="rehearsal",
        )
    finally:
        dist.destroy_process_group()
        rng.load(random)
        del world


def _train_one_number(mesh: Any, device: torch.device) -> None:
    from torch.distributed.fsdp import fully_shard  # half a second that only sharded models need

    model = torch.nn.Sequential(torch.nn.Linear(1, 1, device=device))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # FSDP learns the order of its parts in the first
        model(torch.ones(1, 1, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _go_through(training: ShardedTraining, mesh: Any, place: Place) -> None:
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
    """Have had the memory of this rank's part of ``tensors``: what is freed stays with the process
    (:func:`malletrain.elastic.rooms.keep_freed`), and its pages are there when it is needed.
    """
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors.values()]
    rooms = [torch.empty(t.shape, dtype=t.dtype, device=device).fill_(0) for t in local]
    del rooms


def twin_of(
    optimizer: torch.optim.Optimizer, old: torch.nn.Module, new: torch.nn.Module
) -> torch.optim.Optimizer:
    """An optimizer like ``optimizer``, with the parameters of ``new`` for those of ``old`` of the
    same names and no state. What it does leaves ``optimizer`` as it is.
    """
    names = {id(parameter): name for name, parameter in named_parameters(old).items()}
    there = named_parameters(new)
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [there[names[id(p)]] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    leave_out_hooks(twin)
    return twin
