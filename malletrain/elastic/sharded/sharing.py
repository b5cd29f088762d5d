"""Gives every rank of a new group its part of the newest complete state.

Decides the order of the stages:

1. Leavers hand over, before they leave, the shards that only they have.
2. The newest complete state is determined.
3. The modules of the new group are filled piece by piece, while the old ones stay unchanged.
4. When all ranks know that all have their shards, the old modules are dropped.

If a peer is lost in any stage, the other ranks still have the state that they had.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from malletrain.elastic import peer_pickles
from malletrain.elastic.errors import is_peer_loss
from malletrain.elastic.group import Group
from malletrain.elastic.module_modes import named_buffers, named_parameters, set_modes
from malletrain.elastic.sharded import copies, moving
from malletrain.elastic.sharded.chunks import Chunk, share
from malletrain.elastic.sharded.copies import Version
from malletrain.elastic.sharded.model import exchange_parameters, release, saved_names
from malletrain.elastic.sharded.training import MODEL, OPTIMIZER, ShardedTraining
from malletrain.elastic.sharded.transfer_plan import IncompleteStateError, Layout, make_plan
from malletrain.elastic.state import StateError
from malletrain.elastic.step_exchange import Invited, to_wait_for, who_stays
from malletrain.protocol.counting import counted
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.training import report, rng
from malletrain.training.sharded_state import put_together

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
CompleteState = tuple[Version, dict[str, Any], moving.Parts, list[Layout]]
"""A state: its version, the state without its shards, the shards of this rank, and the layout of
each rank.
"""


def all_gather(group: Group, value: Any) -> list[Any]:
    """Return the ``value`` of each rank, by rank."""
    if not group.several:
        return [value]
    values: list[Any] = [None] * group.place.size
    if not group.layout.by_name:
        dist.all_gather_object(values, value)
        return values
    dist.all_gather_object(values, peer_pickles.dumps(value, by_name=True))
    return [pickle.loads(data) for data in values]


def broadcast(group: Group, source: int, data: bytes) -> bytes:
    """Return the ``data`` of the rank ``source``.

    Args:
        group: the default group.
        source: the rank that sends.
        data: its data; ignored on other ranks.
    """
    if not group.several:
        return data
    box = [data]
    dist.broadcast_object_list(box, source)
    return box[0]


# --- before the old group is left ---


def hand_over(training: ShardedTraining, group: Group, invited: Callable[[int], Invited]) -> bool:
    """Move the shards that only leavers have to the ranks that stay. Called on all ranks of the old
    group.

    Args:
        training: the objects of the run.
        group: the old group.
        invited: returns what this process knows of the next round. If that round has the generation
            that it is called with, it waits until all members have checked in.

    Returns:
        False if no next round is known to be complete by all ranks that are members of it. The
        group then stays.
    """
    rows: list[Invited] = all_gather(group, invited(0))
    while (awaited := to_wait_for(rows)) is not None:
        rows = all_gather(group, invited(awaited))
    staying = who_stays(rows)
    if staying is None:
        return False
    if len(staying) == len(rows):
        return True
    parts = moving.combined([training.live_parts(), training.extra])
    layouts: list[Layout] = all_gather(group, moving.layout_of(parts))
    sizes = {key: t.element_size() for key, boxes in parts.items() for _, t in boxes}
    dtypes = {key: t.dtype for key, boxes in parts.items() for _, t in boxes}
    for peer_sizes, peer_dtypes in all_gather(group, (sizes, dtypes)):
        sizes.update(peer_sizes)
        dtypes.update(peer_dtypes)
    targets = _assign_orphans(layouts, staying, training.is_hsdp)
    plan = make_plan(layouts, targets, sizes)
    rooms: moving.Parts = {
        key: [
            (chunk, torch.empty(chunk.sizes, dtype=dtypes[key], device=training.device))
            for chunk in chunks
        ]
        for key, chunks in targets[group.place.rank].items()
    }
    reached(FaultPoint.SHARDS_LEAVE)
    moving.carry_out(group, plan, parts, rooms)
    reached(FaultPoint.SHARDS_LEFT)
    group.agree()
    training.extra = moving.combined([training.extra, rooms])
    training.handed_bytes += plan.received_bytes(group.place.rank, sizes)
    return True


def _assign_orphans(
    layouts: Sequence[Layout], staying: Mapping[int, tuple[int, int]], is_hsdp: bool
) -> list[dict[str, list[Chunk]]]:
    """Return the boxes that each rank of the old group takes of those that only leavers have. A
    rank takes those that it needs in the next group; the rest is assigned in turn.
    """
    assigned: list[dict[str, list[Chunk]]] = [{} for _ in layouts]
    turn = 0
    for key in sorted({key for layout in layouts for key in layout}):
        boxes = sorted({chunk for layout in layouts for chunk in layout.get(key, ())})
        stays = [chunk for rank in staying for chunk in layouts[rank].get(key, ())]
        for chunk in boxes:
            remaining = [chunk]
            for other in stays:
                remaining = [part for box in remaining for part in box.without(other)]
            stays.append(chunk)
            for rank, (new_rank, new_size) in staying.items():
                if is_hsdp or not remaining:
                    break
                needed = _next_part(boxes, new_rank, new_size)
                if needed is None:
                    continue
                common = [c for box in remaining if (c := box.common(needed)) is not None]
                if common:
                    assigned[rank].setdefault(key, []).extend(common)
                    remaining = [part for box in remaining for part in box.without(needed)]
            for box in remaining:
                rank = list(staying)[turn % len(staying)]
                turn += 1
                assigned[rank].setdefault(key, []).append(box)
    return assigned


def _next_part(boxes: list[Chunk], part: int, parts: int) -> Chunk | None:
    """Return the box of a part of the next layout, which shards the dimension in which ``boxes``
    differ; None if it is empty.
    """
    ends = [max(c.offsets[d] + c.sizes[d] for c in boxes) for d in range(len(boxes[0].offsets))]
    cut = next((d for d, end in enumerate(ends) if any(c.sizes[d] != end for c in boxes)), 0)
    if not ends:
        return None
    first, number = share(ends[cut], parts, part)
    if not number:
        return None
    offsets, sizes = [0] * len(ends), list(ends)
    offsets[cut], sizes[cut] = first, number
    return Chunk(tuple(offsets), tuple(sizes))


# --- in the new group ---


def share_shards(training: ShardedTraining, group: Group, shard_group_size: int) -> None:
    """Give every rank its shards of the newest complete state. If there is none, it is that of the
    snapshot, or else the initial state of the script.

    Raises what :meth:`Group.wait` raises, StateError, SnapshotError or ElasticError.

    Args:
        training: the objects of the run.
        group: the new group.
        shard_group_size: number of ranks over which the state is sharded.
    """
    table: list[copies.ShardStanding] = all_gather(group, training.standing_in_shards())
    late = _catch_up(training, table)
    with training.cached_parts():
        complete_state = _newest_complete_state(training, group, table)
    module = training.model.sharded(training.meshes.mesh_for(group.place, shard_group_size))
    undo = exchange_parameters(training.optimizer, training.model.module, module)
    if complete_state is None:
        _restart(training, group, module, table)
        return
    version, description, before, _ = complete_state
    old = training.model.module
    newest = max((row.live for row in table if row.live is not None), default=None)
    goes_back = version != newest
    try:
        _fill(training, group, module, complete_state, late, goes_back)
    except BaseException:
        undo()
        raise
    if goes_back and group.place.rank == 0 and newest is not None:
        report.tell(
            f"Shards were lost with their nodes. The run continues from the copies of step "
            f"{version.steps}, {counted(newest.steps - version.steps, 'step')} back; the samples "
            "of those steps are drawn again."
        )
    training.adopt(module, description, group)
    # A single process has no copies, or old ones. It keeps its state until there are new copies.
    alone = sum(row.live == version for row in table) == 1
    reached(FaultPoint.SHARDS_FILLED)
    try:
        group.agree()
        if alone:
            training.keep_copies()
            group.agree()
    except BaseException:
        # A rank that knows that all have their shards has dropped its old ones. This rank does not
        # know it, and keeps both.
        training.extra = before
        raise
    reached(FaultPoint.SHARDS_DROPPED)
    del before, complete_state
    release(old)
    if not alone:
        training.keep_copies()


def _catch_up(training: ShardedTraining, table: Sequence[copies.ShardStanding]) -> bool:
    """Make the update that other ranks have made, if this process has its gradients as well.
    Return whether it did.
    """
    version, live = training.version, [row.live for row in table if row.live is not None]
    pending = training.standing_in_shards().pending
    if version is None or not max(live).follows(version) or not pending:
        return False
    training.catch_up(max(live))
    return True


def _newest_complete_state(
    training: ShardedTraining, group: Group, table: Sequence[copies.ShardStanding]
) -> CompleteState | None:
    rank = group.place.rank
    for version in copies.candidates(table):
        source = copies.source_of(table, version)
        has = table[source].live == version or version in table[source].copies
        text = b""
        if rank == source and has:
            text = training.description(version, by_name=group.layout.by_name)
        description = pickle.loads(broadcast(group, source, text))
        whole = {
            key: [Chunk((0,) * len(shape), tuple(shape))]
            for key, (shape, _) in description["shapes"].items()
        }
        for copies_too in copies.holdings(table, version):
            parts = training.parts_at(version, copies_too)
            layouts: list[Layout] = all_gather(group, moving.layout_of(parts))
            try:
                make_plan(layouts, [whole], _item_bytes(description["shapes"]))
            except IncompleteStateError:
                continue
            return version, description, parts, layouts
    return None


def _item_bytes(shapes: Shapes) -> dict[str, int]:
    return {key: dtype.itemsize for key, (_, dtype) in shapes.items()}


def _fill(
    training: ShardedTraining,
    group: Group,
    module: torch.nn.Module,
    complete_state: CompleteState,
    late: bool,
    goes_back: bool,
) -> None:
    """Load ``complete_state`` into ``module`` and the optimizer, and into the other objects if they
    have another state.
    """
    version, description, parts, layouts = complete_state
    objects: dict[str, Any] = {MODEL: module, OPTIMIZER: training.optimizer}
    loads_others = late or training.version != version
    if loads_others:
        objects.update(training.others)
    training.moved_bytes = 0

    def read(rooms: dict[str, Any]) -> None:
        targets = moving.parts_of(rooms)
        target_layouts: list[Layout] = all_gather(group, moving.layout_of(targets))
        plan = make_plan(layouts, target_layouts, _item_bytes(description["shapes"]))
        moving.carry_out(group, plan, parts, targets)
        received = plan.received_bytes(group.place.rank, _item_bytes(description["shapes"]))
        training.moved_bytes = training.handed_bytes + received

    def refuse(name: str, target: Any, error: Exception) -> Exception:
        if is_peer_loss(error):
            return error
        reason = " ".join(str(error).split())
        return StateError(
            f"The peers' state of {name!r} does not fit the {type(target).__name__} here: {reason}"
        )

    saved = {name: state for name, state in description["objects"].items() if name in objects}
    with torch.no_grad():
        put_together(objects, saved, description["shapes"], True, read, refuse)
        set_modes(module, description["modes"])
        for name, buffer in named_buffers(module).items():
            if name in description["buffers"]:
                buffer.copy_(description["buffers"][name])
    if loads_others:
        training.state.dict_tensors.restore(description.get("dict_tensors", {}))
    if not training.has_state or goes_back:
        rng.load(description["rng"])


def _restart(
    training: ShardedTraining,
    group: Group,
    module: torch.nn.Module,
    table: Sequence[copies.ShardStanding],
) -> None:
    """Load the newest snapshot, or the initial state, because no state is complete."""
    lost = any(row.live is not None for row in table)
    source = next((rank for rank, row in enumerate(table) if row.live is not None), 0)
    beginning = training.new_history(), rng.state(), training.modes()
    text = peer_pickles.dumps(beginning, group.layout.by_name)
    name, random, modes = pickle.loads(broadcast(group, source, text))
    if modes is not None:
        set_modes(module, modes)
    before, old = training.steps, training.model.module
    restored = training.restart(module, group, name)
    tensors = named_buffers(module)
    if restored:  # only the buffers that are not in a snapshot are missing
        snapshot_names = saved_names(module)
        tensors = {n: b for n, b in tensors.items() if n not in snapshot_names}
        random = rng.state()
    else:
        tensors.update(named_parameters(module))
        rng.load(random)
    if tensors:
        _copy_values(tensors, training.model.whole())
    if restored:
        rng.load(random)
    training.has_state = True
    if lost and group.place.rank == 0:
        where = f"its snapshot, step {training.steps}" if restored else "its beginning"
        report.tell(
            "Shards were lost with their nodes, and no copies of them are left. The run, which "
            f"was at step {before}, continues from {where}."
        )
    group.agree()
    release(old)
    training.keep_copies()


def _copy_values(tensors: Mapping[str, Any], whole: torch.nn.Module) -> None:
    """Copy the values of an unsharded model into the shards of ``tensors``, by name."""
    values = {**named_parameters(whole), **named_buffers(whole)}
    with torch.no_grad():
        for name, tensor in tensors.items():
            full = values[name].detach()
            whole_box = Chunk((0,) * full.ndim, tuple(full.shape))
            for box, local in moving.parts_of({name: tensor})[name]:
                local.copy_(full[box.within(whole_box)])
