"""The plan of a change, with ranks that are lists in one process: whatever the layouts, every
element arrives once and what moves is what the plan says.
"""

from math import prod

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from malletrain.elastic.sharded import moving
from malletrain.elastic.sharded.assignment import StatePart, best_order
from malletrain.elastic.sharded.chunks import Chunk, share
from malletrain.elastic.sharded.transfer_plan import IncompleteStateError, make_plan


def laid_out(shapes, parts, copies=1):
    """What each rank holds: each tensor cut along its dimension, ``copies`` times over. Dimension
    None: whole on every rank.
    """
    ranks = []
    for rank in range(parts * copies):
        layout = {}
        for key, (shape, dim) in shapes.items():
            offsets, sizes = [0] * len(shape), list(shape)
            if dim is not None:
                offsets[dim], sizes[dim] = share(shape[dim], parts, rank % parts)
            layout[key] = [Chunk(tuple(offsets), tuple(sizes))] if prod(sizes) else []
        ranks.append(layout)
    return ranks


def parts_of(shapes, layout, whole=None):
    """What one rank holds, filled from ``whole`` or with -1."""
    made = {}
    for key, chunks in layout.items():
        full = Chunk((0,) * len(shapes[key][0]), tuple(shapes[key][0]))
        made[key] = [
            (
                chunk,
                torch.full(chunk.sizes, -1.0)
                if whole is None
                else whole[key][chunk.within(full)].clone(),
            )
            for chunk in chunks
        ]
    return made


def box(parts, piece):
    """The part of one of the tensors that ``piece`` is of."""
    (match,) = [(c, t) for c, t in parts[piece.key] if c.common(piece.chunk) == piece.chunk]
    return match[1][piece.chunk.within(match[0])]


def carry_out(shapes, old, new, plan):
    """Do what the plan says, with the messages that the ranks would exchange. Return the bytes
    that went between different ranks.
    """
    whole = {
        key: torch.arange(prod(shape), dtype=torch.float32).reshape(shape) + 1000 * i
        for i, (key, (shape, _)) in enumerate(shapes.items())
    }
    sources = [parts_of(shapes, layout, whole) for layout in old]
    targets = [parts_of(shapes, layout) for layout in new]
    times = [parts_of(shapes, layout) for layout in new]
    for piece in plan.copies:
        box(targets[piece.target], piece).copy_(box(sources[piece.source], piece))
    sent, under_way = 0, {}
    for rank in range(len(new)):
        for one in moving.bundles(rank, plan, sources[rank], targets[rank]):
            ends = under_way.setdefault((one.source, one.target, one.turn), {})
            ends["out" if one.source == rank else "in"] = one
    for ends in under_way.values():
        message, room = ends["out"].packed(), ends["in"].room()
        assert message.nbytes == room.nbytes == ends["in"].size
        sent += message.nbytes
        room.reshape(-1).view(torch.uint8).copy_(message.reshape(-1).view(torch.uint8))
        ends["in"].unpack(room)
    for piece in (*plan.copies, *plan.moves):
        box(times[piece.target], piece).add_(1)
    for parts, expected in zip(targets, new, strict=True):
        correct = parts_of(shapes, expected, whole)
        for key, boxes in correct.items():
            for (_, ours), (_, theirs) in zip(parts[key], boxes, strict=True):
                assert torch.equal(ours, theirs)
    assert all((t == 0).all() for rank in times for boxes in rank.values() for _, t in boxes)
    return sent


def four(shapes):
    return dict.fromkeys(shapes, 4)


def changed(shapes, old, new):
    """The plan where all old ranks are there, with as many joiners as are needed."""
    holders = [*old, *[{}] * (len(new) - len(old))]
    targets = [*new, *[{}] * (len(old) - len(new))]
    plan = make_plan(holders, targets, four(shapes), piece_bytes=64)
    assert all(piece.chunk.elements <= 16 for piece in plan.moves)
    moved = carry_out(shapes, holders, targets, plan)
    assert moved == plan.moved_bytes(four(shapes))
    return moved


