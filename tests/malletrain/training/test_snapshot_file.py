"""Snapshot files on a real disk: full, limited, torn, flipped, killed half-way. A good one is
always left.
"""

import contextlib
import errno
import functools
import multiprocessing
import os
import resource

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from malletrain.training import snapshot_file
from malletrain.training.snapshot_file import (
    SnapshotError,
    candidates,
    read,
    write,
)
from tests.disks import small_disk
from tests.draws import cases

pytestmark = pytest.mark.slow


def payload(number, size=1000, **objects):
    return {
        "malletrain_snapshot": 1,
        "id": str(number),
        "objects": {"weights": torch.full((size,), float(number)), **objects},
    }


def number_in(path):
    payload = read(path)
    assert (payload["objects"]["weights"] == float(payload["id"])).all()
    return int(payload["id"])


def names_in(folder):
    return sorted(os.listdir(folder))


@pytest.mark.parametrize(
    ("keep", "names"),
    [
        (0, ["x.pt"]),
        (1, ["x.pt", "x.pt.prev"]),
        (3, ["x.pt", "x.pt.prev", "x.pt.prev2", "x.pt.prev3"]),
    ],
)
def test_the_newest_and_the_ones_before_it_stay(tmp_path, keep, names):
    path = str(tmp_path / "new" / "folder" / "x.pt")
    for number in range(6):
        size = write(path, payload(number), keep)
        assert size == os.path.getsize(path)
    assert names_in(os.path.dirname(path)) == names
    assert [number_in(name) for name in candidates(path, keep)] == [5, 4, 3, 2][: keep + 1]


