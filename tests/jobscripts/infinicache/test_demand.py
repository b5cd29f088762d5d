"""Stack distances and what they say of memory, against streams whose answer is known."""

import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infinicache.demand import DemandCurve, KeyDemand, worth


def played(stream, sizes, **options):
    """A cache that puts what it misses: its KeyDemand, and the distance at each read."""
    demand = KeyDemand(half_life_s=float("inf"), **options)
    there, read_distances = set(), []
    for t, key in enumerate(stream):
        read_distances.append(demand.read(key, float(t)))
        if key not in there:
            there.add(key)
            demand.write(key, sizes[key], sizes[key], float(t))
    return demand, read_distances


def distances(stream, sizes):
    """Stack distances, the slow way: the bytes of all that was used since, and its own."""
    stack, result = [], []
    for key in stream:
        if key in stack:
            at = stack.index(key)
            result.append(sum(sizes[k] for k in stack[: at + 1]))
            stack.pop(at)
        else:
            result.append(None)
        stack.insert(0, key)
    return result


def zipf(keys, reads, seed):
    rng = random.Random(seed)
    weights = list(accumulate(1 / (rank + 1) for rank in range(keys)))
    return [f"k{i}" for i in rng.choices(range(keys), cum_weights=weights, k=reads)]


@given(st.lists(st.integers(0, 12), max_size=200), st.randoms(use_true_random=False))
def test_distances_are_those_of_the_stack(numbers, rng):
    stream = [f"k{i}" for i in numbers]
    sizes = {key: rng.randint(1, 1000) for key in stream}
    _, read_distances = played(stream, sizes, sample=16)
    assert read_distances == distances(stream, sizes)


def test_a_cyclic_scan_hits_not_at_all_or_always():
    stream = [f"k{i}" for _ in range(5) for i in range(100)]
    demand, _ = played(stream, dict.fromkeys(stream, 1000))
    curve = demand.curve(499.0)
    assert curve.at(99_000) == (0.0, 0.0), "one object less than the cycle, and nothing hits"
    hits, size = curve.at(105_000)
    assert hits == pytest.approx(400 / 499)
    assert size == pytest.approx(400 * 1000 / 499)


def test_a_sample_of_a_zipf_stream_tells_the_hits_of_the_whole():
    keys, reads = 4000, 20_000
    stream = zipf(keys, reads, 5)
    rng = random.Random(6)
    sizes = {f"k{i}": int(10 ** rng.uniform(3, 5)) for i in range(keys)}
    exact_distances = sorted(d for d in played(stream, sizes)[1] if d is not None)
    sampled, _ = played(stream, sizes, sample=400)
    assert sampled.share < 0.2
    curve = sampled.curve(float(reads - 1))
    for share in (0.05, 0.1, 0.2, 0.4, 0.7, 1.0):
        memory = share * sum(sizes.values())
        exact = sum(d <= memory for d in exact_distances) / reads
        assert abs(curve.at(memory)[0] * (reads - 1) / reads - exact) < 0.05


def test_the_sample_is_bounded_and_the_slots_are_used_again():
    stream = zipf(3000, 12_000, 7)
    demand, read_distances = played(stream, dict.fromkeys(stream, 10), sample=64)
    assert 0 < demand.share < 0.1
    assert sum(d is not None for d in read_distances) > 200, (
        "long after the first slots were used up"
    )
    demand = KeyDemand(half_life_s=10.0)
    demand.write("old", 1, 1, 0.0)
    for t in range(40_000):
        demand.read("new", float(t))
        if t % 100 == 0:
            demand.write("new", 1, 1, float(t))
    assert demand.read("old", 40_000.0) is None, "not used for a thousand half-lives"


def test_what_nobody_reads_any_more_fades():
    demand = KeyDemand(half_life_s=100.0)
    for t in range(1000):
        demand.read("k", float(t))
        if not t:
            demand.write("k", 1000, 1000, 0.0)
    busy = demand.curve(1000.0).at(1e9)[0]
    assert busy == pytest.approx(1.0, rel=0.05), "one read a second"
    assert demand.curve(1600.0).at(1e9)[0] == pytest.approx(busy / 64, rel=0.1)


def test_what_was_deleted_is_no_hit():
    demand = KeyDemand()
    demand.write("k", 10, 10, 0.0)
    assert demand.read("k", 1.0) == 10
    demand.forget("k")
    assert demand.read("k", 2.0) is None


def test_nodes_are_worth_what_their_memory_serves():
    cycle = DemandCurve((8e9,), (2.0,), (2e9,))
    assert worth({0: cycle}, 50.0, 1e9) == {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0, 6: 0.0, 8: 100.0}
    assert worth({0: DemandCurve()}, 50.0, 1e9) == {1: 0.0}, "nobody reads anything again"
    # Two proxies with a pool each: eight nodes of both are four of each.
    half = DemandCurve((4e9,), (1.0,), (1e9,))
    assert worth({0: half, 1: half}, 50.0, 1e9)[8] == 100.0
    assert worth({0: half, 1: half}, 50.0, 1e9)[6] == 0.0
