"""The cache from the shell: files stay what they are until an object is there whole."""

import os

import pytest
from infinicache import CacheError
from infinicache.cli import main
from infinicache.sync import Cache

from tests.jobscripts.infinicache.pool import KEY
from tests.jobscripts.infinicache.test_forks import served as served

pytestmark = pytest.mark.slow


@pytest.fixture
def cache(served, monkeypatch):
    """The command line against a pool of this process."""
    monkeypatch.setenv("MALLETRAIN_JOB_KEY", KEY.hex())
    return lambda *words: main(["--at", ",".join(served.addresses), *map(str, words)])


def test_a_file_is_replaced_by_a_whole_object_only(cache, tmp_path, monkeypatch, capsys):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(100_000))
    target.write_text("what was there")
    assert cache("get", "k", target) == 1
    assert target.read_text() == "what was there", "a miss leaves the file alone"
    assert cache("put", "k", source) == 0
    get_stream = Cache.get_stream

    def lost_on_the_way(self, key):
        yield next(get_stream(self, key))[:50]
        raise CacheError("It was lost while it was read.")

    with monkeypatch.context() as broken:
        broken.setattr(Cache, "get_stream", lost_on_the_way)
        assert cache("get", "k", target) == 1
    assert "lost while it was read" in capsys.readouterr().err
    assert target.read_text() == "what was there"
    link = tmp_path / "link"
    link.symlink_to(target)
    assert cache("get", "k", link) == 0
    assert target.read_bytes() == source.read_bytes()
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "source", "target"]


def test_what_is_no_file_is_written_to(cache, tmp_path):
    (tmp_path / "empty").touch()
    assert cache("put", "k", tmp_path / "empty") == 0
    assert cache("get", "k", "/dev/null") == 0
    assert cache("get", "k", tmp_path / "copy") == 0
    assert (tmp_path / "copy").read_bytes() == b""


def test_a_key_that_is_no_text_is_refused_in_a_sentence(cache, tmp_path, capsys):
    assert cache("stat", "\udcff") == 1
    assert "half of a character" in capsys.readouterr().err
