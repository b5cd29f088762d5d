"""The store of a node: bounded, shared by processes, right after any kill, private to its user."""

import fcntl
import mmap
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from malletrain.datacache import store as store_module
from malletrain.datacache.store import (
    MAX_SAMPLE_BYTES,
    DataCacheRefusalError,
    DataSetIdentity,
    NodeStore,
    NoMemoryForDataError,
    OtherDataSetError,
    attach,
    check_sum,
    file_name,
    private_data_folder,
    remove_unused,
)
from tests.strangers import SOMEBODY, only_root
from tests.waiting import NEVER_S, PATIENCE_S

MIB = 1 << 20
DATA = DataSetIdentity("imagenet", 100, 7)


def body(sample, size=1000):
    return np.random.default_rng(sample).bytes(size)


@pytest.fixture
def folder(tmp_path):
    return private_data_folder(tmp_path / "data")


def test_a_sample_is_found_where_it_was_put(folder):
    store = attach(folder, DATA, MIB)
    assert store.get(3) is None
    assert 3 not in store
    assert store.put(3, body(3))
    assert bytes(store.get(3)) == body(3)
    assert (3 in store, store.count(), store.first, store.length) == (True, 1, 7, 100)
    assert store.used >= 1000
    assert not store.put(100, b"beyond")
    assert store.get(100) is None
    assert store.get(-1) is None


def test_a_sample_is_a_view_of_the_mapping_and_not_a_copy(folder):
    store = attach(folder, DATA, MIB)
    store.put(1, body(1))
    view = store.get(1)
    assert isinstance(view, memoryview)
    address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    again = np.frombuffer(store.get(1), np.uint8).__array_interface__["data"][0]
    assert address == again
    assert address % 16 == 0


def test_what_a_process_writes_into_a_sample_it_sees_alone_and_only_until_the_next_read(folder):
    one, other = attach(folder, DATA, MIB), attach(folder, DATA, MIB)
    one.put(1, body(1))
    view = one.get(1)
    view[0:4] = b"oops"
    assert bytes(other.get(1)) == body(1)
    assert bytes(one.get(1)) == body(1)
    one.put(2, body(2))  # on the page that the process has changed
    assert bytes(one.get(2)) == body(2)
    assert bytes(other.get(2)) == body(2)


def test_the_first_put_stays_and_nothing_is_evicted(folder):
    store = attach(folder, DATA, 64 * 1024)
    admitted = [sample for sample in range(100) if store.put(sample, body(sample, 2000))]
    assert admitted == list(range(len(admitted)))
    assert 10 < len(admitted) < 40
    assert store.full
    assert store.used <= store.capacity
    assert os.stat(store.path).st_size == 64 * 1024
    assert not store.put(99, b"small")  # full is full
    assert store.put(0, b"another")  # it has a sample 0
    for sample in admitted:
        assert bytes(store.get(sample)) == body(sample, 2000)


def test_a_damaged_sample_counts_as_absent(folder):
    store = attach(folder, DATA, MIB)
    store.put(5, body(5))
    with open(store.path, "r+b") as file:
        data = Path(store.path).read_bytes()
        file.seek(data.index(body(5)) + 500)
        file.write(b"!!!!")
    assert store.get(5) is None
    assert check_sum(5, body(5)) != check_sum(6, body(5))  # bytes of another sample


@pytest.mark.parametrize(
    "entry", [(1, 100, 0), (2**63, 100, 0), (5000, 2**32 - 1, 0), (5000, 0, 0)]
)
def test_an_entry_that_points_anywhere_counts_as_absent(folder, entry):
    store = attach(folder, DATA, MIB)
    with open(store.path, "r+b") as file:
        file.seek(4096 + 9 * 16)
        file.write(store_module.ENTRY.pack(*entry))
    assert store.get(9) is None


def test_another_length_is_refused_by_name(folder):
    attach(folder, DATA, MIB)
    with pytest.raises(OtherDataSetError, match=r"'imagenet' .* 100 samples, but this one has 9"):
        attach(folder, DataSetIdentity("imagenet", 9, 7), MIB)
    assert attach(folder, DataSetIdentity("other", 9, 7), MIB).length == 9


def test_too_little_memory_is_refused_with_what_is_needed(folder):
    with pytest.raises(NoMemoryForDataError, match=r"would get 8 kB .* 32\.8 kB at least"):
        attach(folder, DATA, 8000)
    assert list(folder.iterdir()) == []


def test_shared_memory_without_room_is_refused(folder, monkeypatch):
    monkeypatch.setattr(store_module, "available", lambda: 0)
    with pytest.raises(NoMemoryForDataError, match="would get 0 bytes"):
        attach(folder, DATA, MIB)


def test_memory_that_runs_out_later_ends_admission_and_nothing_else(folder, monkeypatch):
    monkeypatch.setattr(store_module, "_CHECK_BYTES", 10_000)
    store = attach(folder, DATA, MIB)
    monkeypatch.setattr(store_module, "available", lambda: 9_999)
    admitted = [sample for sample in range(100) if store.put(sample, body(sample))]
    assert len(admitted) < 12
    assert store.full
    assert all(bytes(store.get(sample)) == body(sample) for sample in admitted)


def test_a_sample_too_large_for_an_entry_is_not_kept(folder):
    with mmap.mmap(-1, MAX_SAMPLE_BYTES + 1, mmap.MAP_PRIVATE | 0x4000) as huge:  # MAP_NORESERVE
        store = attach(folder, DATA, MIB)
        assert not store.put(0, huge)
    assert store.put(0, b"small")


