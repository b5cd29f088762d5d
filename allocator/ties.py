"""Whom equal bids serve: who runs already, then who was first.

Decides between plans that are worth the same. Every exact solver picks any one of them; here nodes
go to the earlier of two jobs whose bids are equal for them, and nothing is moved for nothing. Alike
jobs are sorted out before, in :func:`allocator.table.assign`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from allocator.allocation import used
from allocator.bids import NO_SEAT, Bid, Seat, SizeValues
from allocator.table import Floats, Ints, Mask

_SAME = 1e-12
"""Values that differ by this share of them are the same: rounding of double precision."""
_NEARLY = 1e-9
"""The same after a seat was handed on up to a thousand times."""


def keep(
    bids: Sequence[Bid], capacity: Mapping[str, int], sizes: Mapping[str, Seat]
) -> dict[str, Seat]:
    """What the jobs have now where that is worth as much as ``sizes`` and leaves out no must-run
    job that has a seat there; else ``sizes``.

    Args:
        bids: of all jobs.
        capacity: node class -> nodes.
        sizes: job -> (node class, size), a feasible plan.
    """
    held = {bid.job: bid.held for bid in bids if bid.held[1]}
    changed = [bid for bid in bids if bid.held != sizes.get(bid.job, NO_SEAT)]
    before = [bid.value(*bid.held) for bid in changed]
    after = [bid.value(*sizes.get(bid.job, NO_SEAT)) or 0.0 for bid in changed]
    known = [value for value in before if value is not None and value > -math.inf]
    fits = all(nodes <= capacity.get(name, 0) for name, nodes in used(held).items())
    rounding = _SAME * sum(map(abs, after))
    if fits and len(known) == len(changed) and sum(known) >= sum(after) - rounding:
        return held
    return dict(sizes)


def in_order(bids: Sequence[Bid], sizes: Mapping[str, Seat]) -> dict[str, Seat]:
    """``sizes`` with each seat of a newcomer given to the first job that waits and is worth as much
    in it; jobs in the order of ``bids``.

    A job that runs is not asked to give way, and one that would have to stop comes before all that
    wait.

    Args:
        bids: of all jobs, in the order in which they came.
        sizes: job -> (node class, size).
    """
    found = dict(sizes)
    new = [place for place, bid in enumerate(bids) if bid.job in found and not bid.held[1]]
    waiting = [(not b.held[1], place) for place, b in enumerate(bids) if b.job not in found]
    if new and waiting:
        _exchange(bids, found, np.array(new), sorted(waiting))
    return {bid.job: found[bid.job] for bid in bids if bid.job in found}


def _exchange(
    bids: Sequence[Bid], found: dict[str, Seat], owner: Ints, waiting: list[tuple[bool, int]]
) -> None:
    """Hand the seats of ``owner`` (places in ``bids``) on to those of ``waiting`` (whether it does
    not run, place; a heap) whom they serve as well, each that of who came last.
    """
    seats = [found[bids[place].job] for place in owner]
    size = np.array([nodes for _, nodes in seats])
    of_class = {name: np.array([name == c for c, _ in seats]) for name in dict(seats)}
    forced = np.array([bids[place].must_run for place in owner])
    worth = [bids[place].value(*seat) or 0.0 for place, seat in zip(owner, seats, strict=True)]
    idle_values = np.array([bids[place].idle_value for place in owner])
    gain = np.array(worth) - np.where(forced, 0.0, idle_values)
    waiting = _tempted(
        bids, [w for w in waiting if w < (True, owner.max())], of_class, size, forced, gain
    )
    in_vain: set[tuple[float, tuple[tuple[str, SizeValues], ...]]] = set()
    while waiting and waiting[0] < (True, owner.max()):
        idle, place = heappop(waiting)
        bid = bids[place]
        kind = (bid.idle_value, tuple(bid.options.items()))
        if kind in in_vain:
            continue
        gains = _gains([bid], of_class, size)[0]
        same = (owner >= 0) & (forced == bid.must_run) & (gains >= gain - _SAME * np.abs(gain))
        seat = int(np.argmax(np.where(same, owner, -1)))
        last = int(owner[seat])
        if not same[seat] or (idle and last < place):
            in_vain.add(kind)  # nor will those like it that come later find anything
            continue
        found[bid.job] = found.pop(bids[last].job)
        owner[seat], gain[seat] = place if idle else -1, gains[seat]
        heappush(waiting, (True, last))


def _tempted(
    bids: Sequence[Bid],
    waiting: list[tuple[bool, int]],
    of_class: Mapping[str, Mask],
    size: Ints,
    forced: Mask,
    gain: Floats,
) -> list[tuple[bool, int]]:
    """Those of ``waiting`` whom a seat serves as well as its owner, as good as always nobody. Seats
    that are handed on keep their gain but for rounding, so the others need not be asked again.
    """
    rows = [bids[place] for _, place in waiting]
    alike = forced == np.array([bid.must_run for bid in rows])[:, None]
    as_good = _gains(rows, of_class, size) >= gain - _NEARLY * np.abs(gain)
    return [who for who, yes in zip(waiting, (alike & as_good).any(axis=1), strict=True) if yes]


def _gains(bids: Sequence[Bid], of_class: Mapping[str, Mask], size: Ints) -> Floats:
    """What each seat (column) is worth to each job (row) beyond having nothing; -inf where its bid
    does not offer it.
    """
    gains = np.full((len(bids), len(size)), -np.inf)
    alike: dict[tuple[str, int], list[int]] = {}  # rows whose bids share an array of sizes
    for row, bid in enumerate(bids):
        for name, options in bid.options.items():
            if name in of_class and len(options.sizes):
                alike.setdefault((name, id(options.sizes)), []).append(row)
    for (name, _), rows in alike.items():
        sizes = bids[rows[0]].options[name].sizes
        at = np.minimum(np.searchsorted(sizes, size), len(sizes) - 1)
        offered = np.flatnonzero(of_class[name] & (sizes[at] == size))
        values = [bids[row].options[name].values[at[offered]] for row in rows]
        gains[np.array(rows)[:, None], offered] = values
    idle = np.array([0.0 if bid.must_run else bid.idle_value for bid in bids], np.float64)
    worth: NDArray[np.float64] = gains - idle[:, None]
    return worth
