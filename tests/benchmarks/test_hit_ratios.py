"""The formulas, against caches that are simulated sample by sample."""

import random
from collections import OrderedDict

import pytest

from benchmarks.hit_ratios import lru_hits, never_evict_hits, pooled_hits
from malletrain.datacache.reader import owners

SAMPLES, EPOCHS = 4_000, 6


def orders(seed=1):
    rng = random.Random(seed)
    return [rng.sample(range(SAMPLES), SAMPLES) for _ in range(EPOCHS)]


def hits(cache_reads):
    """Share of hits after the first epoch."""
    return sum(cache_reads[SAMPLES:]) / (len(cache_reads) - SAMPLES)


def lru(capacity):
    cached, reads = OrderedDict(), []
    for epoch in orders():
        for sample in epoch:
            reads.append(sample in cached)
            cached[sample] = True
            cached.move_to_end(sample)
            if len(cached) > capacity:
                cached.popitem(last=False)
    return hits(reads)


def never_evict(capacity_of):
    """Caches of several nodes, each of which keeps what it owns."""
    nodes = list(capacity_of)
    owner = owners(range(SAMPLES), nodes)
    cached, reads = {node: set() for node in nodes}, []
    for epoch in orders():
        for sample in epoch:
            mine = cached[owner[sample]]
            reads.append(sample in mine)
            if sample not in mine and len(mine) < capacity_of[owner[sample]]:
                mine.add(sample)
    return hits(reads)


def test_known_answers():
    assert lru_hits(0.2) == pytest.approx(0.0215, abs=5e-5)
    assert lru_hits(0.5) == pytest.approx(0.1534, abs=5e-5)
    assert (lru_hits(0.0), lru_hits(1.0), lru_hits(2.0)) == (0.0, 1.0, 1.0)
    assert (never_evict_hits(0.2), never_evict_hits(3.0)) == (0.2, 1.0)
    assert pooled_hits([10, 10, 20], 100) == 0.4
    assert pooled_hits([60, 60], 100) == 1.0
    assert pooled_hits([60], 0) == 0.0


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5, 0.9])
def test_an_lru_cache_hits_as_the_formula_says(fraction):
    assert lru(int(fraction * SAMPLES)) == pytest.approx(lru_hits(fraction), abs=0.01)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_a_cache_that_never_evicts_hits_what_it_holds(fraction):
    capacity = int(fraction * SAMPLES)
    assert never_evict({"n1": capacity}) == pytest.approx(never_evict_hits(fraction), abs=0.001)


@pytest.mark.parametrize("each", [200, 600, 1_200])
def test_nodes_hit_what_they_hold_together(each):
    nodes = {f"n{n}": each for n in range(4)}
    assert never_evict(nodes) == pytest.approx(pooled_hits(nodes.values(), SAMPLES), abs=0.01)
