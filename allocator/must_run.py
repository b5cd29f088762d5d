"""Must-run jobs: how many of them fit, regardless of value.

Decides how many must-run jobs the plan has to drop, and returns one assignment that drops no more.
It does not decide which ones: the search (:mod:`allocator.search`) chooses them by value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from allocator.bids import Assignment, Bid
from allocator.highs import LinearProgram, maximise


def fewest_drops(
    bids: Sequence[Bid], capacity: Mapping[str, int], *, time_limit_s: float
) -> tuple[int, dict[str, Assignment]]:
    """Place as many must-run jobs as possible, each at its smallest size.

    First fit, with the jobs that can use the fewest classes and then the smallest jobs first, is
    optimal on one class of nodes. On several classes, if it leaves a job out, an assignment MILP in
    HiGHS decides.

    Args:
        bids: of all jobs; those that do not have to run are ignored.
        capacity: node class -> nodes.
        time_limit_s: of the MILP, seconds. Its incumbent at that time is accepted.

    Returns:
        (the number of jobs to drop, the assignments of the others). Jobs that would not fit on the
        empty machine are in neither.
    """
    options: dict[str, list[tuple[int, str]]] = {}
    for bid in bids:
        if bid.must_run:
            fitting = [
                (int(o.sizes[0]), c)
                for c, o in bid.options.items()
                if len(o.sizes) and o.sizes[0] <= capacity.get(c, 0)
            ]
            if fitting:
                options[bid.job] = sorted(fitting)
    free = {name: int(nodes) for name, nodes in capacity.items()}
    placed: dict[str, Assignment] = {}
    for job in sorted(options, key=lambda job: (len(options[job]), options[job])):
        first_fit = next(((c, k) for k, c in options[job] if k <= free[c]), None)
        if first_fit:
            placed[job] = first_fit
            free[first_fit[0]] -= first_fit[1]
    if len(placed) < len(options) and any(len(classes) > 1 for classes in options.values()):
        optimal = _by_milp(options, capacity, time_limit_s)
        if len(optimal) > len(placed):
            placed = optimal
    return len(options) - len(placed), placed


def _by_milp(
    options: Mapping[str, list[tuple[int, str]]], capacity: Mapping[str, int], time_limit_s: float
) -> dict[str, Assignment]:
    """Return an assignment that places the maximum number of jobs. ``options``: job -> its
    (smallest size, class) on each class.
    """
    jobs, classes = list(options), list(capacity)
    triples = [(j, k, classes.index(c)) for j, job in enumerate(jobs) for k, c in options[job]]
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
    solution = maximise(model, time_limit_s=time_limit_s, absolute_gap=0.999)
    if solution.x is None:
        return {}
    return {
        jobs[j]: (classes[c], k)
        for (j, k, c), x in zip(triples, solution.x, strict=True)
        if x > 0.5
    }
