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
kept = [os.urandom(100_000) for _ in range(1000)]
full = held()
del kept[:-1]  # the last one stays above the holes
freed = held()
assert heap.look(0.0)
print(full - freed, full - held())
"""


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
