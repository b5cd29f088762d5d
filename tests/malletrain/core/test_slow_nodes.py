"""Slow nodes: who is one, for how long, and whether a job is better off without."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.core.slow_nodes import (
    MAX_MEASUREMENT_AGE_S,
    MAX_SLOWDOWN,
    MAX_WINDOW_AGE_S,
    MEASUREMENTS_PER_NODE,
    MIN_INTERVAL_S,
    MIN_PARTNERS,
    MIN_SLOW_WINDOWS,
    WINDOWS_PER_NODE,
    SlowLink,
    SlowLinks,
    SlowNode,
    SlowNodes,
    StepShare,
    StepWindow,
    Swap,
    measuring_interval_s,
)
from scavenger.interface import host_of

HOUR = 3600.0


def window(busy, job="j1", step=None, samples=None):
    """Seconds that each node was busy in a step, in the order of ranks."""
    samples = samples or {}
    shares = {node: StepShare(s, samples.get(node, 8.0)) for node, s in busy.items()}
    return StepWindow(job, max(busy.values()) + 0.01 if step is None else step, shares)


def lasting(slow_nodes, busy, *, times=WINDOWS_PER_NODE, begin=0.0, **more):
    """Compare so many equal windows in a row; return the last comparison."""
    for k in range(times):
        comparison = slow_nodes.compare(window(busy, **more), begin + 10.0 * k)
    return comparison


def four(**slow):
    return {**dict.fromkeys("abcd", 0.1), **slow}


@pytest.fixture
def slow_nodes():
    return SlowNodes(1.25, HOUR)


@pytest.mark.parametrize(
    ("busy", "samples", "expected"),
    [
        (four(c=0.2), {}, {"c": 2.0}),
        (four(c=0.2, d=0.15), {}, {"c": 2.0, "d": 1.5}),
        (four(), {}, {}),
        (four(c=0.12), {}, {}),  # under the factor
        ({"a": 0.1, "b": 0.3}, {}, {"b": 3.0}),
        (four(c=0.2), {"c": 16.0}, {}),  # it has twice the samples: no slower at any of them
        (four(c=0.2), {"c": 4.0}, {"c": 2.0}),  # it says less per step than per sample
        ({"a": 0.3}, {}, {}),  # nobody to compare it with
        (four(c=0.0002, a=0.0001, b=0.0001, d=0.0001), {}, {}),  # nothing of the step is lost to it
    ],
)
def test_who_is_slow(slow_nodes, busy, samples, expected):
    step = 0.2 if max(busy.values()) < 0.01 else None
    comparison = lasting(slow_nodes, busy, samples=samples, step=step)
    assert comparison.slow == pytest.approx(expected)
    assert set(slow_nodes.current(60.0)) == set(expected)


def test_a_node_is_slow_once_it_lasts(slow_nodes):
    for k in range(MIN_SLOW_WINDOWS - 1):
        assert not slow_nodes.compare(window(four(b=0.3)), 10.0 * k).slow
    comparison = slow_nodes.compare(window(four(b=0.3)), 10.0 * MIN_SLOW_WINDOWS)
    assert (comparison.slow, comparison.fresh) == (pytest.approx({"b": 3.0}), ("b",))
    assert "b takes 3.00 times as long" in slow_nodes.current(60.0)["b"].sentence
    again = slow_nodes.compare(window(four(b=0.3)), 70.0)
    assert again.slow
    assert not again.fresh, "it is said once"


@pytest.mark.parametrize("after_s", [60.0, 1800.0, 2700.0, 6 * HOUR, 24 * HOUR])
def test_a_node_is_found_however_long_it_is_compared_for(after_s):
    """Windows are a little too long, because the daemon looks only now and then."""
    slow_nodes, verdicts = SlowNodes(1.25, HOUR, after_s), []
    for k in range(MIN_SLOW_WINDOWS + 1):
        window_s = after_s / WINDOWS_PER_NODE
        comparison = slow_nodes.compare(window(four(b=0.3)), k * (window_s * 1.2 + 1.0))
        verdicts.append(bool(comparison.slow))
    assert verdicts == [False] * (MIN_SLOW_WINDOWS - 1) + [True, True]


@pytest.mark.parametrize(("after_s", "apart_s"), [(60.0, 600.0), (7200.0, 4800.0)])
def test_windows_of_long_ago_do_not_count_beside_it(after_s, apart_s):
    slow = SlowNodes(1.25, HOUR, after_s)
    for k in range(3 * WINDOWS_PER_NODE):
        assert not slow.compare(window(four(b=0.3)), k * apart_s).slow


def test_a_moment_is_not_lasting(slow_nodes):
    for k in range(4 * WINDOWS_PER_NODE):
        busy = four(b=0.3) if k % 2 else four()
        assert not slow_nodes.compare(window(busy), 10.0 * k).slow


def test_what_was_long_ago_does_not_count(slow_nodes):
    for k in range(3 * WINDOWS_PER_NODE):
        assert not slow_nodes.compare(window(four(b=0.3)), k * MAX_WINDOW_AGE_S / 3).slow


def test_a_node_is_judged_over_rounds_and_jobs(slow_nodes):
    lasting(slow_nodes, four(b=0.3), times=3)
    comparison = lasting(slow_nodes, {"b": 0.3, "x": 0.1, "y": 0.1}, times=2, begin=100.0, job="j2")
    assert set(comparison.slow) == {"b"}


def test_a_rank_with_more_work_is_no_slow_node(slow_nodes):
    """Rank 0 evaluates. Its node is taken away; the next one is slow in its place."""
    comparison = lasting(slow_nodes, {"a": 0.3, "b": 0.1, "c": 0.1}, times=MIN_SLOW_WINDOWS)
    assert comparison.fresh == ("a",)
    comparison = lasting(
        slow_nodes, {"d": 0.3, "b": 0.1, "c": 0.1}, times=MIN_SLOW_WINDOWS, begin=200.0
    )
    assert comparison.uneven
    assert comparison.cleared == ("a",)
    assert not slow_nodes.current(300.0)
    comparison = lasting(slow_nodes, {"e": 0.3, "b": 0.1}, begin=400.0)
    assert not comparison.slow, "it is not judged any more"
    assert lasting(slow_nodes, {"b": 0.1, "e": 0.3}, begin=600.0, job="j2").slow, "others are"


def test_it_is_forgotten_as_it_decays(slow_nodes):
    slow_nodes.remember("n", SlowNode(0.0, 2.0, "n is slow."))
    assert slow_nodes.until("n") == pytest.approx(2 * HOUR)  # 2 → 1.5 → 1.25
    assert "n" in slow_nodes.current(2 * HOUR - 1)
    assert not slow_nodes.current(2 * HOUR + 1)


@given(
    st.floats(1.01, 50.0),
    st.floats(1.01, 5.0),
    st.floats(1.0, 1e6),
    st.floats(0.0, 1e7),
)
def test_it_is_believed_exactly_until_it_says(slowdown, least, half_life_s, age):
    slow_nodes = SlowNodes(least, half_life_s)
    slow_nodes.remember("n", SlowNode(0.0, slowdown, ""))
    until = slow_nodes.until("n")
    if slowdown < least:
        assert not slow_nodes.current(age)
    elif abs(age - until) > 1e-6 * max(1.0, until):
        assert bool(slow_nodes.current(age)) == (age < until)


@given(st.lists(st.floats(1e-3, 10.0), min_size=2, max_size=9), st.sampled_from([0.5, 2.0, 8.0]))
def test_at_most_half_of_the_nodes_are_slow(busy, factor):
    """And a machine that is slower as a whole has the same slow nodes as before."""
    named = {f"n{k}": b for k, b in enumerate(busy)}
    comparison = lasting(SlowNodes(1.25, HOUR), named, step=max(busy))
    assert len(comparison.slow) <= len(busy) / 2
    scaled = {node: factor * b for node, b in named.items()}
    again = lasting(SlowNodes(1.25, HOUR), scaled, step=factor * max(busy))
    assert again.slow == pytest.approx(comparison.slow)


BASE = {
    "size": 4,
    "slow": 1,
    "spare": 1,
    "step_s": 0.2,
    "saved_s": 0.08,
    "up_s": 18.0,
    "down_s": 12.0,
    "ahead_s": 120.0,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),  # a spare node: (120 - 18) · 4 · 0.2/0.12 > 120 · 4
        ({"saved_s": 0.02}, False),  # a tenth is less than the pause costs
        ({"saved_s": 0.02, "up_s": 5.0}, True),
        ({"spare": 0}, True),  # three fast ones: (120 - 12) · 3 · 0.2/0.12 > 120 · 4
        ({"spare": 0, "saved_s": 0.05}, False),  # three fast ones do less than four slow ones
        ({"spare": 0, "saved_s": 0.05, "size": 16}, True),
        ({"up_s": 130.0}, True),  # too dear with a newcomer, not without
        ({"up_s": 130.0, "down_s": 130.0}, False),
        ({"size": 1, "spare": 0}, False),
        ({"saved_s": 0.0}, False),
    ],
)
def test_a_swap_is_made_where_it_pays(changes, expected):
    swap = Swap(**{**BASE, **changes})
    assert swap.pays(float, lambda size: True) is expected


def test_a_job_that_does_not_run_on_fewer_is_not_made_to():
    swap = Swap(**{**BASE, "spare": 0})
    assert not swap.pays(float, lambda size: size >= 4)
    assert Swap(**BASE).pays(float, lambda size: size >= 4)


@given(
    st.integers(2, 64),
    st.integers(0, 8),
    st.floats(1e-3, 10.0),
    st.floats(0.0, 0.9),
    st.floats(0.0, 60.0),
    st.floats(60.0, 600.0),
)
def test_what_pays_at_a_loss_pays_at_a_larger_one(size, spare, step, share, cost, ahead):
    """More lost to the slow node, more spares and cheaper changes never speak against a swap."""

    def pays(share, spare, cost):
        swap = Swap(size, 1, spare, step, share * step, cost, cost, ahead)
        return swap.pays(float, lambda size: True)

    if pays(share, spare, cost):
        assert pays(min(0.94, share + 0.04), spare, cost)
        assert pays(share, spare + 1, cost)
        assert pays(share, spare, cost / 2)


def test_what_is_waited_for_is_shorter_over_better_links():
    times = StepWindow("j1", 1.0, {n: StepShare(0.2, 8.0) for n in "abcd"})
    assert times.saved_s(frozenset("c")) == 0.0
    assert times.saved_s(frozenset("c"), 4.0) == pytest.approx(0.6)
    uneven = StepWindow("j1", 1.0, {"a": StepShare(0.1, 8.0), "b": StepShare(0.6, 8.0)})
    assert uneven.saved_s(frozenset("b"), 2.0) == pytest.approx(0.5 + 0.2)
    assert uneven.saved_s(frozenset("a"), 2.0) == pytest.approx(0.2)


def test_a_slow_link_and_slow_work_are_remembered_apart(slow_nodes):
    lasting(slow_nodes, four(b=0.3))
    slow_nodes.remember("b", SlowNode(60.0, 10.0, "Its link.", 1e4))
    slow_nodes.remember("c", SlowNode(60.0, 10.0, "Its link.", 1e4))
    assert (set(slow_nodes.current(60.0)), set(slow_nodes.links(60.0))) == ({"b", "c"}, {"b", "c"})
    assert slow_nodes.until("b") == slow_nodes.until("c") == 60.0 + HOUR * math.log2(9.0 / 0.25)
    slow_nodes.link_well("b")
    slow_nodes.link_well("c")
    slow_nodes.link_well("nobody")
    assert (set(slow_nodes.current(60.0)), set(slow_nodes.links(60.0))) == ({"b"}, set())
    slow_nodes.remember("c", SlowNode(60.0, 1.3, "Its link.", 1e4))
    assert set(slow_nodes.current(60.0 + HOUR)) == {"b"}, "it is half believed"


def test_a_slow_link_does_not_keep_slow_work_from_being_said(slow_nodes):
    slow_nodes.remember("b", SlowNode(0.0, 10.0, "Its link.", 1e4))
    fresh_nodes = [
        slow_nodes.compare(window(four(b=0.3)), 10.0 * k).fresh for k in range(WINDOWS_PER_NODE)
    ]
    assert fresh_nodes.count(("b",)) == 1


FAST, SLOW = 10_000.0, 1_000.0


def machine(count, **slow):
    """Node → what its link carries, Mbit/s."""
    return {f"n{k}": FAST for k in range(count)} | slow


def measure(links, speeds, pairs, begin=0.0, group="j1"):
    """A pair is as fast as the slower of its ends."""
    for k, (a, b) in enumerate(pairs):
        links.measured(a, b, group, min(speeds[a], speeds[b]), begin + k)


def slow_links(speeds, pairs, now=100.0):
    links = SlowLinks()
    measure(links, speeds, pairs)
    return links.slow("j1", list(speeds), now)


def every(speeds):
    """Each pair so often that every node was measured often enough."""
    return list(combinations(speeds, 2)) * -(-MEASUREMENTS_PER_NODE // (len(speeds) - 1))


@pytest.mark.parametrize(
    ("speeds", "slow"),
    [
        (machine(4, n2=SLOW), {"n2"}),
        (machine(6, n0=SLOW), {"n0"}),
        (machine(6, n0=SLOW, n1=2 * SLOW), {"n0", "n1"}),  # they measured each other, too
        (machine(7, n1=SLOW, n3=SLOW, n5=SLOW), {"n1", "n3", "n5"}),
        (dict.fromkeys(machine(6), SLOW), set()),  # the switch is slow
        (machine(6), set()),
        (machine(6, n4=0.6 * FAST), set()),  # not by half
        (machine(6, n4=0.6 * FAST, n5=0.4 * FAST), set()),  # it does not stand apart
        (machine(3, n1=SLOW), set()),  # few partners
        (machine(4, n0=SLOW, n1=SLOW), set()),  # two against two: nobody knows what is usual
    ],
)
def test_exactly_the_slow_ends_are_named(speeds, slow):
    assert set(slow_links(speeds, every(speeds))) == slow


@given(st.randoms(use_true_random=False), st.integers(4, 7), st.integers(0, 2))
def test_in_any_order(rng, count, bad):
    speeds = machine(count)
    slow = set(rng.sample(sorted(speeds), min(bad, count - MIN_PARTNERS - 1)))
    speeds |= dict.fromkeys(slow, SLOW)
    pairs = [rng.sample(pair, 2) for pair in every(speeds)]
    rng.shuffle(pairs)
    assert set(slow_links(speeds, pairs)) == slow


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0.75, 1.25)), min_size=2, max_size=12),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=80),
)
def test_whatever_was_measured_no_good_link_is_named(ends, pairs):
    names = [f"n{k}" for k in range(len(ends))]
    speeds = {n: (SLOW if bad else FAST) * x for n, (bad, x) in zip(names, ends, strict=True)}
    some = [(names[a % len(names)], names[b % len(names)]) for a, b in pairs]
    for node in slow_links(speeds, [(a, b) for a, b in some if a != b]):
        assert speeds[node] < FAST / 2


def test_what_is_said_of_it():
    link = slow_links(machine(5, n1=SLOW), every(machine(5)))["n1"]
    assert link == SlowLink(SLOW, FAST, 4)
    assert link.times == 10.0
    assert "The link of n1 carries 1e+03 Mbit/s at most" in link.sentence("n1")
    assert SlowLink(0.0, FAST, 3).times == MAX_SLOWDOWN


def test_a_partner_that_nobody_found_fine_is_no_witness():
    """n0 was measured with three nodes that were measured with no other."""
    speeds = machine(8, n0=SLOW)
    pairs = 2 * [("n0", "n1"), ("n0", "n2"), ("n0", "n3")]
    pairs += combinations(["n4", "n5", "n6", "n7"], 2)
    assert not slow_links(speeds, pairs)
    assert not slow_links(speeds, [*pairs, ("n1", "n4"), ("n2", "n5")])
    assert set(slow_links(speeds, [*pairs, ("n1", "n4"), ("n2", "n5"), ("n3", "n6")])) == {"n0"}


def test_one_good_measurement_acquits():
    speeds = machine(5, n1=SLOW)
    links = SlowLinks()
    measure(links, speeds, every(speeds))
    links.measured("n1", "n4", "j1", FAST, 20.0)
    assert not links.slow("j1", list(speeds), 100.0)


def test_a_link_that_becomes_slow_is_found_once_all_that_is_kept_says_so():
    links, speeds = SlowLinks(), machine(5)
    measure(links, speeds, every(speeds))
    now_slow = speeds | {"n1": SLOW}
    measure(links, now_slow, [("n1", n) for n in ("n0", "n2", "n3", "n4", "n0")], 20.0)
    assert not links.slow("j1", list(speeds), 30.0)
    links.measured("n1", "n2", "j1", SLOW, 30.0)
    assert set(links.slow("j1", list(speeds), 31.0)) == {"n1"}


def test_old_ones_those_of_another_group_and_of_who_has_gone_say_nothing():
    links, speeds = SlowLinks(), machine(5, n1=SLOW)
    measure(links, speeds, every(speeds))
    assert links.slow("j1", list(speeds), 20.0)
    assert not links.slow("j2", list(speeds), 20.0)
    assert not links.slow("j1", list(speeds), MAX_MEASUREMENT_AGE_S + 20.0)
    assert not links.slow("j1", [n for n in speeds if n != "n1"], 20.0)
    links.keep(n for n in speeds if n != "n1")
    assert not links.slow("j1", list(speeds), 20.0)


def test_who_was_slow_is_well_after_two_good_ones_in_a_row():
    links = SlowLinks()
    measure(links, machine(2, n0=SLOW), [("n0", "n1")])
    measure(links, machine(3), [("n0", "n1")], 10.0)
    assert not links.well("n0", FAST, 5.0)
    measure(links, machine(3), [("n0", "n2")], 11.0)
    assert links.well("n0", FAST, 5.0)
    assert not links.well("n0", FAST, 10.0)  # one was made before
    assert not links.well("n0", 1.6 * FAST, 5.0)
    measure(links, machine(4, n0=SLOW), [("n0", "n3")], 12.0)
    assert not links.well("n0", FAST, 5.0)


def play(speeds, groups, times, now=0.0):
    """So many measurements of who is next; (links, pairs, whoever was found slow)."""
    links, pairs, slow = SlowLinks(), [], set()
    for k in range(times):
        group, a, b = links.next_pair(groups)
        pairs.append((group, frozenset((a, b))))
        links.measured(a, b, group, min(speeds[a], speeds[b]), now + k)
        slow |= links.slow(group, groups[group], now + k).keys()
    return links, pairs, slow


@pytest.mark.parametrize("count", [4, 5, 8, 40])
def test_pairs_rotate_over_all_nodes_and_over_partners(count):
    speeds = machine(count)
    _, pairs, _ = play(speeds, {"j1": list(speeds)}, 4 * count)
    for node in speeds:
        partners = {p for _, pair in pairs if node in pair for p in pair - {node}}
        assert len(partners) >= min(count - 1, MIN_PARTNERS)
        assert sum(node in pair for _, pair in pairs) >= 4


def test_only_members_of_one_group_are_paired_and_no_group_starves():
    groups = {"j1": ["a", "b", "c", "d"], "": ["e", "f", "g", "h"], "j2": ["alone"]}
    speeds = dict.fromkeys("abcdefgh", FAST)
    _, pairs, _ = play(speeds, groups, 40)
    assert all(pair <= set(groups[group]) for group, pair in pairs)
    assert {group for group, _ in pairs} == {"j1", ""}
    assert SlowLinks().next_pair({"j2": ["alone"]}) is None


def test_slots_of_one_host_are_not_paired():
    """No link is between them, and the pair that is due would never be measured."""
    names = [f"c{host}/gpu.{number}" for host in (1, 2, 3) for number in (0, 1)]
    links = SlowLinks()
    for k in range(40):
        group, a, b = links.next_pair({"j1": names}, host_of)
        assert host_of(a) != host_of(b)
        links.measured(a, b, group, FAST, float(k))
    assert links.next_pair({"j1": names[:2]}, host_of) is None


@given(st.integers(4, 16), st.data())
def test_those_in_turn_are_enough_to_find_the_slow_ones(count, data):
    names = sorted(machine(count))
    most = max(1, (count - 3) // 3)
    bad = set(data.draw(st.lists(st.sampled_from(names), max_size=most, unique=True)))
    order = data.draw(st.permutations(names))
    speeds = machine(count) | dict.fromkeys(bad, SLOW)
    _, _, slow = play(speeds, {"j1": order}, 8 * count)
    assert slow == bad


def test_each_node_takes_part_about_that_often():
    assert measuring_interval_s(2, 30.0) == 30.0
    assert measuring_interval_s(4, 30.0) == 15.0
    assert measuring_interval_s(1000, 30.0) == MIN_INTERVAL_S


def test_noise_by_a_fifth_names_nobody():
    rng, links, names = random.Random(1), SlowLinks(), sorted(machine(8))
    for k in range(400):
        group, a, b = links.next_pair({"j1": names})
        links.measured(a, b, group, FAST * rng.uniform(0.8, 1.2), float(k))
        assert not links.slow("j1", names, float(k))
