"""The state that a process has of a sharded training: its shards, the state that is equal on all
ranks, copies for the case of a loss, and an update that it has not made.

:class:`ShardedTraining` decides which state a process can offer when the group changes.
:mod:`malletrain.elastic.sharded.sharing` decides which version counts.

:class:`MeshCache` keeps the device meshes over which a process shards its model, and decides which
one a round uses. If the process had the same rank in an earlier round of the same size, it is the
mesh of that round, with the process group of the new round. DTensor caches the sharding of each
operation per mesh. Filling that cache takes most of the first step after a rescale.

:class:`RunSnapshot` takes the snapshots of a sharded run: all ranks write, at a step on which they
agree. It decides only which ranks write: those of the current group, whose collectives can be
aborted. All else is done by :class:`malletrain.Snapshot`.

:func:`dumps` pickles state for another process of the same run. It decides how small tensors are
written: as a list of their numbers. torch writes each tensor as a file of its own, and an optimizer
has one per parameter, its step count. That costs 0.2 ms per tensor at both ends while all ranks
wait.
"""

from __future__ import annotations

import io
import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from malletrain.elastic.background import to_host
from malletrain.elastic.errors import ElasticError, is_peer_loss
from malletrain.elastic.group import Group, library_collectives
from malletrain.elastic.link import Place
from malletrain.elastic.module_modes import ModuleModes, modes_of, named_buffers
from malletrain.elastic.peer_pickles import PeerPickler, register
from malletrain.elastic.sharded import copies
from malletrain.elastic.sharded.assignment import StatePart
from malletrain.elastic.sharded.copies import ShardStanding, Version
from malletrain.elastic.sharded.model import ShardedModel, saved_names
from malletrain.elastic.sharded.moving import Parts, combined, parts_of
from malletrain.elastic.state import StateError
from malletrain.elastic.training import Training
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.training import report, rng
from malletrain.training.sharded_state import take_apart
from malletrain.training.side_group import Team
from malletrain.training.snapshot import Snapshot
from malletrain.training.torch_private import forget_meshes, lend_group

MAX_LISTED_ELEMENTS = 64
"""Maximum number of elements for which a list of numbers is shorter and faster."""