def lacking(old, new):
    """Bytes that new ranks need and do not have."""
    total = 0
    for rank, layout in enumerate(new):
        for key, chunks in layout.items():
            for chunk in chunks:
                rest = [chunk]
                for present in old[rank].get(key, []) if rank < len(old) else []:
                    rest = [part for one in rest for part in one.without(present)]
                total += 4 * sum(part.elements for part in rest)
    return total


@st.composite
def states(draw):
    shapes = {}
    for number in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(1, 9), max_size=3))
        dims = [None, *range(len(shape))]
        shapes[f"t{number}"] = (tuple(shape), draw(st.sampled_from(dims)))
    return shapes


@given(states(), st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.integers(1, 3))
@example({"t": ((3, 2), 0)}, 8, 64, 1, 1)
@example({"t": ((4, 5), 1), "u": ((), None)}, 2, 2, 1, 3)
def test_any_layout_comes_from_any_other(shapes, old_parts, new_parts, old_copies, new_copies):
    old = laid_out(shapes, old_parts, old_copies)
    new = laid_out(shapes, new_parts, new_copies)
    assert changed(shapes, old, new) == lacking(old, new)


@given(states(), states(), st.integers(1, 5), st.integers(1, 5))
def test_a_tensor_may_be_cut_in_another_dimension(shapes, others, old_parts, new_parts):
    after = {
        key: (
            shape,
            others[key][1] if key in others and (others[key][1] or 0) < len(shape) else dim,
        )
        for key, (shape, dim) in shapes.items()
    }
    after = {k: (shape, dim if shape else None) for k, (shape, dim) in after.items()}
    old, new = laid_out(shapes, old_parts), laid_out(after, new_parts)
    assert changed(shapes, old, new) == lacking(old, new)


def test_4_to_6_ranks():
    shapes = {"t": ((1200,), 0)}
    old, new = laid_out(shapes, 4), laid_out(shapes, 6)
    assert changed(shapes, old, new) == 0.75 * 4800
    order = best_order([*(StatePart(part, 4, ((1200, 4),)) for part in range(4)), None, None])
    best = [new[rank] for rank in order]
    assert changed(shapes, old, best) == 4800 / 3


def test_newcomers_of_a_replicated_state_take_turns_with_its_holders():
    """Three nodes of two ranks, of which one is new, and then two: each rank's shard comes from
    the same place of another node, and no link has more than its part.
    """
    shapes = {f"t{i}": ((8,), 0) for i in range(4)}
    for old_nodes, new_nodes in ((2, 3), (2, 4)):
        old, new = laid_out(shapes, 2, old_nodes), laid_out(shapes, 2, new_nodes)
        holders = [*old, *[{}] * (len(new) - len(old))]
        plan = make_plan(holders, new, four(shapes))
        assert {piece.target for piece in plan.moves} == set(range(len(old), len(new)))
        assert all(piece.source % 2 == piece.target % 2 for piece in plan.moves)
    sent = [sum(p.source == rank for p in plan.moves) for rank in range(4)]
    assert sent == [4, 4, 4, 4]


def test_links_work_at_the_same_time():
    shapes = {"t": ((8, 16), 0)}
    holders = [*laid_out(shapes, 2), {}, {}]
    targets = [{}, {}, *laid_out(shapes, 2)]
    plan = make_plan(holders, targets, four(shapes), piece_bytes=64)
    assert [(p.source, p.target) for p in plan.moves[:4]] == [(0, 2), (1, 3)] * 2


def test_what_nobody_holds_is_named():
    shapes = {"weight": ((8,), 0)}
    with pytest.raises(IncompleteStateError, match=r"Nobody holds weight from \(4,\) on, \(4,\)"):
        make_plan(laid_out(shapes, 2)[:1], laid_out(shapes, 1), four(shapes))
