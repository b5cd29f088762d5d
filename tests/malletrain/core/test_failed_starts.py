"""Which failed starts of agents pause the leases of a user, for how long, and what is said."""

import pytest

from malletrain.core.failed_starts import MAX_FAILURE_AGE_S, FailedStarts

NO_MODULE = "its command failed; it printed last: No module named malletrain"
A, B = ("failed", "n1"), ("failed", "n2")
A_OK, B_OK = ("started", "n1"), ("started", "n2")


def after(happened, owner="", every_s=1000.0):
    """The starts after this has happened, and the time of the last of it."""
    starts, now = FailedStarts(max_pause_s=300.0), 0.0
    for k, (what, node) in enumerate(happened):
        now = every_s * k
        if what == "failed":
            starts.failed(owner, node, NO_MODULE, now)
        else:
            starts.started(owner, node)
    return starts, now


@pytest.mark.parametrize(
    ("happened", "pause_s"),
    [
        ([], 0),
        ([A], 0),
        ([A, B], 0),
        ([A, B, A], 20),
        ([A, B, A, B], 40),
        ([A, B, A, B, A], 80),
        ([A, B] * 10, 300),
        ([A] * 20, 0),  # one bad node says nothing about the others
        ([A, A, B], 20),
        ([A, B, A, A_OK], 0),
        ([A, B, A, B_OK, B], 0),  # a row begins anew
        ([A, B, A, B_OK, B, A, B], 20),
    ],
)
def test_how_long_no_lease_is_requested(happened, pause_s):
    starts, now = after(happened)
    assert starts.pause_s("", now) == pause_s
    assert starts.pause_s("", now + pause_s) == 0
    assert starts.pause_s("ann", now) == 0, "others may start"


def test_leases_that_fail_together_count_once():
    assert after([A, B, A, B], every_s=0.3)[0].pause_s("", 0.9) == 0


@pytest.mark.parametrize(
    ("happened", "in_a_row", "nodes"),
    [
        ([A, B, A], 3, ["n2", "n1"]),
        ([A, B, B_OK], 0, ["n1"]),
        ([A, A_OK], 0, []),
        ([A, B, B_OK, A], 1, ["n1"]),
    ],
)
def test_what_is_reported(happened, in_a_row, nodes):
    starts, now = after(happened, every_s=10.0)
    assert [failure.node for failure in starts.recent("", now)] == nodes
    assert starts.in_a_row("", now) == in_a_row


def test_an_old_failure_is_not_reported():
    starts, now = after([A])
    assert starts.sentence("", now + MAX_FAILURE_AGE_S - 1)
    assert not starts.sentence("", now + MAX_FAILURE_AGE_S)
    assert starts.last("", now + MAX_FAILURE_AGE_S) is None
    assert starts.in_a_row("", now + MAX_FAILURE_AGE_S) == 0


@pytest.mark.parametrize(
    ("owner", "happened", "sentence"),
    [
        (
            "",
            [A],
            f"Leases start on n1, and no agent reports from them. The last one: {NO_MODULE}.",
        ),
        (
            "ann",
            [A, B, A],
            "Leases as ann start on 2 nodes (n[1-2]), and no agent reports from them. "
            f"The last one on n1: {NO_MODULE}. 3 failed in a row; the next is requested in 20 s.",
        ),
        (
            "",
            [("failed", f"n{k}") for k in range(5)],
            "Leases start on 5 nodes (n[0-4]), and no agent reports from them. "
            f"The last one on n4: {NO_MODULE}. 5 failed in a row; the next is requested in 80 s.",
        ),
    ],
)
def test_the_sentence(owner, happened, sentence):
    starts, now = after(happened, owner, every_s=100.0)
    assert starts.sentence(owner, now) == sentence