@pytest.mark.parametrize("links", [True, False])
def test_a_newer_one_takes_the_place_of_the_newest(tmp_path, monkeypatch, links):
    """At once, where the file system has hard links: another run never finds the place empty."""
    path = str(tmp_path / "x.pt")
    empty = []

    def replace(source, target, really=os.replace):
        really(source, target)
        empty.append(not os.path.exists(path))

    def refuse(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted", source)

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    for number in range(4):
        write(path, payload(number), 2, overtaken=(lambda: None) if not number else None)
        monkeypatch.setattr(os, "replace", replace)
    assert [number_in(name) for name in candidates(path, 2)] == [3, 2, 1]
    assert names_in(tmp_path) == ["x.pt", "x.pt.prev", "x.pt.prev2"]
    assert any(empty) != links


def test_killed_between_keeping_and_replacing(tmp_path):
    """The newest and the one before it are one file then, and stay two names of good ones."""
    path = str(tmp_path / "x.pt")
    write(path, payload(1), 1)
    os.link(path, path + ".prev")
    write(path, payload(2), 1)
    assert [number_in(name) for name in candidates(path, 1)] == [2, 1]
    assert names_in(tmp_path) == ["x.pt", "x.pt.prev"]


def test_the_first_one_is_never_overwritten_unasked(tmp_path):
    path = str(tmp_path / "x.pt")
    write(path, payload(1), 1)

    def refuse():
        raise SnapshotError("another's")

    with pytest.raises(SnapshotError, match="another's"):
        write(path, payload(2), 1, overtaken=refuse)
    assert names_in(tmp_path) == ["x.pt"]
    write(path, payload(2), 1, overtaken=lambda: None)
    assert [number_in(name) for name in candidates(path, 1)] == [2, 1]


def test_a_damaged_newest_file_is_replaced_and_does_not_push_out_the_good_one(tmp_path):
    path = str(tmp_path / "x.pt")
    write(path, payload(1), 1)
    write(path, payload(2), 1)
    with open(path, "r+b") as file:
        file.truncate(100)
    write(path, payload(3), 1, keep_newest=False)
    assert [number_in(name) for name in candidates(path, 1)] == [3, 1]


@contextlib.contextmanager
def file_size_limit(limit):
    """No file of this process may grow over ``limit`` bytes (python ignores SIGXFSZ, so that
    write() fails with EFBIG).
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(params=["full disk", "file size limit"])
def cramped(request, tmp_path):
    """(folder, context in which large files cannot be written there, the disk's reason)"""
    if request.param == "full disk":
        with small_disk(tmp_path):
            yield tmp_path, contextlib.nullcontext, errno.ENOSPC
    else:
        yield tmp_path, functools.partial(file_size_limit, 300_000), errno.EFBIG


@pytest.mark.parametrize("size", [110_000, 125_000, 1_000_000])
def test_what_does_not_fit_leaves_the_last_good_one_and_no_rubbish(cramped, size):
    folder, limits, reason = cramped
    path = str(folder / "x.pt")
    write(path, payload(1, size=10_000), 1)
    write(path, payload(2, size=10_000), 1)
    before = names_in(folder)
    with limits(), pytest.raises(OSError, match=os.strerror(reason)) as caught:
        write(path, payload(3, size), 1)
    assert caught.value.errno == reason
    assert names_in(folder) == before
    assert [number_in(name) for name in candidates(path, 1)] == [2, 1]
    write(path, payload(4, size=10_000), 1)
    assert [number_in(name) for name in candidates(path, 1)] == [4, 2]


def test_a_path_below_a_file_is_an_ordinary_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        write(str(tmp_path / "file" / "x.pt"), payload(1), 1)


def test_an_object_that_cannot_be_written_leaves_no_rubbish(tmp_path):
    with pytest.raises(AttributeError, match=r"[Pp]ickle"):
        write(str(tmp_path / "x.pt"), payload(1, hook=lambda: None), 1)
    assert names_in(tmp_path) == []


@example(where=0.9921875, bit=0)
@settings(deadline=None, max_examples=cases(60))
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_or_harmless(tmp_path_factory, where, bit):
    path = str(tmp_path_factory.mktemp("flip") / "x.pt")
    write(path, payload(7), 0)
    with open(path, "r+b") as file:
        content = bytearray(file.read())
        content[int(where * len(content))] ^= 1 << bit
        file.seek(0)
        file.write(content)
    try:
        number = number_in(path)
    except SnapshotError:
        return
    assert number == 7  # a bit of padding or of the archive's own bookkeeping


@settings(deadline=None, max_examples=cases(40))
@given(st.floats(0, 1, exclude_max=True))
def test_a_torn_file_is_noticed(tmp_path_factory, share):
    path = str(tmp_path_factory.mktemp("torn") / "x.pt")
    write(path, payload(7), 0)
    os.truncate(path, int(share * os.path.getsize(path)))
    with pytest.raises(SnapshotError, match="damaged"):
        read(path)


def test_flipped_weights_are_noticed_even_where_the_user_turned_the_sums_off(tmp_path):
    path = str(tmp_path / "x.pt")
    torch.serialization.set_crc32_options(False)
    try:
        write(path, payload(7), 0)
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    assert number_in(path) == 7
    with open(path, "rb") as file:
        content = file.read()
    weights = torch.full((1000,), 7.0).numpy().tobytes()
    assert weights in content
    with open(path, "wb") as file:
        file.write(content.replace(weights, weights[:-1] + b"\x41"))
    with pytest.raises(SnapshotError, match="check sum"):
        read(path)


@pytest.mark.parametrize("other", [{"model": 1}, [1, 2], {"malletrain_snapshot": 1}])
def test_other_files_are_not_snapshots(tmp_path, other):
    torch.save(other, tmp_path / "x.pt")
    with pytest.raises(SnapshotError, match=r"is not a snapshot written by malletrain\.Snapshot"):
        read(str(tmp_path / "x.pt"))


def test_a_later_format_is_refused(tmp_path):
    torch.save(payload(1) | {"malletrain_snapshot": 3}, tmp_path / "x.pt")
    with pytest.raises(SnapshotError, match="format 3"):
        read(str(tmp_path / "x.pt"))


class Odd:
    """Not plain data."""


def test_code_in_a_snapshot_is_trusted_only_where_its_owner_alone_can_have_written_it(tmp_path):
    path = str(tmp_path / "x.pt")
    before = os.umask(0)
    try:
        write(path, payload(1, odd=Odd()), 0)
    finally:
        os.umask(before)
    assert isinstance(read(path)["objects"]["odd"], Odd)
    os.chmod(path, 0o664)
    with pytest.raises(SnapshotError, match="chmod go-w"):
        read(path)


def test_left_over_temporary_files_of_others_are_removed(tmp_path):
    path = str(tmp_path / "x[1].pt")
    write(path, payload(1), 0)
    (tmp_path / "x[1].pt.tmp-elsewhere-12").write_text("half")
    (tmp_path / "x1.pt.tmp-elsewhere-12").write_text("of another snapshot")
    snapshot_file.remove_leftovers(path)
    assert names_in(tmp_path) == ["x1.pt.tmp-elsewhere-12", "x[1].pt"]


def write_for_ever(path, first, confirmed):
    for number in range(first, first + 10_000):
        write(path, payload(number, size=20_000), 1)
        confirmed.send(number)


def test_killed_at_any_instant_leaves_a_good_snapshot(tmp_path):
    path = str(tmp_path / "x.pt")
    # Not by a fork of this process: it has threads, whose locks the child would hold for ever.
    clean = multiprocessing.get_context("forkserver")
    for round_number in range(12):
        before = int(read(path)["id"]) if candidates(path, 1) else 0
        ours, theirs = clean.Pipe(duplex=False)
        child = clean.Process(target=write_for_ever, args=(path, before + 1, theirs))
        child.start()
        theirs.close()
        confirmed = [ours.recv() for _ in range(1 + round_number % 3)][-1]
        child.kill()
        child.join()
        ours.close()
        newest = candidates(path, 1)[0]
        assert number_in(newest) >= confirmed > before
        if newest != path:
            os.rename(newest, path)
