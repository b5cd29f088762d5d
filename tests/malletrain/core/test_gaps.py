"""How long a node is left alone: what `rejected_for` in docs/configuration.md says."""

from __future__ import annotations

import pytest

from malletrain.core.gaps import MAX_FAILURE_AGE_S, FailedStarts, Gaps
from malletrain.core.pools import Pool

NODE, OWNER = "n1", ""


def left_alone_s(gaps: Gaps, now: float) -> float:
    """Seconds until the node may be asked for again, to the second."""
    return next(s for s in range(1000) if gaps.fits(NODE, OWNER, now + s))


def refused(gaps: Gaps, now: float, owner: str = OWNER) -> float:
    """A lease on the node is asked for and comes to nothing."""
    gaps.seen({NODE: (None, "default")}, now)
    gaps.ask({Pool("default", owner): 1}, gaps.open((), (owner,), now), now)
    gaps.refused(NODE, owner, now)
    return left_alone_s(gaps, now)


def test_a_lease_that_comes_to_nothing_is_asked_for_more_and_more_rarely():
    gaps = Gaps(rejected_s=300.0)
    assert [refused(gaps, 1000.0 * k) for k in range(10)] == [
        *(0, 4, 8, 16, 32, 64, 128, 256),
        *(300, 300),
    ]


def test_a_lease_that_comes_up_ends_that():
    gaps = Gaps(rejected_s=300.0)
    for k in range(3):
        refused(gaps, 1000.0 * k)
    gaps.joined(NODE, OWNER)
    assert refused(gaps, 5000.0) == 0


@pytest.mark.parametrize("owner", ["", "ann"])
def test_a_node_on_which_nothing_comes_up_is_left_alone_for_all_of_it(owner):
    gaps = Gaps(rejected_s=300.0)
    gaps.rejected(NODE, owner, 0.0)
    assert left_alone_s(gaps, 0.0) == (0 if owner else 300), "other users may still use it"


def test_leases_that_fail_for_a_week_are_still_requested_at_the_longest_interval():
    gaps, pauses = Gaps(rejected_s=300.0), []
    for k in range(2000):
        refused(gaps, 1000.0 * k, "ann")
        pauses.append(gaps.backing_off_s(1000.0 * k))
    assert pauses[:6] == [0.0, 20.0, 40.0, 80.0, 160.0, 300.0]
    assert pauses[-1] == 300.0


def test_failures_close_together_count_once():
    gaps = Gaps(rejected_s=300.0)
    gaps.seen({"n1": (None, "default"), "n2": (None, "default")}, 0.0)
    gaps.ask({Pool("default", "ann"): 2}, gaps.open((), ("ann",), 0.0), 0.0)
    gaps.refused("n1", "ann", 1.0)
    gaps.refused("n2", "ann", 1.5)
    assert not gaps.backing_off("ann", 1.5)


def fail_everywhere(gaps: Gaps, now: float, failure: str) -> None:
    """Leases on all of n1 and n2 that may be had come to nothing."""
    gaps.seen({"n1": (None, "default"), "n2": (None, "default")}, now)
    requests = gaps.ask({Pool("default", ""): 2}, gaps.open((), ("",), now), now)
    for node in requests.now.get("", ()):
        gaps.refused(node, "", now, failure)


def test_agents_that_start_nowhere_pause_the_leases_of_the_daemons_user():
    gaps, pauses = Gaps(rejected_s=300.0), []
    for k in range(7):
        fail_everywhere(gaps, 1000.0 * k, "No module named malletrain")
        pauses.append(gaps.backing_off_s(1000.0 * k))
    assert pauses == [0, 0, 20, 40, 80, 160, 300]
    assert gaps.backing_off("", 6000.0)
    gaps.joined("n1", "")
    assert not gaps.backing_off("", 6000.0)


def test_leases_that_are_not_granted_pause_no_leases_of_the_daemons_user():
    gaps = Gaps(rejected_s=300.0)
    for k in range(7):
        fail_everywhere(gaps, 1000.0 * k, "")
    assert not gaps.backing_off("", 6000.0)