def test_a_store_that_no_process_uses_goes_when_another_needs_its_memory(folder, monkeypatch):
    old = attach(folder, DATA, MIB)
    path = old.path
    monkeypatch.setattr(store_module, "_free", lambda _: MIB // 2 if path.exists() else MIB)
    second = attach(folder, DataSetIdentity("second", 10, 1), MIB)
    assert path.exists()  # in use
    assert second.capacity < MIB // 2
    old.close()
    third = attach(folder, DataSetIdentity("third", 10, 1), MIB)
    assert not path.exists()
    assert third.capacity > MIB // 2
    assert second.path.exists()


def test_a_store_in_use_by_any_process_is_not_removed(folder):
    store = attach(folder, DATA, MIB)
    other = NodeStore.open_existing(store.path)
    store.close()
    assert not remove_unused(other.path)
    other.close()
    assert remove_unused(other.path)
    assert NodeStore.open_existing(other.path) is None


def test_a_file_that_is_no_store_is_not_opened(folder):
    path = folder / file_name("x")
    path.write_bytes(b"something else" * 1000)
    assert NodeStore.open_existing(path) is None
    with pytest.raises(OSError, match="cannot be opened"):
        attach(folder, DataSetIdentity("x", 10, 1), MIB)


def test_a_folder_that_others_can_use_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    os.chmod(tmp_path / "open", 0o755)
    with pytest.raises(DataCacheRefusalError, match="chmod 700"):
        private_data_folder(tmp_path / "open")


@only_root
def test_a_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", SOMEBODY, SOMEBODY)
    with pytest.raises(DataCacheRefusalError, match="another user"):
        private_data_folder(tmp_path / "theirs")


# --- several processes ---

WRITER = """
import os, sys
from pathlib import Path
import numpy as np
from malletrain.datacache import store as module
from malletrain.datacache.store import DataSetIdentity, attach
module.LOCK_TRIES = 1_000_000
store = attach(Path(sys.argv[1]), DataSetIdentity("imagenet", 100, 7), 1 << 20)
for sample in np.random.default_rng(int(sys.argv[2])).permutation(100).tolist():
    store.put(sample, np.random.default_rng(sample).bytes(1000))
"""


@pytest.mark.slow
def test_processes_that_write_together_write_each_sample_once(folder):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(seed)])
        for seed in range(3)
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    store = attach(folder, DATA, MIB)
    assert [bytes(store.get(sample)) for sample in range(100)] == [body(s) for s in range(100)]
    assert store.used == 100 * 1008
    assert sorted(folder.iterdir()) == [store.path]


KILLED = """
import os, signal, sys
from pathlib import Path
from malletrain.datacache import store as module
store = module.NodeStore.open_existing(Path(sys.argv[1]))
real, writes = module._write, 0
def write(file, data, offset):
    global writes
    writes += 1
    if writes == int(sys.argv[2]):
        real(file, memoryview(data)[: len(data) // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    real(file, data, offset)
module._write = write
store.put(50, b"x" * 1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("write", [1, 2, 3])
def test_a_writer_that_is_killed_in_a_write_leaves_misses_and_no_lock(folder, write):
    store = attach(folder, DATA, MIB)
    store.put(1, body(1))
    killed = subprocess.run([sys.executable, "-c", KILLED, str(store.path), str(write)])
    assert killed.returncode == -9
    assert store.get(50) is None
    assert bytes(store.get(1)) == body(1)
    assert store.put(2, body(2))
    assert bytes(store.get(2)) == body(2)
    assert bytes(store.get(1)) == body(1)


STOPPED = """
import os, signal, sys
from pathlib import Path
from malletrain.datacache import store as module
store = module.NodeStore.open_existing(Path(sys.argv[1]))
def write(file, data, offset):
    os.kill(os.getpid(), signal.SIGSTOP)
    os.pwrite(file, data, offset)
module._write = write
store.put(50, b"x" * 1000)
"""


@pytest.mark.slow
def test_a_writer_that_is_stopped_in_a_write_keeps_nobody_from_reading(folder, monkeypatch):
    monkeypatch.setattr(store_module, "LOCK_TRIES", 3)
    monkeypatch.setattr(store_module, "BLOCKED_S", 0.0)
    store = attach(folder, DATA, MIB)
    store.put(1, body(1))
    stopped = subprocess.Popen([sys.executable, "-c", STOPPED, str(store.path)])
    try:
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
        assert not store.put(2, body(2))
        assert bytes(store.get(1)) == body(1)
        assert not store.full
        monkeypatch.setattr(store_module, "BLOCKED_S", NEVER_S)
        assert not store.put(2, body(2))
        monkeypatch.setattr(fcntl, "lockf", None)
        assert not store.put(3, body(3))  # it does not try
        monkeypatch.undo()
    finally:
        stopped.kill()
        stopped.wait()
    assert attach(folder, DATA, MIB).put(2, body(2))


def _child(store, results):
    store.put(20, body(20))
    results.put((bytes(store.get(10)) == body(10), bytes(store.get(20)) == body(20)))


@pytest.mark.slow
def test_a_forked_process_reads_and_writes_the_same_store(folder):
    store = attach(folder, DATA, MIB)
    store.put(10, body(10))
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    with vars(store)["_lock"]:  # as if another thread were writing
        child = fork.Process(target=_child, args=(store, results))
        child.start()
        assert results.get(timeout=PATIENCE_S) == (True, True)
        child.join()
    assert bytes(store.get(20)) == body(20)
    assert not remove_unused(store.path)
