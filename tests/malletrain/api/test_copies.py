"""Copies of a snapshot that its job replaces meanwhile: one snapshot, or a sentence."""

import os
import pickle
import shutil
import zipfile

import pytest

from malletrain.api import copies
from malletrain.training.snapshot_file import SnapshotError
from tests.malletrain.cli.fake_daemon import detail


def save(work, number, weight):
    """Write a sharded snapshot as the library does: its shards, then the file, renamed."""
    shards = work / "run.pt.shards" / str(number)
    shards.mkdir(parents=True)
    (shards / "a.distcp").write_text(weight)
    payload = {
        "malletrain_snapshot": 1,
        "weight": weight,
        "shards": {"folder": f"run.pt.shards/{number}", "files": {"a.distcp": (len(weight), 0)}},
    }
    with zipfile.ZipFile(work / "next", "w") as archive:
        archive.writestr("run/data.pkl", pickle.dumps(payload))
    os.utime(work / "next", ns=(number, number))
    os.replace(work / "next", work / "run.pt")


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    save(folder, 1, "old")
    return folder


def job(work):
    return detail(spec={**detail().spec, "workdir": str(work), "args": ["--snapshot", "run.pt"]})


def content(folder):
    """The snapshot in ``folder``, and the shards that it names."""
    with zipfile.ZipFile(folder / "run.pt") as archive:
        payload = pickle.loads(archive.read("run/data.pkl"))
    return payload["weight"], (folder / payload["shards"]["folder"] / "a.distcp").read_text()


def replacing(monkeypatch, work, copies_until_quiet):
    """The job writes a snapshot and removes the old one while shards are copied."""
    copy, done = shutil.copytree, []

    def copytree(source, target):
        if len(done) < copies_until_quiet:
            done.append(source)
            save(work, 1 + len(done), f"new {len(done)}")
            shutil.rmtree(source)
        return copy(source, target)

    monkeypatch.setattr(copies.shutil, "copytree", copytree)


def test_only_the_shards_of_the_newest_snapshot_are_copied(work, tmp_path):
    (work / "run.pt.shards" / "2").mkdir()  # the job is about to write its next snapshot
    out = tmp_path / "out"
    assert copies.copy_snapshot(job(work), "", out) == [out / "run.pt", out / "run.pt.shards"]
    assert os.listdir(out / "run.pt.shards") == ["1"]
    save(work, 3, "new")
    copies.copy_snapshot(job(work), "", out)
    assert content(out) == ("new", "new")
    assert os.listdir(out / "run.pt.shards") == ["3"]
    assert sorted(os.listdir(out)) == ["run.pt", "run.pt.shards"], "nothing else is left"


def test_a_snapshot_that_is_replaced_meanwhile_is_copied_again(work, tmp_path, monkeypatch):
    replacing(monkeypatch, work, 2)
    copies.copy_snapshot(job(work), "", tmp_path / "out")
    assert content(tmp_path / "out") == ("new 2", "new 2")


def test_a_copy_of_two_snapshots_is_refused_and_the_earlier_copy_stays(work, tmp_path, monkeypatch):
    copies.copy_snapshot(job(work), "", tmp_path / "out")
    replacing(monkeypatch, work, 100)
    with pytest.raises(SnapshotError, match=r"replaced its snapshot .*run\.pt 5 times"):
        copies.copy_snapshot(job(work), "", tmp_path / "out")
    assert content(tmp_path / "out") == ("old", "old")
    assert sorted(os.listdir(tmp_path / "out")) == ["run.pt", "run.pt.shards"]


def test_a_file_that_is_written_in_place_meanwhile_is_copied_again(tmp_path, monkeypatch):
    """A script's own torch.save does not rename."""
    work, written = tmp_path / "work", []
    work.mkdir()
    (work / "run.pt").write_bytes(b"old" * 100)
    utime = os.utime

    class Slow:
        """The file, during whose first read the script writes it anew."""

        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def fileno(self):
            return self.file.fileno()

        def read(self, size):
            piece = self.file.read(3)
            if piece and not written:
                written.append(1)
                (work / "run.pt").write_bytes(b"new!" * 100)
                utime(work / "run.pt", ns=(5, 5))
            return piece

    def opened(path, mode):
        return Slow(open(path, mode)) if mode == "rb" else open(path, mode)

    monkeypatch.setattr(copies, "open", opened, raising=False)
    copies.copy_snapshot(job(work), "", tmp_path / "out")
    assert (tmp_path / "out" / "run.pt").read_bytes() == b"new!" * 100


def test_the_jobs_own_folder_is_no_target(work):
    with pytest.raises(SnapshotError, match="folder to which the job writes"):
        copies.copy_snapshot(job(work), "", work)
    assert content(work) == ("old", "old")


def test_a_folder_with_the_jobs_id_as_its_name_is_not_its_snapshot(tmp_path, monkeypatch):
    """``malletrain cp j1 j1``, for the second time."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "malletrain-snapshots" / "j1-train-00000000"
    own.mkdir(parents=True)
    (own / "snapshot.pt").write_bytes(b"snapshot")
    spec = {**detail().spec, "workdir": str(tmp_path)}
    for _ in range(2):
        copies.copy_snapshot(detail(spec=spec), "", tmp_path / "j1")
        assert (tmp_path / "j1" / "snapshot.pt").read_bytes() == b"snapshot"
