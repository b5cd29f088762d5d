"""Which leases are taken, released and reclaimed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from malletrain.core.bidders import Bidders
from malletrain.core.commands import (
    ReclaimNodes,
    ReleaseLeases,
    Rescale,
    Start,
    Suspend,
    TakeLeases,
)
from malletrain.core.events import (
    GapsSeen,
    LeaseNotTaken,
    NodeJoined,
    NodeRejected,
    RescaleFinished,
    Tick,
)
from malletrain.core.gaps import Gaps
from malletrain.core.goal_keeper import GoalKeeper
from malletrain.core.lease_planner import LeasePlanner
from malletrain.core.planning import Plan
from malletrain.core.pools import Pool, Trainers
from malletrain.core.profile_runner import ProfileRunner
from malletrain.core.queueing import AdmissionQueue
from malletrain.core.settings import ControllerSettings
from malletrain.core.shares import Quotas, Shares
from malletrain.core.state import ControllerState
from tests.malletrain.core.controller_script import (
    controller,
    gaps,
    job,
    nodes,
    play,
    running,
)


def test_as_many_leases_as_are_of_use():
    c = controller()
    play(c, [(0.0, job(high=2)), (2.0, gaps(*"abcde"), [TakeLeases(("a", "b"))])])
    play(
        c, [(4.0, gaps("c", "d", "e"), [])]
    )  # the two are on their way, although the poll does not show them any more
    play(
        c,
        [
            *nodes("a", "b", at=5.0),
            (6.0, Tick(), [Start("j", ("a", "b"))]),
            (7.0, gaps("c", "d", "e"), []),
        ],
    )


@pytest.mark.parametrize(
    ("second", "starts"),
    [
        (6.5, {6.5: [], 8.0: [Start("j", ("a", "b"))]}),  # it came within two seconds
        (9.0, {6.9: [], 7.0: [Start("j", ("a",))]}),  # it did not
    ],
)
def test_a_plan_waits_a_moment_for_leases_that_are_on_their_way(second, starts):
    c = controller()
    play(c, [(0.0, job(high=2)), (2.0, gaps("a", "b"), [TakeLeases(("a", "b"))])])
    script = [
        *nodes("a", at=5.0),
        *nodes("b", at=second),
        *((t, Tick(), x) for t, x in starts.items()),
    ]
    play(c, sorted(script, key=lambda line: line[0]))


def test_nobody_waits_when_no_other_lease_is_on_its_way():
    c = controller()
    play(c, [(0.0, job(high=2)), (2.0, gaps("a"), [TakeLeases(("a",))])])
    play(c, [*nodes("a", at=5.0), (5.9, Tick(), []), (6.0, Tick(), [Start("j", ("a",))])])


def test_no_leases_without_jobs_and_none_for_a_job_that_the_gaps_cannot_hold():
    c = controller()
    play(c, [(0.0, gaps("a", "b"), [])])
    play(
        c,
        [
            (1.0, job(low=3)),
            (3.0, gaps("a", "b"), []),
            (4.0, gaps("a", "b", "c"), [TakeLeases(("a", "b", "c"))]),
        ],
    )


def test_the_longest_gaps_are_taken_first_and_short_ones_are_left_alone():
    c = controller(min_horizon_s=60.0)
    seen = GapsSeen(
        {
            "a": (30.0, "default"),
            "b": (100.0, "default"),
            "c": (None, "default"),
            "d": (500.0, "default"),
        }
    )
    play(c, [(0.0, job(high=2)), (2.0, seen, [TakeLeases(("c", "d"))])])
    c = controller(min_horizon_s=60.0)
    play(c, [(0.0, job(high=9)), (2.0, seen, [TakeLeases(("c", "d", "b"))])])


def test_leases_are_asked_for_in_one_class_when_a_job_needs_them_together():
    c = controller()
    seen = GapsSeen(
        {"a": (None, "default"), "g1": (9.0, "gpu"), "g2": (9.0, "gpu"), "g3": (9.0, "gpu")}
    )
    play(c, [(0.0, job(low=3, high=3)), (2.0, seen, [TakeLeases(("g1", "g2", "g3"))])])


def test_a_lease_that_was_refused_is_not_asked_for_before_the_next_poll_and_then_more_and_more_rarely():  # noqa: E501
    c = controller()
    play(
        c,
        [(0.0, job(high=1)), (2.0, gaps("a"), [TakeLeases(("a",))]), (3.0, LeaseNotTaken("a"), [])],
    )
    play(c, [(3.1, job("another")), (4.9, Tick(), []), (5.0, gaps("a"), [TakeLeases(("a",))])])
    play(c, [(5.5, LeaseNotTaken("a"), []), (6.0, gaps("a"), [])])
    play(
        c,
        [
            (10.0, gaps("a"), [TakeLeases(("a",))]),
            (10.5, LeaseNotTaken("a"), []),
            (15.0, gaps("a"), []),
        ],
    )


def test_a_lease_that_does_not_come_up_is_forgotten_after_a_while():
    c = controller(lease_wait_s=60.0)
    play(c, [(0.0, job(high=1)), (2.0, gaps("a"), [TakeLeases(("a",))]), (30.0, gaps("a"), [])])
    play(c, [(62.0, gaps("a"), [TakeLeases(("a",))])])


def test_a_lease_nobody_uses_is_given_back_and_not_taken_again():
    c = controller(release_after_s=30.0)
    play(
        c,
        [
            (0.0, job(high=1)),
            *nodes("a", "b"),
            (1.0, Tick(), [Start("j", ("a",))]),
            (5.0, RescaleFinished("j")),
            (29.0, Tick(), []),
        ],
    )
    assert play(c, [(31.0, Tick())]) == [ReleaseLeases(("b",))]
    play(c, [(35.0, gaps("b"), []), (40.0, gaps("b"), []), (400.0, Tick(), [])])
    assert c.next_wakeup() is None


def test_a_lease_that_waits_for_more_of_its_kind_is_kept():
    c = controller(release_after_s=10.0)
    play(c, [(0.0, job(low=2, high=2)), *nodes("a")])
    play(
        c,
        [
            (2.0, gaps("b"), [TakeLeases(("b",))]),
            (15.0, Tick(), []),
            *nodes("b", at=18.0),
            (19.0, Tick(), [Start("j", ("a", "b"))]),
        ],
    )


def test_a_lease_is_not_given_back_while_a_rescale_that_would_use_it_is_under_way():
    c = controller(release_after_s=10.0)
    play(c, [(0.0, job()), *nodes("a"), (1.0, Tick()), *nodes("b", at=2.0), (90.0, Tick(), [])])
    assert play(c, [(100.0, RescaleFinished("j")), (101.0, Tick())]) == [Rescale("j", ("a", "b"))]


@pytest.mark.parametrize("give_back", [0.0, 5.0, 30.0])
def test_leases_do_not_flap(give_back):
    """Every lease that is requested is granted. No node is released and then requested again."""
    c = controller(release_after_s=give_back)
    play(c, [(0.0, job("one", 2, 3)), (0.0, job("two", 1, 2)), (0.0, job("big", 30, 30))])
    free, now = {f"n{i}": ("gpu" if i > 4 else "default") for i in range(9)}, 2.0
    released_nodes = []
    for _ in range(60):
        seen = GapsSeen({n: (None, k) for n, k in free.items() if n not in c.nodes})
        for command in play(c, [(now, seen)]):
            if isinstance(command, TakeLeases):
                assert not set(command.nodes) & set(released_nodes)
                play(c, [(now + 1, NodeJoined(n, free[n])) for n in command.nodes])
            elif isinstance(command, ReleaseLeases):
                released_nodes += command.nodes
        for name, record in c.jobs.items():
            if record.rescaling:
                play(c, [(now + 1, RescaleFinished(name))])
        released_nodes += [
            n
            for command in play(c, [(now + 2.5, Tick())])
            if isinstance(command, ReleaseLeases)
            for n in command.nodes
        ]
        now += 5.0
    assert sorted(len(record.nodes) for record in c.jobs.values()) == [0, 2, 3]
    assert len(c.nodes) == 5


def test_an_unfit_node_is_given_back_and_left_alone_for_a_while():
    c = controller(rejected_s=100.0)
    now = running(c)
    play(
        c,
        [
            (now, NodeRejected("b"), [ReleaseLeases(("b",))]),
            (now + 2, Tick(), []),
            (now + 5, gaps("b"), []),
        ],
    )
    assert c.jobs["j"].nodes == ("a",)
    play(c, [(now + 101, gaps("b"), [TakeLeases(("b",))])])


def test_a_job_left_under_its_minimum_by_an_unfit_node_does_not_hang_in_its_rescale():
    c = controller()
    play(
        c,
        [
            (0.0, job(low=2, high=2)),
            *nodes("a", "b"),
            (1.0, Tick()),
            (2.0, NodeRejected("b")),
            (3.0, Tick(), [Suspend("j")]),
        ],
    )


# --- the lease planner by itself ---


def planner(*nodes, jobs, settings=None, gaps=(), seen=None, node_class="default"):
    """A state with these nodes, (owner, node) each, and jobs; and a function that makes its planner
    from the number of nodes that each job gets in the imagined plan.
    """
    settings = settings or ControllerSettings(release_after_s=10.0, reclaim_s=20.0)
    state, seen = ControllerState(settings.release_after_s), seen or Gaps()
    for spec in jobs:
        state.submit(spec)
    for owner, node in nodes:
        state.node_joined(NodeJoined(node, owner=owner, node_class=node_class), 0.0)
    seen.seen(dict.fromkeys(gaps, (None, node_class)), 0.0)
    queue = AdmissionQueue(state, seen, 20, 600.0)
    runner = ProfileRunner(state, settings)
    goals = GoalKeeper(state, seen, settings)
    shares, quotas = Shares(state, None), Quotas(state)
    bidders = Bidders(state, seen, queue, runner, goals, shares, quotas, Trainers(), settings)

    def plan(shares):
        def imagine(candidates, everything, settings, favoured=()):
            free = sorted(everything)
            assignment = {}
            for c in candidates:
                count = shares[c.job]
                mine = [n for n in free if n in c.nodes]
                assignment[c.job] = tuple([*mine, *(n for n in free if n not in mine)][:count])
                free = [n for n in free if n not in assignment[c.job]]
            return Plan(assignment, 0.0, 0.0, 0.0)

        return LeasePlanner(state, seen, bidders, imagine, settings)

    return state, plan


A, B = job("a", 1, 9, owner="alice"), job("b", 1, 9, owner="bob")


@pytest.mark.parametrize(
    ("shares", "gaps", "commands"),
    [
        ({"a": 2, "b": 0}, (), []),
        ({"a": 1, "b": 1}, (), [ReclaimNodes(("n0",), 20.0)]),
        ({"a": 2, "b": 1}, ("g0", "g1"), [TakeLeases(("g0",), "bob")]),
        (
            {"a": 1, "b": 2},
            ("g0",),
            [TakeLeases(("g0",), "bob"), ReclaimNodes(("n0",), 20.0)],
        ),
        (
            {"a": 3, "b": 1},
            ("g0", "g1"),
            [TakeLeases(("g0",), "alice"), TakeLeases(("g1",), "bob")],
        ),
    ],
)
def test_gaps_first_and_then_what_others_have_less_use_for(shares, gaps, commands):
    """Two idle nodes of Alice, and what an imagined plan gives to whom."""
    state, plan = planner(("alice", "n0"), ("alice", "n1"), jobs=(A, B), gaps=gaps)
    state.leases_due = True
    assert plan(shares).review(1.0) == commands
    reclaimed = [n for c in commands if isinstance(c, ReclaimNodes) for n in c.nodes]
    assert [n for n, node in state.nodes.items() if node.gone_at == 21.0] == reclaimed


@pytest.mark.parametrize(
    ("rejected", "failing", "reclaimed"),
    [
        ((), False, ("n0",)),
        (("n0",), False, ("n1",)),
        (("n0", "n1"), False, ()),
        ((), True, ()),
    ],
)
def test_a_node_is_reclaimed_only_for_a_user_who_may_have_it(rejected, failing, reclaimed):
    """Bob's leases came to nothing on some of Alice's nodes, or wherever he had one."""
    seen = Gaps()
    state, plan = planner(("alice", "n0"), ("alice", "n1"), jobs=(A, B), seen=seen)
    for node in rejected:
        seen.rejected(node, "bob", 0.5)
    for now in (0.1, 2.0) if failing else ():
        seen.seen({"x": (None, "default")}, now)
        seen.ask(Counter({Pool("default", "bob"): 1}), seen.open((), ("bob",), now), now)
        seen.refused("x", "bob", now)
    seen.seen({}, 2.5)
    assert seen.backing_off("bob", 3.0) == failing
    state.leases_due = True
    commands = plan({"a": 1, "b": 1}).review(3.0)
    assert [n for c in commands if isinstance(c, ReclaimNodes) for n in c.nodes] == [*reclaimed]


def test_only_idle_leases_that_are_due_and_spare_are_released():
    state, plan = planner(*(("", f"n{k}") for k in range(3)), jobs=(job("j", 1, 9),))
    state.plan_made()
    state.assign({"j": ("n0",)}, 1.0)
    leases = plan({"j": 2})
    assert leases.review(9.9) == []
    assert leases.review(10.0) == [ReleaseLeases(("n1",))]
    assert state.nodes["n2"].review_at == 20.0, "one is still of use: ask again"


def test_nodes_are_not_reclaimed_twice_within_the_interval():
    state, plan = planner(*(("alice", f"n{k}") for k in range(4)), jobs=(A, B))
    leases, reclaim_times = plan({"a": 1, "b": 1}), []
    for now in (1.0, 30.0, 61.0):
        state.leases_due = True
        reclaim_times += [now for c in leases.review(now) if isinstance(c, ReclaimNodes)]
    assert reclaim_times == [1.0], "the one that was reclaimed is on its way to Bob"


WHOLE = ControllerSettings(
    release_after_s=10.0, reclaim_s=20.0, whole_host_classes=frozenset({"gpu"})
)
HOSTS = [f"c{host}/gpu.{number}" for host in (1, 2) for number in (0, 1)]


def test_slots_of_whole_hosts_are_released_together():
    """A job has one slot of c1; the plan has use for that one only."""
    state, plan = planner(
        *(("", slot) for slot in HOSTS),
        jobs=(job("j", 1, 9),),
        settings=WHOLE,
        node_class="gpu",
    )
    state.plan_made()
    state.assign({"j": tuple(HOSTS[:1])}, 1.0)
    leases = plan({"j": 1})
    state.keep_idle("c2/gpu.1", 15.0)  # it became idle later than the other one of its host
    assert leases.review(10.0) == []
    assert state.nodes["c1/gpu.1"].review_at == 20.0, "c1 is held as a whole anyway"
    assert leases.review(15.0) == [ReleaseLeases(("c2/gpu.0", "c2/gpu.1"))]


@pytest.mark.parametrize(
    ("shares", "reclaimed"),
    [({"a": 2, "b": 2}, HOSTS[:2]), ({"a": 3, "b": 1}, []), ({"a": 1, "b": 1}, HOSTS[:2])],
)
def test_slots_of_whole_hosts_are_reclaimed_together(shares, reclaimed):
    state, plan = planner(
        *(("alice", slot) for slot in HOSTS), jobs=(A, B), settings=WHOLE, node_class="gpu"
    )
    state.leases_due = True
    commands = plan(shares).review(1.0)
    assert [n for c in commands if isinstance(c, ReclaimNodes) for n in c.nodes] == reclaimed


def test_a_slot_waits_for_those_of_its_host_that_are_on_their_way():
    seen = Gaps(whole_host_classes=frozenset({"gpu"}), lease_wait_s=100.0)
    state, plan = planner(
        ("", HOSTS[2]), jobs=(job("j", 1, 9),), settings=WHOLE, seen=seen, node_class="gpu"
    )
    state.plan_made()
    leases = plan({"j": 0})
    seen.seen({HOSTS[3]: (None, "gpu")}, 1.0)
    assert seen.ask({Pool("gpu"): 1}, seen.open((), ("",), 1.0), 1.0).now == {"": (HOSTS[3],)}
    assert leases.review(10.0) == [], "its job runs, but not all agents have reported"
    state.node_joined(NodeJoined(HOSTS[3], node_class="gpu"), 12.0)
    seen.joined(HOSTS[3], "")
    assert leases.review(20.0) == []
    assert leases.review(22.0) == [ReleaseLeases((HOSTS[2], HOSTS[3]))]


@pytest.mark.parametrize(("most", "reclaimed"), [(0, HOSTS[:2]), (2, HOSTS[:2]), (1, [])])
def test_a_host_is_reclaimed_only_for_an_owner_who_may_have_so_many_leases(most, reclaimed):
    settings = replace(WHOLE, max_leases_per_owner=most)
    state, plan = planner(
        *(("alice", slot) for slot in HOSTS), jobs=(A, B), settings=settings, node_class="gpu"
    )
    state.leases_due = True
    commands = plan({"a": 2, "b": 1}).review(1.0)
    assert [n for c in commands if isinstance(c, ReclaimNodes) for n in c.nodes] == reclaimed


def test_a_host_is_not_reclaimed_before_all_of_its_slots_have_joined():
    seen = Gaps(whole_host_classes=frozenset({"gpu"}), lease_wait_s=100.0)
    state, plan = planner(
        *(("alice", slot) for slot in HOSTS[:3]),
        jobs=(A, B),
        settings=WHOLE,
        seen=seen,
        node_class="gpu",
    )
    seen.seen({HOSTS[3]: (None, "gpu")}, 0.0)
    seen.ask({Pool("gpu", "alice"): 1}, seen.open((), ("alice",), 0.0), 0.0)
    state.leases_due = True
    commands = plan({"a": 1, "b": 2}).review(1.0)
    assert [n for c in commands if isinstance(c, ReclaimNodes) for n in c.nodes] == HOSTS[:2]
