"""A ``/dev/shm`` that is smaller than the memory for the data, as containers have it: the training
goes on with what fits, its user is told, and no process is killed by a full one.

Each script runs in a mount namespace of its own, with a small file system on ``/dev/shm``.
"""

from __future__ import annotations

import subprocess
import textwrap

import pytest

pytest.importorskip("torch")

from tests.malletrain import forked_programs

MOUNT = """
import ctypes, subprocess, sys
NEWNS = 0x20000  # unshare(2)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(NEWNS) == 0, ctypes.get_errno()
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
size = "size=" + sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", "/dev/shm"], check=True)
"""
COMMON = """
import os, signal, sys, torch, malletrain
from torch.utils.data import DataLoader

class Blocks:
    \"\"\"200 samples of 64 KiB, 12.5 MiB in all.\"\"\"

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.full((1 << 16,), index, dtype=torch.uint8)

def free():
    stats = os.statvfs("/dev/shm")
    return stats.f_bavail * stats.f_frsize

def fill():
    with open("/dev/shm/full", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

def epoch(data, **options):
    \"\"\"Read all samples, and return how many of them were in memory.\"\"\"
    before = data.counts().node_hits
    for batch, first in zip(DataLoader(data, batch_size=4, **options), range(0, 200, 4)):
        assert batch[:, 0].tolist() == list(range(first, first + 4)), batch[:, 0]
        assert bool((batch == batch[:, :1]).all())
    return data.counts().node_hits - before
"""


@pytest.fixture
def run(tmp_path):
    """What a script prints to stdout and stderr with a ``/dev/shm`` of a size."""
    command = ("unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", "/dev/shm")
    probe = subprocess.run(command, capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"no right to mount a small /dev/shm here: {probe.stderr.strip()}")

    def run(script: str, size: str) -> tuple[str, str]:
        program = MOUNT + COMMON + textwrap.dedent(script)
        ended = forked_programs.run(program, size, folder=tmp_path)
        assert ended.code == 0, ended.output + ended.errors
        return ended.output, " ".join(ended.errors.split())

    return run


def test_what_fits_is_cached_and_a_fourth_stays_free_for_loader_workers(run):
    out, err = run(
        """
        data = malletrain.DataCache(Blocks(), name="blocks", memory="64M")
        assert epoch(data) == 0
        print(epoch(data), free() >> 20)
        print(epoch(data, num_workers=2, multiprocessing_context="fork"))
        """,
        "8M",
    )
    hits, free_mib, hits_of_workers = map(int, out.split())
    # 6 MiB less the index and alignment, in samples of 64 KiB.
    assert 90 <= hits <= 96
    assert hits_of_workers == hits
    assert free_mib in (1, 2)
    assert err.count("malletrain:") == 1
    assert (
        "The data cache 'blocks' has 6.29 MB of this node's memory instead of 67.1 MB: samples "
        "that do not fit are read from the data set each time. /dev/shm of this node has 8.39 MB, "
        "and a quarter of it stays free for loader workers, exchanges and snapshots." in err
    )


def test_too_little_for_a_cache_is_said_with_what_to_do(run):
    out, err = run(
        """
        data = malletrain.DataCache(Blocks(), name="blocks", memory="64M")
        print(data.cached, epoch(data))
        """,
        "32k",
    )
    assert out.split() == ["False", "0"]
    assert "'blocks' is read without a cache:" in err
    assert "/dev/shm of this node has 32.8 kB" in err
    assert "docker run --shm-size" in err


def test_memory_that_others_fill_ends_no_process(run):
    out, err = run(
        """
        data = malletrain.DataCache(Blocks(), name="blocks", memory="64M")
        for index in range(20):
            data[index]
        fill()
        assert epoch(data) == 20
        second = malletrain.DataCache(Blocks(), name="blocks", memory="64M")
        print(second.cached, epoch(second), second.counts().reads)
        other = malletrain.DataCache(Blocks(), name="other", memory="64M")
        print(other.cached, epoch(other))
        """,
        "8M",
    )
    assert out.split() == ["True", "20", "200", "False", "0"]
    assert "'other' is read without a cache:" in err


def test_a_large_shared_memory_is_not_limited(run):
    out, err = run(
        """
        data = malletrain.DataCache(Blocks(), name="blocks", memory="16M")
        epoch(data)
        print(epoch(data))
        """,
        "24M",
    )
    assert out.split() == ["200"]
    assert not err
