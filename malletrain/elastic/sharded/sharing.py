"""Every rank of a new group comes to hold its part of the newest state that is whole.

Decides the order of things: which state it is, what leavers hand over before they go, then the
modules of the new group, filled piece by piece while the old ones stay untouched, and at last, when
all know that all have theirs, the old ones are dropped. A peer lost at any moment of it leaves the
others with what they had.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from malletrain.elastic.errors import is_peer_loss
from malletrain.elastic.group import Group
from malletrain.elastic.invited import Invited, to_wait_for, who_stays
from malletrain.elastic.sharded import moving, standing
from malletrain.elastic.sharded.chunks import Chunk, share
from malletrain.elastic.sharded.model import exchange_parameters, release, saved_names
from malletrain.elastic.sharded.standing import Version
from malletrain.elastic.sharded.training import MODEL, OPTIMIZER, ShardedTraining
from malletrain.elastic.sharded.transfer_plan import IncompleteStateError, Layout, make_plan
from malletrain.elastic.state import StateError
from malletrain.elastic.switches import named_buffers, named_parameters, set_switches
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.training import report, rng
from malletrain.training.sharded_state import put_together

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
CompleteState = tuple[Version, dict[str, Any], moving.Parts, list[Layout]]
"""A state: its version, what belongs to it beside its shards, the shards here, where all are."""


def from_all(group: Group, mine: Any) -> list[Any]:
    """What each rank says, by rank."""
    if not group.several:
        return [mine]
    values: list[Any] = [None] * group.place.size
    dist.all_gather_object(values, mine)
    return values


def from_one(group: Group, source: int, mine: bytes) -> bytes:
    """What ``source`` says."""
    if not group.several:
        return mine
    box = [mine]
    dist.broadcast_object_list(box, source)
    return box[0]


# --- before the old group is left ---


def hand_over(training: ShardedTraining, group: Group, invited: Callable[[int], Invited]) -> bool:
    """Have the ranks that stay hold what only leavers have. Called on all ranks of the old group.

    Args:
        invited: what this process knows of the next round; waits for everyone to be there where
            that is the generation it is called with.

    Returns:
        False when there is no next round that all of its members among these ranks know to be
        complete: then the group stays.
    """
    rows: list[Invited] = from_all(group, invited(0))
    while (awaited := to_wait_for(rows)) is not None:
        rows = from_all(group, invited(awaited))
    staying = who_stays(rows)
    if staying is None:
        return False
    if len(staying) == len(rows):
        return True
    parts = moving.combined([training.live_parts(), training.extra])
    layouts: list[Layout] = from_all(group, moving.layout_of(parts))
    sizes = {key: t.element_size() for key, boxes in parts.items() for _, t in boxes}
    kinds = {key: t.dtype for key, boxes in parts.items() for _, t in boxes}
    for others_sizes, others_kinds in from_all(group, (sizes, kinds)):
        sizes.update(others_sizes)
        kinds.update(others_kinds)
    targets = _dealt(layouts, staying, training.in_nodes)
    plan = make_plan(layouts, targets, sizes)
    rooms: moving.Parts = {
        key: [
            (chunk, torch.empty(chunk.sizes, dtype=kinds[key], device=training.device))
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


def _dealt(
    layouts: Sequence[Layout], staying: Mapping[int, tuple[int, int]], in_nodes: bool
) -> list[dict[str, list[Chunk]]]:
    """What each rank of the old group takes of what only leavers hold: what it needs in the next
    one, and its turn of the rest.
    """
    dealt: list[dict[str, list[Chunk]]] = [{} for _ in layouts]
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
                if in_nodes or not remaining:
                    break
                needed = _next_part(boxes, new_rank, new_size)
                if needed is None:
                    continue
                taken = [c for box in remaining if (c := box.common(needed)) is not None]
                if taken:
                    dealt[rank].setdefault(key, []).extend(taken)
                    remaining = [part for box in remaining for part in box.without(needed)]
            for box in remaining:
                taker = list(staying)[turn % len(staying)]
                turn += 1
                dealt[taker].setdefault(key, []).append(box)
    return dealt


def _next_part(boxes: list[Chunk], part: int, parts: int) -> Chunk | None:
    """The box of the next layout, by the dimension in which these boxes differ."""
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


def share_shards(training: ShardedTraining, group: Group, shards: int) -> None:
    """Have every rank hold its shards of the newest state that is whole, cut into ``shards``;
    without any, the snapshot's or what the script begins with.

    Raises what :meth:`Group.wait` raises, StateError, SnapshotError or ElasticError.
    """
    table: list[standing.ShardStanding] = from_all(group, training.place_in_shards())
    late = _catch_up(training, table)
    with training.taken_apart_once():
        complete_state = _newest_whole(training, group, table)
    module = training.model.sharded(training.meshes.of(group.place, shards))
    undo = exchange_parameters(training.optimizer, training.model.module, module)
    if complete_state is None:
        _begin_anew(training, group, module, table)
        return
    version, description, before, _ = complete_state
    old = training.model.module
    newest = max((one.live for one in table if one.live is not None), default=None)
    goes_back = version != newest
    try:
        _fill(training, group, module, complete_state, late, goes_back)
    except BaseException:
        undo()
        raise
    if goes_back and group.place.rank == 0 and newest is not None:
        report.tell(
            f"Shards were lost with their nodes. The run goes on from the copies of step "
            f"{version.steps}, {newest.steps - version.steps} steps back; the samples of those "
            "steps are drawn again."
        )
    training.goes_on(module, description, group)
    # Who was alone has no copies, or old ones: it keeps what it had until there are new ones.
    alone = sum(one.live == version for one in table) == 1
    reached(FaultPoint.SHARDS_FILLED)
    try:
        group.agree()
        if alone:
            training.keep_copies()
            group.agree()
    except BaseException:
        # Who knows that all have theirs has dropped what it had; who does not know keeps both.
        training.extra = before
        raise
    reached(FaultPoint.SHARDS_DROPPED)
    del before, complete_state
    release(old)
    if not alone:
        training.keep_copies()


def _catch_up(training: ShardedTraining, table: Sequence[standing.ShardStanding]) -> bool:
    """Make the update that others have made with gradients that this process has, too. Returns
    whether it did.
    """
    mine, live = training.version, [one.live for one in table if one.live is not None]
    if mine is None or not max(live).follows(mine) or not training.place_in_shards().pending:
        return False
    training.catch_up(max(live))
    return True


def _newest_whole(
    training: ShardedTraining, group: Group, table: Sequence[standing.ShardStanding]
) -> CompleteState | None:
    rank = group.place.rank
    for version in standing.candidates(table):
        source = standing.source_of(table, version)
        has = table[source].live == version or version in table[source].copies
        text = training.description(version) if rank == source and has else b""
        description = pickle.loads(from_one(group, source, text))
        whole = {
            key: [Chunk((0,) * len(shape), tuple(shape))]
            for key, (shape, _) in description["shapes"].items()
        }
        for copies_too in standing.holdings(table, version):
            parts = training.parts_at(version, copies_too)
            layouts: list[Layout] = from_all(group, moving.layout_of(parts))
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
    """Have ``module``, and the optimizer, hold ``complete_state``; all else, too, where it does not
    already.
    """
    version, description, parts, layouts = complete_state
    objects: dict[str, Any] = {MODEL: module, OPTIMIZER: training.optimizer}
    if late or training.version != version:
        objects.update(training.others)
    training.moved_bytes = 0

    def read(rooms: dict[str, Any]) -> None:
        targets = moving.parts_of(rooms)
        target_layouts: list[Layout] = from_all(group, moving.layout_of(targets))
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
        set_switches(module, description["switches"])
        for name, buffer in named_buffers(module).items():
            if name in description["buffers"]:
                buffer.copy_(description["buffers"][name])
    if not training.has_state or goes_back:
        rng.load(description["rng"])


def _begin_anew(
    training: ShardedTraining,
    group: Group,
    module: torch.nn.Module,
    table: Sequence[standing.ShardStanding],
) -> None:
    lost = any(one.live is not None for one in table)
    source = next((rank for rank, one in enumerate(table) if one.live is not None), 0)
    mine = training.new_history(), rng.state(), training.switches()
    name, random, switches = pickle.loads(from_one(group, source, pickle.dumps(mine)))
    if switches is not None:
        set_switches(module, switches)
    before, old = training.steps, training.model.module
    restored = training.begins_anew(module, group, name)
    tensors = named_buffers(module)
    if restored:  # all but the buffers that no snapshot has
        snapshot_names = saved_names(module)
        tensors = {n: b for n, b in tensors.items() if n not in snapshot_names}
        random = rng.state()
    else:
        tensors.update(named_parameters(module))
        rng.load(random)
    if tensors:
        _take_over_numbers(tensors, training.model.whole())
    if restored:
        rng.load(random)
    training.has_state = True
    if lost and group.place.rank == 0:
        where = f"its snapshot, step {training.steps}" if restored else "its beginning"
        report.tell(
            "Shards were lost with their nodes, and no copies of them are left. The run, which "
            f"was at step {before}, goes on from {where}."
        )
    group.agree()
    release(old)
    training.keep_copies()


def _take_over_numbers(tensors: Mapping[str, Any], whole: torch.nn.Module) -> None:
    """The numbers of a whole model into the shards of ``tensors``, by name."""
    numbers = {**named_parameters(whole), **named_buffers(whole)}
    with torch.no_grad():
        for name, tensor in tensors.items():
            full = numbers[name].detach()
            whole_box = Chunk((0,) * full.ndim, tuple(full.shape))
            for box, local in moving.parts_of({name: tensor})[name]:
                local.copy_(full[box.within(whole_box)])
