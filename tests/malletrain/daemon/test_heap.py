"""What a process has freed goes back to the machine."""

import subprocess
import sys

from malletrain.daemon.heap import AT_LEAST_S, EVERY_S, GROWN_BYTES, Heap

HOLES = """
import os
from malletrain.daemon.heap import Heap

def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

heap = Heap()
kept = [os.urandom(50_000) for _ in range(2000)]
full = held()
del kept[:-1]  # the last one stays above the holes
freed = held()
assert heap.look(0.0)
print(full - freed, full - held())
"""


LARGE = """
import os
from malletrain.daemon.heap import LARGE_BYTES, Heap, resident_bytes

Heap()
first = [os.urandom(16 * LARGE_BYTES) for _ in range(20)]
del first  # glibc would take such from among the small things from now on
kept = [os.urandom(2 * LARGE_BYTES) for _ in range(500)]
full = resident_bytes()
del kept[:-1]
print(full - resident_bytes())
"""

SETTLED = """
import gc
from malletrain.daemon.heap import settle, unsearched

class Ring:
    def __init__(self):
        self.me = self
    def __del__(self):
        ended.append(self)

ended = []
kept, there = [[] for _ in range(100_000)], Ring()
settle()
assert gc.get_freeze_count() > 100_000 > len(gc.get_objects())
del there
gc.collect()
assert not ended, "what was there is not looked at"
Ring()
gc.collect()
assert len(ended) == 1, "what came later is"
settle()
assert len(ended) == 2, "and all of it now"
with unsearched():
    assert not gc.isenabled()
assert gc.isenabled()
gc.disable()
with unsearched():
    pass
assert not gc.isenabled(), "as it was before"
"""


def test_what_is_large_goes_back_at_its_end_without_being_looked_for():
    said = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True)
    assert int(said.stdout) > 50e6


def test_what_is_there_at_the_start_is_not_searched_for_garbage_again_and_again():
    subprocess.run([sys.executable, "-c", SETTLED], check=True)


def test_it_looks_once_a_minute():
    heap = Heap(lambda: 100_000_000)
    assert [heap.look(at) for at in (0.0, 1.0, EVERY_S - 1, EVERY_S, EVERY_S + 1)] == [
        True,
        False,
        False,
        True,
        False,
    ]


def test_it_looks_at_once_when_much_was_taken_and_then_counts_anew():
    held = [100_000_000]
    heap = Heap(lambda: held[0])
    assert heap.look(0.0)
    held[0] += GROWN_BYTES
    assert not heap.look(0.5 * AT_LEAST_S)
    assert heap.look(AT_LEAST_S)
    assert not heap.look(2 * AT_LEAST_S), "what it brought nothing for is in use"
    held[0] += GROWN_BYTES - 1
    assert not heap.look(3 * AT_LEAST_S)


def test_holes_go_back_to_the_machine():
    said = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    before, after = map(int, said.stdout.split())
    assert before < 30e6, "without it they stay"
    assert after > 80e6
