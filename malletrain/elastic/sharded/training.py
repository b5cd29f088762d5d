"""What a process holds of a sharded training: its shards, what is the same on all ranks, copies
kept for the case of a loss, and an update that it had no time to make.

Decides what a process can offer when the group changes. Which of it counts is decided by
:mod:`malletrain.elastic.sharded.sharing`.
"""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from malletrain.elastic import pickled
from malletrain.elastic.background import to_host
from malletrain.elastic.errors import ElasticError
from malletrain.elastic.group import Group
from malletrain.elastic.sharded import copies
from malletrain.elastic.sharded.assignment import StatePart
from malletrain.elastic.sharded.meshes import Meshes
from malletrain.elastic.sharded.model import ShardedModel, saved_names
from malletrain.elastic.sharded.moving import Parts, combined, parts_of
from malletrain.elastic.sharded.snapshot import RunSnapshot
from malletrain.elastic.sharded.standing import ShardStanding, Version
from malletrain.elastic.state import StateError
from malletrain.elastic.switches import Switches, named_buffers, switches_of
from malletrain.elastic.training import Training
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.training import report, rng
from malletrain.training.sharded_state import take_apart

MODEL, OPTIMIZER = "model", "optimizer"


@dataclass(frozen=True)
class Pending:
    """An update that all ranks have the gradients of, and this one has not made."""

    gradients: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """(parameter, gradient)."""
    random: dict[str, Any]
    """The random generators after the step's computation."""


