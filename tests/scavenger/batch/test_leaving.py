"""Which leases have to leave because of what is planned for their node."""

import pytest

from scavenger.batch.lease_ender import must_leave
from scavenger.batch.rules import NodeFacts
from scavenger.interface import Lease, LeaseState

NOW = 1000.0


def leaves(state=LeaseState.RUNNING, **facts):
    lease = Lease("l1", "1", state, "n1")
    node = NodeFacts("n1", "job-exclusive", False, **facts)
    return must_leave([lease], {"n1": node}, 60.0, NOW).get("l1")


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({}, None),
        ({"reserved_from": NOW + 61.0}, None),
        ({"reserved_from": NOW + 59.0}, "a reservation of its node begins in 59 s"),
        ({"reserved": "reservation M1 has it"}, "its node is wanted: reservation M1 has it"),
        ({"drained": "it is offline"}, "its node is wanted: it is offline"),
        ({"trouble": "it is down"}, None),  # nobody could leave it
        ({"trouble": "its load is too high for jobs"}, None),  # which may be our own doing
        ({"planned": True, "planned_at": NOW + 5.0}, None),  # that job preempts
    ],
)
def test_who_must_leave(facts, why):
    assert leaves(**facts) == why


def test_only_running_leases_of_known_nodes_are_asked():
    assert leaves(LeaseState.PENDING, drained="it is offline") is None
    assert must_leave([Lease("l1", "1", LeaseState.RUNNING, "gone")], {}, 60.0, NOW) == {}


@pytest.mark.parametrize(
    ("remaining_s", "why"),
    [
        (None, None),
        (11.0, None),
        (10.0, "leases are allowed for 10 s from now"),
        (0.0, "no leases are allowed at this hour"),
    ],
)
def test_leases_leave_by_the_end_of_the_hours(remaining_s, why):
    lease = Lease("l1", "1", LeaseState.RUNNING, "n1")
    node = NodeFacts("n1", "allocated", False)
    leave = must_leave(
        [lease], {"n1": node}, 60.0, NOW, hours_remaining_s=remaining_s, grace_s=10.0
    )
    assert leave.get("l1") == why
