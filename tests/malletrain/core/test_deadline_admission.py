"""Which deadlines are admitted: as many as any choice could, where the nodes do not change."""

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from malletrain.core.forecast import DeadlineDemand, admit, node_time

NODES = 4.0
PAST = np.full(50, NODES)


def feasible(chosen):
    """Served by deadline, each is done in time."""
    used = 0.0
    for demand in sorted(chosen, key=lambda d: d.within_s):
        used += demand.node_s
        if used > NODES * demand.within_s * (1 + 1e-9):
            return False
    return True


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 100)), max_size=7))
def test_as_many_are_admitted_as_any_choice_could(pairs):
    demands = [DeadlineDemand(f"j{k}", 100.0 * w, 100.0 * n) for k, (w, n) in enumerate(pairs)]
    admitted = admit(demands, PAST, NODES)
    assert feasible([d for d in demands if d.job in admitted])
    most = max(
        n
        for n in range(len(demands) + 1)
        if any(feasible(chosen) for chosen in combinations(demands, n))
    )
    assert len(admitted) == most


def test_the_earliest_come_first_and_the_one_that_needs_most_is_dropped():
    demands = [
        DeadlineDemand("late", 900.0, 100.0),
        DeadlineDemand("big", 500.0, 1900.0),
        DeadlineDemand("a", 400.0, 400.0),
    ]
    assert admit(demands, PAST, NODES) == {"a": 0, "late": 1}


def test_an_admitted_deadline_is_preferred_to_a_new_one():
    old, new = (
        DeadlineDemand("old", 500.0, 1200.0, admitted=True),
        DeadlineDemand("new", 500.0, 1000.0),
    )
    assert admit([old, new], PAST, NODES) == {"old": 0}


def test_node_time_of_a_changing_machine_is_a_low_estimate():
    past = np.tile([8.0, 0.0], 200)
    (soon, later) = node_time(past, 8.0, [300.0, 3000.0]).tolist()
    assert soon == 8.0 * 300.0
    assert later == 8.0 * 1500.0
    assert node_time(past, 0.0, [300.0]).tolist() == [0.0]