def tensor_of(numbers: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that :func:`dumps` wrote as a list of numbers."""
    return torch.tensor(numbers, dtype=dtype)


_send_tensor = register("tensor", tensor_of)


class _Pickler(PeerPickler):
    def reducer_override(self, value: Any) -> Any:
        """Write a tensor as numbers if they give the same tensor again, all else as usual."""
        if (
            type(value) is torch.Tensor
            and value.device.type == "cpu"
            and value.dtype in (torch.float32, torch.float64, torch.int64)
            and 0 < value.numel() <= MAX_LISTED_ELEMENTS
            and value.layout is torch.strided
            and not value.requires_grad
        ):
            numbers = {"numbers": value.tolist(), "dtype": value.dtype}
            return _send_tensor(numbers) if self.by_name else (tensor_of, tuple(numbers.values()))
        return NotImplemented


def dumps(value: Any, by_name: bool = True) -> bytes:
    """Return ``value`` pickled, as :func:`malletrain.elastic.peer_pickles.dumps` does, with small
    tensors as numbers.
    """
    file = io.BytesIO()
    _Pickler(file, by_name).dump(value)
    return file.getvalue()


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
        """Return the mesh over the current default group.

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
        """Return whether there is a mesh for this rank and number of ranks."""
        return (place.rank, place.size) in self._meshes

    def _cached_mesh(self, rank: int, size: int) -> Any | None:
        """Return the mesh for this rank and size, which is made if needed. None if this torch
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


class RunSnapshot(Snapshot):
    """A :class:`malletrain.Snapshot` for groups that change."""

    _caller = "elastic.Run"
    _refusal = ElasticError

    def regroup(self, objects: Mapping[str, Any]) -> None:
        """Use the current default group, and ``objects`` with the new module."""
        self._objects = dict(objects)
        self._team = self._agreement = None
        self._looked = False
        self._request = 0
        self._announced = False  # tell the agent again that this process saves on request

    def _all_ranks(self) -> Team:
        if self._team is None:
            several = dist.is_initialized() and dist.get_world_size() > 1
            self._team = Team(dist.group.WORLD if several else None)
        return self._team

    def _epoch_closed(self) -> None:
        try:
            with library_collectives():
                super()._epoch_closed()
        except RuntimeError as error:  # the next step fails as well, and the group is left
            if not is_peer_loss(error):
                raise

    def wait(self) -> None:
        """Does nothing, because nothing is written in the background."""


MODEL, OPTIMIZER = "model", "optimizer"


@dataclass(frozen=True)
class Pending:
    """An update that this rank has not made, although all ranks have its gradients."""

    gradients: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """(parameter, gradient) of each parameter that has one."""
    random: dict[str, Any]
    """State of the random number generators after the forward and backward pass."""


class ShardedTraining(Training):
    """The objects of one run with a sharded model.

    Args:
        model: the model of ``build`` and ``parallelize``, see :class:`malletrain.elastic.Run`.
        objects: the other objects by name, including ``optimizer``.
        shard: ``all`` or ``node``.
        replicate_every: steps between copies of the shards at a neighbour; 0 for none.
        device, snapshot, every_s: see :class:`malletrain.elastic.Run`.
    """

    undoes_parameters = False

    def __init__(
        self,
        model: ShardedModel,
        objects: dict[str, Any],
        shard: str,
        replicate_every: int,
        device: torch.device,
        snapshot: str | os.PathLike[str] | bool | None,
        every_s: float,
    ) -> None:
        super().__init__({MODEL: model, **objects}, device, None, every_s)
        self.model = model
        self.optimizer: torch.optim.Optimizer = objects[OPTIMIZER]
        self.others = {name: value for name, value in objects.items() if name != OPTIMIZER}
        self.is_hsdp = shard == "node"
        self.meshes = MeshCache(device.type, self.is_hsdp)
        self.replicate_every = replicate_every
        self.history = ""
        self.extra: Parts = {}
        """Shards of the live state that leavers have handed over."""
        self.copies: list[copies.ShardCopy] = []
        """Copies of shards, the oldest first."""
        self.group: Group | None = None
        """Group whose layout the module has; None before the first."""
        self.moved_bytes = 0
        """Number of bytes that this process received at the last change."""
        self.handed_bytes = 0
        """Number of bytes that leavers have handed over for the next change."""
        self._pending: Pending | None = None
        self._parts_cache: list[tuple[dict[str, Any], dict[str, Any]]] | None = None
        """The live state, taken apart, within :meth:`cached_parts`; else None."""
        self._rows: tuple[tuple[int, int], ...] = ()
        self._initial_state = pickle.dumps({n: self._state_of(n) for n in self.others})
        if snapshot is not None and snapshot is not False:
            path = None if snapshot is True else snapshot
            self.snapshot: RunSnapshot | None = RunSnapshot(  # type: ignore[assignment]
                path, every_s, run=self._counters, **{MODEL: model.module, **objects}
            )

    # --- the state that it offers ---

    def for_joiners(self) -> str:
        """Return an empty list, because only the transfer plan gives the shards of a joiner."""
        return "[]"

    @property
    def version(self) -> Version | None:
        """Version of the live state; None for a joiner."""
        return Version(self.updates, self.steps, self.history) if self.has_state else None

    def standing_in_shards(self) -> ShardStanding:
        """Return the progress of this process, and the versions of its copies."""
        return ShardStanding(
            self.version,
            not self._torn,
            self._pending is not None,
            tuple(shard_copy.version for shard_copy in self.copies),
        )

    def compared_objects(self) -> tuple[Callable[[], dict[str, Any]], dict[str, Any]]:
        return dict, self._dicts  # no rank has the same shards as another

    def live_objects(self, module: torch.nn.Module | None = None) -> dict[str, Any]:
        """Return all objects, with ``module`` as the model; by default the current module."""
        return {MODEL: module or self.model.module, OPTIMIZER: self.optimizer, **self.others}

    def live_parts(self) -> Parts:
        """Return the shards of the live state."""
        return parts_of(self._take_apart()[1])

    @contextmanager
    def cached_parts(self) -> Iterator[None]:
        """Within this context the live state must not change, and is taken apart only once. That
        takes a few hundredths of a second per hundred parameters.
        """
        self._parts_cache = []
        try:
            yield
        finally:
            self._parts_cache = None

    def _take_apart(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self._parts_cache:
            return self._parts_cache[0]
        parts = take_apart(self.live_objects())
        if self._parts_cache is not None:
            self._parts_cache.append(parts)
        return parts

    def parts_at(self, version: Version, copies_too: bool = False) -> Parts:
        """Return the shards of a version that this process has.

        Args:
            version: version of the state.
            copies_too: whether to add copies, if ``version`` is the live one.
        """
        live = self.version == version
        parts = combined(
            shard_copy.parts for shard_copy in self.copies if shard_copy.version == version
        )
        copied = {
            key: [(chunk, tensor.to(self.device)) for chunk, tensor in boxes]
            for key, boxes in parts.items()
            if copies_too or not live
        }
        return combined([self.live_parts(), self.extra, copied]) if live else copied

    def description(self, version: Version | None = None, by_name: bool = True) -> bytes:
        """Return a state without its shards, pickled. Only the record of the tensors in dicts may
        differ between ranks. Raises StateError.

        Args:
            version: the version; None for the live one.
            by_name: see :func:`malletrain.elastic.peer_pickles.dumps`.
        """
        if version is not None and version != self.version:
            copy = next(c.description for c in self.copies if c.version == version)
            return copy if by_name else dumps(pickle.loads(copy), by_name)
        skeletons, tensors = self._take_apart()
        module = self.model.module
        snapshot_names = saved_names(module)
        description = {
            "objects": to_host(skeletons),
            "shapes": {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()},
            "buffers": to_host(
                {n: b for n, b in named_buffers(module).items() if n not in snapshot_names}
            ),
            "modes": modes_of(module),
            "dict_tensors": self.state.dict_tensors.record(),
            "rng": rng.state(),
            "counters": self._counters_for_peers(),
            "history": self.history,
        }
        try:
            return dumps(description, by_name)
        except Exception as error:
            for name, state in skeletons.items():
                try:
                    pickle.dumps(state)
                except Exception:
                    raise StateError(
                        f"The state of {name!r} cannot be sent to another process: {error}"
                    ) from error
            raise

    def modes(self) -> ModuleModes | None:
        """Return the modes of the live module; None before the first group, because
        ``parallelize`` may set its own.
        """
        return modes_of(self.model.module) if self.group is not None else None

    def _state_of(self, name: str) -> Any:
        return to_host(take_apart({name: self.others[name]})[0][name])

    def holding(self) -> StatePart | None:
        """Return the part of the state that this process has, for the order of the next ranks;
        None if it has none. Another thread calls this while the training thread trains.
        """
        group = self.group  # the group of the layout; a newer one may have failed
        if not self.has_state or self.is_hsdp or group is None:
            return None
        return StatePart(group.place.rank, group.place.size, self._rows)

    # --- steps ---

    def before_update(self, group: Group) -> None:
        """With HSDP, wait until every rank has all its gradients before any rank makes the update.
        If one rank makes it, all others then have the gradients to make it as well. Raises
        ElasticError at a second update of a step, because no other rank has the shards from before
        the first.
        """
        if self.updates != self._updates_before:
            raise ElasticError(
                "A step of a sharded model makes a second update, from gradients of its own: when "
                "a peer is lost in it, the first cannot be undone. Make each update a step of its "
                "own (`with run.step():`), or train in restart mode."
            )
        if not (self.is_hsdp and group.several):
            return
        try:
            group.agree()
        except BaseException:
            trained = [p for g in self.optimizer.param_groups for p in g["params"]]
            self._pending = Pending(
                tuple((p, p.grad) for p in trained if p.grad is not None), rng.state()
            )
            raise

    def before_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ElasticError: the update would exchange gradients while it changes shards that no
        other rank has.
        """
        raise ElasticError(
            f"{type(optimizer).__name__}.step(closure) of a sharded model cannot be undone when a "
            "peer is lost in it. Call optimizer.step() without a closure, or train in restart mode."
        )

    def another_update(self) -> None:
        """Does nothing, because :meth:`before_update` rejects a second update."""

    def discard(self, share: int) -> bool:
        """Undo the current step. It counts after all if other ranks have made its update
        (:meth:`catch_up`).
        """
        self.model.reset_iteration()
        return super().discard(share)

    def catch_up(self, version: Version) -> None:
        """Make the pending update, which other ranks have made. It leads to ``version``."""
        pending, self._pending = self._pending, None
        assert pending is not None
        for parameter, gradient in pending.gradients:
            parameter.grad = gradient
        self.catching_up = True
        try:
            self.optimizer.step()
        finally:
            self.catching_up = False
        self.optimizer.zero_grad(set_to_none=True)
        rng.load(pending.random)
        self.steps = version.steps
        if self._discarded_samples:
            report.report(self._discarded_samples)
            self._discarded_samples = 0

    # --- change of the state ---

    def adopt(self, module: torch.nn.Module, description: Mapping[str, Any], group: Group) -> None:
        """Continue with ``module``.

        Args:
            module: module with the shards of the new state; the other objects already have theirs.
            description: the state without its shards: ``counters`` and ``history`` are read.
            group: the new group.
        """
        self.model.module = module
        self._load_counters(dict(description["counters"]))
        self.history = description["history"]
        self.extra, self.group, self.handed_bytes = {}, group, 0
        self._rows = rows_of(module)
        self._pending = None
        self.has_state = True
        if self.snapshot is not None:
            self.snapshot.regroup({**self.live_objects(), "run": self._counters})

    def restart(self, module: torch.nn.Module, group: Group, history: str) -> bool:
        """Load the newest snapshot. If there is none, give all objects but the module their initial
        state.

        Args:
            module: module with memory and undefined values.
            group: the new group.
            history: identifier of the new history.

        Returns:
            Whether a snapshot was loaded.
        """
        self.adopt(module, {"counters": {}, "history": history}, group)
        self.has_state, self.copies = False, []
        initial_state = pickle.loads(self._initial_state)
        dict_tensors = self.state.dict_tensors.record()
        for name, value in self.others.items():
            if isinstance(value, dict):
                value.update(initial_state[name])
            else:
                value.load_state_dict(initial_state[name])
        self.state.dict_tensors.restore(dict_tensors)
        if self.snapshot is None or not self.snapshot.restore():
            return False
        self._load_counters(self._counters)
        return True

    def new_history(self) -> str:
        """Return a new identifier for the history after the run goes back."""
        return uuid.uuid4().hex

    def snapshot_step(self) -> None:
        """Exchange copies with the neighbours and take a snapshot after a step, if they are due."""
        if self.replicate_every and self.steps % self.replicate_every == 0:
            self.keep_copies()
        elif len(self.copies) > 1:
            self.copies = self.copies[-1:]
        super().snapshot_step()

    def keep_copies(self) -> None:
        """Exchange copies with the neighbours, if the run has copies."""
        group = self.group
        if not self.replicate_every or group is None or not group.several:
            return
        version = self.version
        assert version is not None
        reached(FaultPoint.SHARDS_COPY)
        shard_copy = copies.exchange(group, version, self.live_parts(), self.description())
        # The previous copy is dropped when all ranks are known to have this one: a step later.
        self.copies = [*self.copies[-1:], shard_copy]
        reached(FaultPoint.SHARDS_KEPT)

    def digest(self) -> str:
        """Return a hash of the whole state. Called on all ranks together."""
        return copies.digest(self.live_objects())


def rows_of(module: torch.nn.Module) -> tuple[tuple[int, int], ...]:
    """Return (rows, bytes per row) of the sharded parameters, see :class:`StatePart`. The state of
    the optimizer is sharded as its parameters are, and does not change which order is best.
    """
    rows: dict[int, int] = {}
    for tensor in module.parameters():
        for placement in getattr(tensor, "placements", ()):
            if placement.is_shard():
                length = tensor.shape[placement.dim]
                row = tensor.numel() * tensor.element_size() // max(1, length)
                rows[length] = rows.get(length, 0) + row
    return tuple(rows.items())
