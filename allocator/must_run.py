"""Must-run jobs: how many of them there is room for, before anything else counts.

Decides how many must-run jobs have to be dropped, and gives one plan that drops no more. Which ones
are dropped is decided by value, later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from allocator.bids import Bid
from allocator.highs import LinearProgram, maximise


def seats(
    bids: Sequence[Bid], capacity: Mapping[str, int], *, time_limit_s: float
) -> tuple[int, dict[str, tuple[str, int]]]:
    """``(jobs to drop, smallest seats of the others)`` for the must-run bids that fit the machine
    at all.

    A job needs least nodes at its smallest size, so only those matter. Smallest jobs first is best
    on one class; on several it is tried first, and an assignment MILP in HiGHS decides where it
    leaves a job out (a plan found before ``time_limit_s`` is taken as it is).
    """
    needs: dict[str, list[tuple[int, str]]] = {}
    for bid in bids:
        if bid.must_run:
            homes = [
                (int(o.sizes[0]), c)
                for c, o in bid.options.items()
                if len(o.sizes) and o.sizes[0] <= capacity.get(c, 0)
            ]
            if homes:
                needs[bid.job] = sorted(homes)
    left = {name: int(nodes) for name, nodes in capacity.items()}
    seated: dict[str, tuple[str, int]] = {}
    for job in sorted(needs, key=lambda job: (len(needs[job]), needs[job])):
        home = next(((c, k) for k, c in needs[job] if k <= left[c]), None)
        if home:
            seated[job] = home
            left[home[0]] -= home[1]
    if len(seated) < len(needs) and any(len(homes) > 1 for homes in needs.values()):
        better = _assignment(needs, capacity, time_limit_s)
        if len(better) > len(seated):
            seated = better
    return len(needs) - len(seated), seated


def _assignment(
    needs: Mapping[str, list[tuple[int, str]]], capacity: Mapping[str, int], time_limit_s: float
) -> dict[str, tuple[str, int]]:
    jobs, classes = list(needs), list(capacity)
    triples = [(j, k, classes.index(c)) for j, job in enumerate(jobs) for k, c in needs[job]]
    n = len(triples)
    rows = np.array([row for j, _, c in triples for row in (j, len(jobs) + c)])
    coefficients = np.array([x for _, k, _ in triples for x in (1.0, float(k))])
    model = LinearProgram(
        cost=np.ones(n),
        lower=np.zeros(n),
        upper=np.ones(n),
        integral=np.ones(n, np.bool_),
        starts=2 * np.arange(n + 1),
        rows=rows,
        coefficients=coefficients,
        row_lower=np.full(len(jobs) + len(classes), -np.inf),
        row_upper=np.array([1.0] * len(jobs) + [float(capacity[c]) for c in classes]),
    )
    answer = maximise(model, time_limit_s=time_limit_s, absolute_gap=0.999)
    if answer.x is None:
        return {}
    return {
        jobs[j]: (classes[c], k) for (j, k, c), x in zip(triples, answer.x, strict=True) if x > 0.5
    }
