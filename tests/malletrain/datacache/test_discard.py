"""Removing the samples of a name from a node's memory."""

from __future__ import annotations

from malletrain import DataCache
from malletrain.protocol import env


def test_samples_of_a_name_are_removed_once_nobody_uses_them(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(env.DATA, str(folder))
    assert not DataCache.discard("digits"), "there is none"
    cache = DataCache([b"a", b"b"], name="digits", memory="1M")
    assert cache[1] == b"b"
    assert not DataCache.discard("digits"), "it is in use"
    cache.close()
    assert list(folder.glob("digits*")), "the samples stay for other processes"
    assert DataCache.discard("digits")
    assert not list(folder.glob("digits*.samples"))
