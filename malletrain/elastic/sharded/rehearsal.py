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
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from malletrain.elastic.sharded import moving
from malletrain.elastic.sharded.chunks import Chunk
from malletrain.elastic.sharded.training import MODEL, OPTIMIZER, ShardedTraining
from malletrain.elastic.sharded.transfer_plan import make_plan
from malletrain.training import report, rng
from malletrain.training.sharded_state import put_together, take_apart
from malletrain.training.torch_private import forget_meshes

NAMES = ("replicate_0", "shard_0")
"""Of the dimensions of the mesh: rounds are counted from 1."""


def rehearse(training: ShardedTraining, backend: str) -> None:
    """Go through a change alone. ``backend``: of collectives on CPUs. Never raises for what the
    script's functions do.
    """
    if dist.is_initialized():
        return
    random = rng.state()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    held = dist.group.WORLD
    try:
        names = NAMES if training.in_nodes else NAMES[1:]
        mesh = init_device_mesh(training.device.type, (1,) * len(names), mesh_dim_names=names)
        _train_one_number(mesh, training.device)
        _go_through(training, mesh)
    except Exception as error:
        reason = " ".join(str(error).split())
        report.tell(
            f"The rehearsal of the sharded model on one rank failed ({type(error).__name__}: "
            f"{reason}). The run goes on; what it would have done beforehand is done at the next "
            "change of the group, while the others wait."
        )
    finally:
        dist.destroy_process_group()
        rng.load(random)
        forget_meshes()
        # Looking for circles takes longer the more there is, and all that was imported by now is
        # there to stay: it is not looked through again when the group changes.
        gc.collect()
        gc.freeze()
        del held


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


def _go_through(training: ShardedTraining, mesh: Any) -> None:
    module = training.model.without_memory(mesh)
    optimizer = twin_of(training.optimizer, training.model.module, module)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        type(optimizer).step(optimizer)
    objects = {MODEL: module, OPTIMIZER: optimizer}
    skeletons, tensors = take_apart(objects)
    said = pickle.loads(pickle.dumps(skeletons))
    layout = moving.layout_of(moving.parts_of(tensors))
    shapes = {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()}
    sizes = {key: dtype.itemsize for key, (_, dtype) in shapes.items()}

    def read(rooms: dict[str, Any]) -> None:
        wanted = moving.layout_of(moving.parts_of(rooms))
        make_plan([layout], [wanted], sizes)

    whole = {key: [Chunk((0,) * len(shape), shape)] for key, (shape, _) in shapes.items()}
    make_plan([layout], [whole], sizes)
    put_together(objects, said, shapes, True, read, lambda _name, _target, error: error)


def twin_of(
    optimizer: torch.optim.Optimizer, old: torch.nn.Module, new: torch.nn.Module
) -> torch.optim.Optimizer:
    """An optimizer like ``optimizer``, with the parameters of ``new`` for those of ``old`` of the
    same names and no state. What it does leaves ``optimizer`` as it is.
    """
    names = {id(parameter): name for name, parameter in old.named_parameters()}
    there = dict(new.named_parameters())
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [there[names[id(p)]] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return twin