class ShardedTraining(Training):
    """The objects of one run with a sharded model.

    Args:
        model: see :class:`malletrain.elastic.Run`, as ``build`` and ``parallelize``.
        objects: by name; ``optimizer`` among them.
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
        self.in_nodes = shard == "node"
        self.meshes = Meshes(device.type, self.in_nodes)
        self.replicate_every = replicate_every
        self.history = ""
        self.extra: Parts = {}
        """Of the live state, beside the module's own shards: what leavers gave."""
        self.copies: list[copies.ShardCopy] = []
        self.group: Group | None = None
        self.moved_bytes = 0
        """Sent to this process at the last change."""
        self.handed_bytes = 0
        """Those that leavers have sent for the next one."""
        self._pending: Pending | None = None
        self._once: list[tuple[dict[str, Any], dict[str, Any]]] | None = None
        self._rows: tuple[tuple[int, int], ...] = ()
        self._begun = pickle.dumps({n: self._state_of(n) for n in self.others})
        if snapshot is not None and snapshot is not False:
            path = None if snapshot is True else snapshot
            self.snapshot: RunSnapshot | None = RunSnapshot(  # type: ignore[assignment]
                path, every_s, run=self._counters, **{MODEL: model.module, **objects}
            )

    # --- what it offers ---

    def for_joiners(self) -> str:
        """Nothing: what a joiner will hold is only known by the plan of the change."""
        return "[]"

    @property
    def version(self) -> Version | None:
        """Of the live state."""
        return Version(self.updates, self.steps, self.history) if self.has_state else None

    def place_in_shards(self) -> ShardStanding:
        """How far this process is."""
        return ShardStanding(
            self.version,
            not self._torn,
            self._pending is not None,
            tuple(shard_copy.version for shard_copy in self.copies),
        )

    def live_objects(self, module: torch.nn.Module | None = None) -> dict[str, Any]:
        """All objects, with ``module`` for the model."""
        return {MODEL: module or self.model.module, OPTIMIZER: self.optimizer, **self.others}

    def live_parts(self) -> Parts:
        """The shards of the live state."""
        return parts_of(self._apart()[1])

    @contextmanager
    def taken_apart_once(self) -> Iterator[None]:
        """Within it the live state stays as it is, and is taken apart once at most: that takes a
        few hundredths of a second for each hundred parameters.
        """
        self._once = []
        try:
            yield
        finally:
            self._once = None

    def _apart(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self._once:
            return self._once[0]
        parts = take_apart(self.live_objects())
        if self._once is not None:
            self._once.append(parts)
        return parts

    def parts_at(self, version: Version, copies_too: bool = False) -> Parts:
        """What this process has of a state. ``copies_too``: of the live one the copies as well."""
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

    def description(self, version: Version | None = None) -> bytes:
        """What belongs to a state beside its shards, the same for all ranks. Raises StateError."""
        if version is not None and version != self.version:
            return next(
                shard_copy.description
                for shard_copy in self.copies
                if shard_copy.version == version
            )
        skeletons, tensors = self._apart()
        module = self.model.module
        snapshot_names = saved_names(module)
        description = {
            "objects": to_host(skeletons),
            "shapes": {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()},
            "buffers": to_host(
                {n: b for n, b in named_buffers(module).items() if n not in snapshot_names}
            ),
            "switches": switches_of(module),
            "rng": rng.state(),
            "counters": self._counted(),
            "history": self.history,
        }
        try:
            return pickled.dumps(description)
        except Exception as error:
            for name, state in skeletons.items():
                try:
                    pickle.dumps(state)
                except Exception:
                    raise StateError(
                        f"The state of {name!r} cannot be sent to another process: {error}"
                    ) from error
            raise

    def switches(self) -> Switches | None:
        """Those of the live module; None before the first group, when ``parallelize`` may have its
        own.
        """
        return switches_of(self.model.module) if self.group is not None else None

    def _state_of(self, name: str) -> Any:
        return to_host(take_apart({name: self.others[name]})[0][name])

    def holding(self) -> StatePart | None:
        """The part of the state that this process has, for the order of the next ranks. Asked in
        another thread than the one that trains, which must not be disturbed.
        """
        group = self.group  # whose layout it is: a newer one may have come to nothing
        if not self.has_state or self.in_nodes or group is None:
            return None
        return StatePart(group.place.rank, group.place.size, self._rows)

    # --- steps ---

    def before_update(self, group: Group) -> None:
        """Where shards have replicas: wait until every rank has all its gradients, before any makes
        the update. If one rank knows that, the others have what it takes to make it, too. Raises
        ElasticError at a second update of a step: nobody else has what the first has changed.
        """
        if self.updates != self._updates_before:
            raise ElasticError(
                "A step of a sharded model makes a second update, from gradients of its own: when "
                "a peer is lost in it, the first cannot be undone. Make each update a step of its "
                "own (`with run.step():`), or train in restart mode."
            )
        if not (self.in_nodes and group.several):
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
        """Raises ElasticError: the update would pass through the group while it changes shards that
        nobody else has.
        """
        raise ElasticError(
            f"{type(optimizer).__name__}.step(closure) of a sharded model cannot be undone when a "
            "peer is lost in it. Call optimizer.step() without a closure, or train in restart mode."
        )

    def another_update(self) -> None:
        """Nothing: :meth:`before_update` refuses it, if it is made."""

    def discard(self, share: int) -> bool:
        """The step never was, unless others have made its update (:meth:`catch_up`)."""
        self.model.let_go()
        return super().discard(share)

    def catch_up(self, version: Version) -> None:
        """Make the update that others have made; it leads to ``version``."""
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
        if self._lost_share:
            report.report(self._lost_share)
            self._lost_share = 0

    # --- another state ---

    def goes_on(
        self, module: torch.nn.Module, description: Mapping[str, Any], group: Group
    ) -> None:
        """``module`` has the shards of the state of ``description``; the objects have the rest."""
        self.model.module = module
        self._count_from(dict(description["counters"]))
        self.history = description["history"]
        self.extra, self.group, self.handed_bytes = {}, group, 0
        self._rows = rows_of(module)
        self._pending = None
        self.has_state = True
        if self.snapshot is not None:
            self.snapshot.regroup({**self.live_objects(), "run": self._counters})

    def begins_anew(self, module: torch.nn.Module, group: Group, history: str) -> bool:
        """``module`` has memory and no numbers yet: have all be as the newest snapshot says.
        Returns False without one: then all but the module are as the script began.
        """
        self.goes_on(module, {"counters": {}, "history": history}, group)
        self.has_state, self.copies = False, []
        begun = pickle.loads(self._begun)
        for name, value in self.others.items():
            value.update(begun[name]) if isinstance(value, dict) else value.load_state_dict(
                begun[name]
            )
        if self.snapshot is None or not self.snapshot.restore():
            return False
        self._count_from(self._counters)
        return True

    def new_history(self) -> str:
        """A name for what follows when the run goes back."""
        return uuid.uuid4().hex

    def snapshot_step(self) -> None:
        """After a step, where the group stays: copies at a neighbour and a snapshot, when due."""
        if self.replicate_every and self.steps % self.replicate_every == 0:
            self.keep_copies()
        elif len(self.copies) > 1:
            self.copies = self.copies[-1:]
        super().snapshot_step()

    def keep_copies(self) -> None:
        """Exchange copies with the neighbours, if there are to be any."""
        group = self.group
        if not self.replicate_every or group is None or not group.several:
            return
        version = self.version
        assert version is not None
        reached(FaultPoint.SHARDS_COPY)
        made = copies.exchange(group, version, self.live_parts(), self.description())
        # The one before goes when all are known to have this one: a step later.
        self.copies = [*self.copies[-1:], made]
        reached(FaultPoint.SHARDS_KEPT)

    def digest(self) -> str:
        """A hash of the whole state; called on all ranks together."""
        return copies.digest(self.live_objects())


def rows_of(module: torch.nn.Module) -> tuple[tuple[int, int], ...]:
    """See :class:`StatePart`. The optimizer's state is cut as its parameters are, and makes no
    difference to an order.
    """
    rows: dict[int, int] = {}
    for tensor in module.parameters():
        for placement in getattr(tensor, "placements", ()):
            if placement.is_shard():
                length = tensor.shape[placement.dim]
                row = tensor.numel() * tensor.element_size() // max(1, length)
                rows[length] = rows.get(length, 0) + row
    return tuple(rows.items())
