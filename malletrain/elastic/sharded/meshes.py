"""The meshes on which the rounds of one process are sharded.

Decides which mesh a round has: where this process was at the same place of as many ranks before,
that one again, with the group of the new round. DTensor remembers by the mesh what each operation
makes of shards, and looking it up anew is the larger part of the first step after a change.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from malletrain.elastic.errors import ElasticError
from malletrain.elastic.link import Place
from malletrain.training.torch_private import forget_meshes, lend_group

MOST = 32
"""Meshes that are kept; beyond it all are forgotten, and what DTensor remembers with them."""


class Meshes:
    """Of one process.

    Args:
        device: the kind of device.
        in_nodes: whether there are replicas: the mesh has two dimensions then.
    """

    def __init__(self, device: str, in_nodes: bool) -> None:
        self._device, self._in_nodes = device, in_nodes
        self._again_too = device == "cpu" and not in_nodes  # NCCL's groups were never lent on
        self._meshes: dict[tuple[int, int], Any] = {}

    def of(self, place: Place, shards: int) -> Any:
        """The mesh of the present default group, cut into ``shards``. Raises ElasticError."""
        size = place.size
        if size % shards:
            raise ElasticError(
                f"The round has {size} ranks, which groups of {shards} do not fill: with "
                "shard='node' every node must have the same number of ranks."
            )
        for mesh in self._meshes.values():
            lend_group(mesh, None)  # none holds a group that was left
        if self._again_too and (mesh := self._again(place.rank, size)) is not None:
            return mesh
        # Torch takes meshes of one size and one name for the same one, and answers for a rank and
        # groups that it had in an earlier round: the round belongs to the name.
        self._forget()
        number = place.generation
        shape = (size // shards, shards) if self._in_nodes else (size,)
        names = (f"replicate_{number}", f"shard_{number}")[-len(shape) :]
        return init_device_mesh(self._device, shape, mesh_dim_names=names)

    def has(self, place: Place) -> bool:
        """Whether there is a mesh of this place that can be had again."""
        return (place.rank, place.size) in self._meshes

    def _again(self, rank: int, size: int) -> Any | None:
        """The mesh of this place, which may be a new one; None where torch cannot have it again."""
        mesh = self._meshes.get((rank, size))
        if mesh is None:
            if len(self._meshes) >= MOST:
                self._forget()
            name = f"shard_{rank}_of_{size}"  # a name of its own: see above
            mesh = init_device_mesh(self._device, (size,), mesh_dim_names=(name,))
        if not lend_group(mesh, dist.group.WORLD):
            return None
        self._meshes[rank, size] = mesh
        return mesh

    def _forget(self) -> None:
        self._meshes.clear()
        forget_meshes()
