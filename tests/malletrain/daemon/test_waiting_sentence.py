"""What a waiting job is said to wait for."""

import pytest

from malletrain.daemon.api.job_views import missing_nodes_clause, pending_leases_clause


@pytest.mark.parametrize(
    ("needed", "present", "coming", "words"),
    [
        (1, 0, 0, "needs 1 node, none is held"),
        (1, 0, 6, "needs 1 node, none is held, 6 warm up"),
        (4, 2, 1, "needs 4 nodes at least, 2 are held, 1 warms up"),
        (2, 1, 0, "needs 2 nodes at least, 1 is held"),
    ],
)
def test_what_a_job_lacks_is_said_in_numbers(needed, present, coming, words):
    assert missing_nodes_clause(needed, present, coming) == words


@pytest.mark.parametrize(
    ("alone", "words"),
    [
        ({}, "needs 1 node, none is held"),
        (
            {"n3": 89.2},
            "needs 1 node, none is held; n3 is left alone after failures, for 90 s more",
        ),
        (
            {"n3": 240.0, "n1": 60.0},
            "needs 1 node, none is held; 2 idle nodes are left alone after failures, the first for "
            "1 min more",
        ),
    ],
)
def test_idle_nodes_that_are_left_alone_are_said(alone, words):
    assert missing_nodes_clause(1, 0, 0, alone) == words


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        ([], ""),
        (["MaxMemPerLimit"], "; 1 lease waits in the main scheduler (MaxMemPerLimit)"),
        (["Priority", "", "Priority"], "; 3 leases wait in the main scheduler (Priority)"),
        (["None"], "; 1 lease waits in the main scheduler (no reason given)"),
    ],
)
def test_leases_that_wait_are_said_with_the_schedulers_reason(reasons, words):
    assert pending_leases_clause(reasons) == words


def test_the_sentence_counts_what_the_owner_counts():
    assert missing_nodes_clause(4, 1, 0, noun="GPUs") == "needs 4 GPUs at least, 1 is held"
    assert missing_nodes_clause(1, 0, 0, noun="slots") == "needs 1 slot, none is held"
