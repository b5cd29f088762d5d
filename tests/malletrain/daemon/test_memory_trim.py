"""What a process has freed goes back to the machine."""

import subprocess
import sys
from itertools import pairwise

from malletrain.daemon.site.process import (
    GROWTH_BYTES,
    MIN_TRIM_INTERVAL_S,
    SWOLLEN_BYTES,
    TRIM_INTERVAL_S,
    MemoryTrim,
)

HOLES = """
import os
from malletrain.daemon.site.process import MemoryTrim

def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

trim = MemoryTrim()
kept = [os.urandom(50_000) for _ in range(2000)]
full = held()
del kept[:-1]  # the last one stays above the holes
freed = held()
assert trim.update(0.0)
print(full - freed, full - held())
"""


LARGE = """
import os
from malletrain.daemon.site.process import MMAP_BYTES, MemoryTrim, resident_bytes

MemoryTrim()
first = [os.urandom(16 * MMAP_BYTES) for _ in range(20)]
del first  # glibc would take such from among the small things from now on
kept = [os.urandom(2 * MMAP_BYTES) for _ in range(500)]
full = resident_bytes()
del kept[:-1]
print(full - resident_bytes())
"""

SETTLED = """
import gc
from malletrain.daemon.site.process import (
    COLLECT_INTERVAL_S,
    MemoryTrim,
    collection_disabled,
    freeze_objects,
    full_collections_rare,
)

class Ring:
    def __init__(self):
        self.me = self
    def __del__(self):
        ended.append(self)

ended = []
kept, there = [[] for _ in range(100_000)], Ring()
freeze_objects()
assert gc.get_freeze_count() > 100_000 > len(gc.get_objects())
del there
gc.collect()
assert not ended, "what was there is not looked at"
Ring()
gc.collect()
assert len(ended) == 1, "what came later is"
freeze_objects()
assert len(ended) == 2, "and all of it now"
usual = gc.get_threshold()
full = gc.get_stats()[2]["collections"]
with full_collections_rare():
    kept = [[] for _ in range(3_000_000)]
    assert gc.get_stats()[2]["collections"] == full, "however much is new"
    trim = MemoryTrim()
    trim.update(0.0)
    trim.update(COLLECT_INTERVAL_S - 1)
    assert gc.get_stats()[2]["collections"] == full
    trim.update(COLLECT_INTERVAL_S)
    assert gc.get_stats()[2]["collections"] == full + 1
assert gc.get_threshold() == usual
with collection_disabled():
    assert not gc.isenabled()
assert gc.isenabled()
gc.disable()
with collection_disabled():
    pass
assert not gc.isenabled(), "as it was before"
"""


def test_what_is_large_goes_back_at_its_end_without_being_looked_for():
    argv = [sys.executable, "-c", LARGE]
    result = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert int(result.stdout) > 50e6


def test_what_is_there_at_the_start_is_not_searched_for_garbage_again_and_again():
    subprocess.run([sys.executable, "-c", SETTLED], check=True)


def test_it_looks_once_a_minute():
    trim = MemoryTrim(lambda: 100_000_000)
    assert [
        trim.update(at)
        for at in (0.0, 1.0, TRIM_INTERVAL_S - 1, TRIM_INTERVAL_S, TRIM_INTERVAL_S + 1)
    ] == [
        True,
        False,
        False,
        True,
        False,
    ]


class Process:
    """Measures a process of so many resident bytes; a trim leaves ``needed`` of them."""

    def __init__(self, resident_bytes):
        self.resident_bytes = self.needed = resident_bytes
        self.calls = 0

    def __call__(self):
        self.calls += 1
        if self.calls % 2:  # called before a trim, and then after it
            return self.resident_bytes
        self.resident_bytes = self.needed
        return self.resident_bytes


def test_it_looks_every_second_while_that_brings_much():
    process = Process(100_000_000)
    trim = MemoryTrim(process)
    assert trim.update(0.0)
    for second in (2, 3, 4):
        process.resident_bytes += GROWTH_BYTES
        assert trim.update(second), "also above what was left the last time"
        assert process.resident_bytes == process.needed
    process.calls = 0
    process.resident_bytes += GROWTH_BYTES - 1
    assert not trim.update(10.0)


def test_what_there_is_a_reason_for_does_not_count():
    sizes = [100_000_000]
    trim = MemoryTrim(lambda: sizes[-1])
    assert trim.update(0.0)
    connections = 10 * SWOLLEN_BYTES
    sizes.append(sizes[0] + connections)
    assert trim.swollen()
    assert not trim.swollen(connections)
    assert not trim.update(TRIM_INTERVAL_S / 2, connections)
    sizes.append(sizes[0] + connections + SWOLLEN_BYTES + 1)
    assert trim.swollen(connections), "what comes beside it does"
    assert trim.update(TRIM_INTERVAL_S / 2, connections)
    sizes.append(sizes[0] + SWOLLEN_BYTES + 1)
    assert trim.swollen(), "when they are gone they explain nothing"


def test_what_is_in_use_is_looked_at_ever_more_rarely():
    process = Process(100_000_000)
    trim = MemoryTrim(process)
    assert trim.update(0.0)
    process.resident_bytes = process.needed = 300_000_000  # of which nothing is free
    looks, at = [], 1.0
    while at < 300.0:
        process.calls = 0
        if trim.update(at):
            looks.append(at)
        at += MIN_TRIM_INTERVAL_S
    waits = [b - a for a, b in pairwise(looks)]
    assert waits == sorted(waits)
    assert waits[-1] == TRIM_INTERVAL_S
    process.needed = 100_000_000
    process.calls = 0
    assert trim.update(at + TRIM_INTERVAL_S)
    process.resident_bytes += GROWTH_BYTES
    process.calls = 0
    assert trim.update(at + TRIM_INTERVAL_S + MIN_TRIM_INTERVAL_S), "it was worth it again"


def test_holes_go_back_to_the_machine():
    argv = [sys.executable, "-c", HOLES]
    result = subprocess.run(argv, capture_output=True, text=True, check=True)
    before, after = map(int, result.stdout.split())
    assert before < 30e6, "without it they stay"
    assert after > 80e6
