"""Slow links, found from measurements of pairs: simulated links, whose slow ends are known."""

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.core.slow_links import (
    MAX_MEASUREMENT_AGE_S,
    MAX_SLOWDOWN,
    MEASUREMENTS_PER_NODE,
    MIN_INTERVAL_S,
    MIN_PARTNERS,
    SlowLink,
    SlowLinks,
    gap_s,
)
from scavenger.interface import host_of

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
    assert gap_s(2, 30.0) == 30.0
    assert gap_s(4, 30.0) == 15.0
    assert gap_s(1000, 30.0) == MIN_INTERVAL_S


def test_noise_by_a_fifth_names_nobody():
    rng, links, names = random.Random(1), SlowLinks(), sorted(machine(8))
    for k in range(400):
        group, a, b = links.next_pair({"j1": names})
        links.measured(a, b, group, FAST * rng.uniform(0.8, 1.2), float(k))
        assert not links.slow("j1", names, float(k))