def test_an_agent_that_fails_long_after_its_lease_was_requested_counts():
    gaps = Gaps(rejected_s=300.0)
    nodes = {"n1": (None, "default"), "n2": (None, "default")}
    gaps.seen(nodes, 0.0)
    gaps.ask({Pool("default", ""): 2}, gaps.open((), ("",), 0.0), 0.0)
    gaps.seen(nodes, 1000.0)
    for node in ("n1", "n2", "n1"):
        gaps.refused(node, "", 1000.0, "No module named malletrain")
    assert gaps.failed_starts.in_a_row("", 1000.0) == 3


SLOTS = [f"c{host}/gpu.{number}" for host in (1, 2, 3) for number in (0, 1)]


@pytest.mark.parametrize(
    ("counts", "room", "now", "later"),
    [
        ({"": 1}, None, {"": SLOTS[:2]}, {}),
        ({"": 2}, None, {"": SLOTS[:2]}, {}),
        ({"": 3}, None, {"": SLOTS[:4]}, {}),
        ({"": 6}, 2, {"": SLOTS[:4]}, {"": 2}),  # one submission for each host
        ({"ann": 1, "bob": 3}, None, {"ann": SLOTS[:2], "bob": SLOTS[2:]}, {}),
    ],
)
def test_slots_of_whole_hosts_are_requested_together(counts, room, now, later):
    gaps = Gaps(whole_host_classes=frozenset({"gpu"}))
    gaps.seen(dict.fromkeys([*SLOTS, "n1"], (None, "gpu")), 0.0, room)
    gaps.over("n1")
    numbers = {Pool("gpu", owner): count for owner, count in counts.items()}
    requests = gaps.ask(numbers, gaps.open((), tuple(counts), 0.0), 0.0)
    assert {owner: list(names) for owner, names in requests.now.items()} == now
    assert {pool.owner: count for pool, count in requests.later.items()} == later


def test_a_slot_that_was_rejected_is_left_out_of_its_host():
    gaps = Gaps(whole_host_classes=frozenset({"gpu"}), rejected_s=300.0)
    gaps.rejected("c1/gpu.1", "", 0.0)
    gaps.seen(dict.fromkeys(SLOTS[:2], (None, "gpu")), 1.0)
    requests = gaps.ask({Pool("gpu", ""): 2}, gaps.open((), ("",), 1.0), 1.0)
    assert requests.now == {"": ("c1/gpu.0",)}


def test_a_host_of_which_one_owner_may_not_have_all_goes_to_one_owner():
    gaps = Gaps(whole_host_classes=frozenset({"gpu"}), rejected_s=300.0)
    gaps.rejected("c1/gpu.1", "ann", 0.0)
    gaps.seen(dict.fromkeys(SLOTS[:2], (None, "gpu")), 1.0)
    numbers = {Pool("gpu", "ann"): 1, Pool("gpu", "bob"): 1}
    requests = gaps.ask(numbers, gaps.open((), ("ann", "bob"), 1.0), 1.0)
    assert requests.now == {"ann": ("c1/gpu.0",)}


@pytest.mark.parametrize(("room", "count"), [(1, 0), (2, 2), (3, 2), (4, 4)])
def test_an_owner_has_no_more_leases_for_want_of_whole_hosts(room, count):
    gaps = Gaps(whole_host_classes=frozenset({"gpu"}))
    gaps.seen(dict.fromkeys(SLOTS, (None, "gpu")), 0.0)
    remaining = {"": room}
    requests = gaps.ask({Pool("gpu", ""): 4}, gaps.open((), ("",), 0.0), 0.0, remaining)
    assert len(requests.now.get("", ())) == count
    assert remaining == {"": room - count}


def test_an_owner_without_room_for_a_host_leaves_it_to_the_others():
    gaps = Gaps(whole_host_classes=frozenset({"gpu"}))
    gaps.seen(dict.fromkeys(SLOTS, (None, "gpu")), 0.0)
    numbers = {Pool("gpu", "ann"): 1, Pool("gpu", "bob"): 4}
    remaining = {"ann": 1, "bob": 100}
    requests = gaps.ask(numbers, gaps.open((), ("ann", "bob"), 0.0), 0.0, remaining)
    assert requests.now == {"bob": tuple(SLOTS[:4])}


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
