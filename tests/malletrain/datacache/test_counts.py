"""Counts of several processes in one file: none is lost, and a later worker goes on where the one
before it was.
"""

import os
import pickle
import threading

from malletrain.datacache.counts import SLOTS, ReadCounts, SharedCounts


def test_sums():
    total = ReadCounts(1, 2, 3, 40, 50, 6) + ReadCounts(10, 20, 30, 400, 500, 60)
    assert total == ReadCounts(11, 22, 33, 440, 550, 66)
    assert total.reads == 66


def test_each_process_has_a_slot_and_the_sum_is_that_of_all(tmp_path):
    counts = SharedCounts(tmp_path)
    assert counts.total() == ReadCounts()
    counts.add(0, ReadCounts(node_hits=5, hit_bytes=2**40))
    spawned = pickle.loads(pickle.dumps(counts))
    spawned.add(1, ReadCounts(peer_hits=7))
    if (pid := os.fork()) == 0:
        counts.add(2, ReadCounts(unpacked=9))
        os._exit(0)
    os.waitpid(pid, 0)
    counts.add(SLOTS + 5, ReadCounts(source_reads=1))
    counts.add(SLOTS + 9, ReadCounts(source_reads=1))
    spawned.add(1, ReadCounts(peer_hits=1))
    assert counts.source_readers() == 1
    expected = ReadCounts(5, 8, 2, 2**40, 0, 9)
    assert counts.total() == spawned.total() == expected
    spawned.close()
    assert counts.path.exists()  # it is the creator's
    counts.close()
    assert list(tmp_path.iterdir()) == []


def test_processes_and_threads_that_share_a_slot_lose_no_count(tmp_path):
    counts, one, each = SharedCounts(tmp_path), ReadCounts(node_hits=1), 5000

    def add():
        for _ in range(each):
            counts.add(3, one)

    if (pid := os.fork()) == 0:
        add()
        os._exit(0)
    threads = [threading.Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.waitpid(pid, 0)[1] == 0
    assert counts.total() == ReadCounts(node_hits=3 * each)
    counts.close()


def test_the_file_of_a_process_that_was_killed_goes_with_the_next_one(tmp_path):
    if (pid := os.fork()) == 0:
        made = SharedCounts(tmp_path)
        os._exit(0 if made.path.exists() else 1)  # as if it were killed
    assert os.waitpid(pid, 0)[1] == 0
    (dead,) = tmp_path.iterdir()
    counts = SharedCounts(tmp_path)
    assert list(tmp_path.iterdir()) == [counts.path] != [dead]
    pickled = pickle.dumps(counts)
    counts.close()
    late = pickle.loads(pickled)  # a worker that is started after that
    late.add(1, ReadCounts(node_hits=1))
    assert late.total() == ReadCounts(node_hits=1)
