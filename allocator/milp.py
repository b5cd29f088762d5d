"""How many nodes of which class each job gets: the MILP of section 7 of the design, exact, in HiGHS.

Decides sizes only; which nodes follows in :mod:`allocator.placement`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from allocator.allocation import Allocation, relative_gap, worth
from allocator.baselines import fcfs
from allocator.bids import Bid, check
from allocator.highs import Model, maximise

__all__ = ["Allocation", "solve"]


def solve(
    bids: Sequence[Bid],
    capacity: Mapping[str, int],
    *,
    time_limit_s: float = 2.0,
    gap: float = 0.0,
    warm: Allocation | None = None,
) -> Allocation:
    """The plan that maximises the sum of the bids' values within ``capacity`` (node class -> nodes)."""
    began = time.perf_counter()
    check(bids, capacity)
    classes = [name for name, nodes in capacity.items() if nodes > 0]
    rows: list[tuple[int, int, int, float]] = []
    reach = sum(float(np.ptp(np.append(o.values, 0.0))) for bid in bids for o in bid.options.values()) + 1.0
    for j, bid in enumerate(bids):
        rows.append((j, -1, 0, -2 * reach if bid.must_run else bid.idle_value))
        for c, name in enumerate(classes):
            options = bid.options.get(name)
            if options is not None:
                fits = options.sizes <= capacity[name]
                rows += [(j, c, int(k), float(v)) for k, v in zip(options.sizes[fits], options.values[fits], strict=True)]
    sizes: dict[str, tuple[str, int]] = {}
    bound = 0.0
    status = "optimal"
    if rows:
        scale = max(1e-300, max(abs(r[3]) for r in rows))
        starts, index, coefficients = [0], [], []
        for j, c, k, _ in rows:
            index.append(j)
            coefficients.append(1.0)
            if c >= 0:
                index.append(len(bids) + c)
                coefficients.append(float(k))
            starts.append(len(index))
        ones, n = np.ones(len(bids)), len(rows)
        model = Model(
            np.array([r[3] / scale for r in rows]),
            np.zeros(n),
            np.ones(n),
            np.ones(n, np.bool_),
            np.array(starts),
            np.array(index),
            np.array(coefficients),
            np.concatenate([ones, np.full(len(classes), -np.inf)]),
            np.concatenate([ones, [float(capacity[name]) for name in classes]]),
        )
        answer = maximise(model, time_limit_s=time_limit_s, gap=gap)
        bound = answer.bound * scale
        status = "optimal" if answer.optimal else "time_limit"
        if answer.x is None:
            sizes = dict(fcfs(bids, capacity).sizes)
        else:
            sizes = {bids[r[0]].job: (classes[r[1]], r[2]) for r, x in zip(rows, answer.x, strict=True) if x > 0.5 and r[2]}
    objective, dropped = worth(sizes, bids)
    bound = objective if status == "optimal" else max(objective, bound)
    return Allocation(sizes, objective, bound, relative_gap(objective, bound), status, time.perf_counter() - began, dropped)
