"""Caches the device meshes over which a process shards its model, and reuses them in later rounds.

Decides which mesh a round uses. If the process had the same rank in an earlier round of the same
size, it is the mesh of that round, with the process group of the new round. DTensor caches the
sharding of each operation per mesh. Filling that cache takes most of the first step after a
rescale.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from malletrain.elastic.errors import ElasticError
from malletrain.elastic.link import Place
from malletrain.training.torch_private import forget_meshes, lend_group

MAX_MESHES = 32
"""Maximum number of cached meshes. When the cache is full, it drops all of them, and DTensor's
caches.
"""


class MeshCache:
    """The mesh cache of one process.

    Args:
        device: device type, as ``init_device_mesh`` takes it.
        is_hsdp: whether the model is also replicated (HSDP). The mesh then has two dimensions.
    """

    def __init__(self, device: str, is_hsdp: bool) -> None:
        self._device, self._is_hsdp = device, is_hsdp
        # Giving a mesh another group is not tested with NCCL.
        self._can_reuse = device == "cpu" and not is_hsdp
        self._meshes: dict[tuple[int, int], Any] = {}

    def mesh_for(self, place: Place, shard_group_size: int) -> Any:
        """Returns the mesh over the current default group.

        Args:
            place: membership of this process in the round.
            shard_group_size: number of ranks over which the model is sharded.

        Raises:
            ElasticError: ``shard_group_size`` does not divide the number of ranks.
        """
        size = place.size
        if size % shard_group_size:
            raise ElasticError(
                f"The round has {size} ranks, which is not a multiple of {shard_group_size}. With "
                "shard='node' every node must have the same number of ranks."
            )
        for mesh in self._meshes.values():
            lend_group(mesh, None)  # no mesh keeps the group of an earlier round alive
        if self._can_reuse and (mesh := self._cached_mesh(place.rank, size)) is not None:
            return mesh
        # torch treats meshes of the same size and names as one, and would return the rank and the
        # groups of an earlier round. So the names contain the generation.
        self._clear()
        generation = place.generation
        shape = (size // shard_group_size, shard_group_size) if self._is_hsdp else (size,)
        names = (f"replicate_{generation}", f"shard_{generation}")[-len(shape) :]
        return init_device_mesh(self._device, shape, mesh_dim_names=names)

    def is_cached(self, place: Place) -> bool:
        """Returns whether there is a mesh for this rank and number of ranks."""
        return (place.rank, place.size) in self._meshes

    def _cached_mesh(self, rank: int, size: int) -> Any | None:
        """Returns the mesh for this rank and size, which is made if needed. None if this torch
        cannot give it the new group.
        """
        mesh = self._meshes.get((rank, size))
        if mesh is None:
            if len(self._meshes) >= MAX_MESHES:
                self._clear()
            name = f"shard_{rank}_of_{size}"  # a unique name: see mesh_for()
            mesh = init_device_mesh(self._device, (size,), mesh_dim_names=(name,))
        if not lend_group(mesh, dist.group.WORLD):
            return None
        self._meshes[rank, size] = mesh
        return mesh

    def _clear(self) -> None:
        self._meshes.clear()
        forget_meshes()
