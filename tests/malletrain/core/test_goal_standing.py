"""Which deadlines in danger an operator can do anything about."""

from types import SimpleNamespace

import pytest

from malletrain.core.goal_record import more_nodes_help
from malletrain.core.goals import GoalStanding, OwnerGoals

NOW, HOUR = 1000.0, 3600.0


def record(
    nodes=1, standing=GoalStanding.AT_RISK, halted=False, remaining_work=4 * HOUR, due=NOW + HOUR
):
    """A job of 1 to 8 nodes that does a sample a second on each."""
    return SimpleNamespace(
        goals=OwnerGoals(due, None, remaining_work),
        job=SimpleNamespace(halted=halted, nodes=("n",) * nodes),
        standing=standing,
        remaining_work=remaining_work,
        sizes=lambda: list(range(1, 9)),
        rates=lambda: [float(k) for k in range(9)],
    )


@pytest.mark.parametrize(
    ("fields", "helps"),
    [
        ({}, True),
        ({"standing": GoalStanding.INFEASIBLE}, True),  # by the nodes that there were of late
        ({"remaining_work": None}, True),
        ({"standing": GoalStanding.ON_TRACK}, False),
        ({"standing": GoalStanding.MISSED}, False),
        ({"standing": None}, False),
        ({"nodes": 8}, False),  # it has all it can use
        ({"remaining_work": 9 * HOUR}, False),  # eight nodes from now on do eight hours' work
        ({"halted": True}, False),  # its budget is spent: the owner's turn
        ({"due": None}, False),  # a budget in danger, which more nodes do not help
        ({"due": NOW}, False),
    ],
)
def test_more_nodes_help(fields, helps):
    assert more_nodes_help(record(**fields), NOW) is helps
