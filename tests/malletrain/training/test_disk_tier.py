"""Which snapshot is restored: what rank 0 chose, on every rank."""

import os
import threading

import pytest
import torch

from malletrain import Snapshot, SnapshotError
from malletrain.training import disk_tier
from tests.malletrain.training.worker_side import as_plain_script
from tests.waiting import PATIENCE_S


@pytest.fixture
def plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


def agreed(path, keep, store, rank):
    return disk_tier.newest_on_all_ranks(
        str(path), keep, lambda payload, name: None, store, "restore", rank
    )


@pytest.mark.usefixtures("plain")
def test_every_rank_loads_what_rank_0_chose(tmp_path):
    path = tmp_path / "x.pt"
    store = torch.distributed.HashStore()
    for number in (1, 2):
        Snapshot(path, facts={"number": number}).save()
    os.truncate(path, 300)  # rank 0 falls back; rank 1, which checks no sums, must follow
    payload, name = agreed(path, 1, store, 0)
    assert (payload["objects"]["facts"], name) == ({"number": 1}, f"{path}.prev")
    payload, name = agreed(path, 1, store, 1)
    assert (payload["objects"]["facts"], name) == ({"number": 1}, f"{path}.prev")


@pytest.mark.usefixtures("plain")
def test_a_rank_waits_for_a_folder_that_is_late(tmp_path):
    path = tmp_path / "x.pt"
    store = torch.distributed.HashStore()
    Snapshot(path, facts={"number": 1}).save()
    stale = path.read_bytes()
    Snapshot(path, keep=0, facts={"number": 2}).save()
    assert agreed(path, 0, store, 0)[0]["objects"]["facts"] == {"number": 2}
    fresh = path.read_bytes()
    path.write_bytes(stale)
    results = []
    waiter = threading.Thread(target=lambda: results.append(agreed(path, 0, store, 1)[0]))
    waiter.start()
    waiter.join(0.3)
    assert waiter.is_alive()
    (tmp_path / "late").write_bytes(fresh)
    os.replace(tmp_path / "late", path)
    waiter.join(PATIENCE_S)
    assert results[0]["objects"]["facts"] == {"number": 2}


@pytest.mark.usefixtures("plain")
def test_a_folder_that_is_not_shared_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("malletrain.training.disk_tier.SHARED_FOLDER_WAIT_S", 0.1)
    path = tmp_path / "x.pt"
    store = torch.distributed.HashStore()
    Snapshot(path, facts={"number": 1}).save()
    agreed(path, 1, store, 0)
    os.remove(path)
    with pytest.raises(
        SnapshotError,
        match=r"Rank 3 cannot see the snapshot that rank 0 restored.*in a folder that all nodes "
        r"share",
    ):
        agreed(path, 1, store, 3)


@pytest.mark.usefixtures("plain")
def test_nobody_waits_for_a_rank_0_that_failed_or_found_nothing(tmp_path):
    path = tmp_path / "x.pt"
    store = torch.distributed.HashStore()
    assert agreed(path, 1, store, 0) == (None, "")
    assert agreed(path, 1, store, 1) == (None, "")
    path.write_bytes(b"garbage")
    with pytest.raises(SnapshotError, match="No good snapshot is left"):
        agreed(path, 1, store, 0)
    with pytest.raises(SnapshotError, match="No good snapshot is left"):
        agreed(path, 1, store, 1)
