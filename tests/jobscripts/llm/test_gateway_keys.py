"""Keys of users: what the file has, who may read it, and when a revoked key stops to work."""

from __future__ import annotations

import os
import stat
import threading

import pytest
from llmserve.gateway.keys import KeyFile, UserKeyError


def test_a_key_is_valid_until_it_is_revoked(tmp_path):
    path = tmp_path / "keys.json"
    operator, serving = KeyFile(path), KeyFile(path)
    assert serving.check("llm-00000000-secret") is None  # there is no file yet
    key, text = operator.add("alice", "chat")
    _, other = operator.add("bob")
    assert serving.check(text) == key
    assert (key.user, key.application) == ("alice", "chat")
    assert serving.check(other).user == "bob"
    operator.revoke(key.id)
    assert serving.check(text) is None
    assert not serving.is_valid(key.id)
    assert serving.check(other).user == "bob"


def test_the_file_has_no_secret_and_is_private(tmp_path):
    path = tmp_path / "keys.json"
    mask = os.umask(0)
    try:
        _, text = KeyFile(path).add("alice")
    finally:
        os.umask(mask)
    assert text.split("-", 2)[2] not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(UserKeyError, match=r"can be read or written by other users .*chmod 600"):
        KeyFile(path).check(text)


@pytest.mark.parametrize(
    "wrong",
    ["", "llm", "llm--", "sk-1234", "llm-{id}-", "llm-{id}-{half}", "xxx-{id}-{secret}", "é-é-é"],
)
def test_a_wrong_key_is_none(tmp_path, wrong):
    keys = KeyFile(tmp_path / "keys.json")
    key, text = keys.add("alice")
    secret = text.split("-", 2)[2]
    assert keys.check(wrong.format(id=key.id, secret=secret, half=secret[:20])) is None


def test_a_key_can_be_revoked_by_its_text_and_twice(tmp_path):
    keys = KeyFile(tmp_path / "keys.json")
    _, text = keys.add("alice")
    [first] = keys.revoke(text)
    assert first.revoked is not None
    assert keys.revoke(text) == [first]
    with pytest.raises(UserKeyError, match=r"There is no key abc in .*, and no user abc with keys"):
        keys.revoke("abc")


def test_all_keys_of_a_user_are_revoked_at_once(tmp_path):
    keys = KeyFile(tmp_path / "keys.json")
    (old, _), (first, text), (second, _) = (keys.add("llm-alice-1") for _ in range(3))
    _, other = keys.add("bob")
    keys.revoke(old.id)
    assert [key.id for key in keys.revoke("llm-alice-1")] == [first.id, second.id]
    assert keys.check(text) is None
    assert keys.check(other).user == "bob"
    assert keys.revoke("llm-alice-1") == []


def test_the_id_of_a_key_goes_before_a_user_of_that_name(tmp_path):
    keys = KeyFile(tmp_path / "keys.json")
    key, _ = keys.add("alice")
    _, other = keys.add(key.id)
    assert [each.user for each in keys.revoke(key.id)] == ["alice"]
    assert keys.check(other) is not None


def test_a_broken_file_is_a_sentence(tmp_path):
    path = tmp_path / "keys.json"
    path.touch(0o600)
    path.write_text("[{")
    with pytest.raises(UserKeyError, match=r"is not a file of keys: .*Restore it"):
        KeyFile(path).list()


def test_keys_that_are_made_at_once_are_all_there(tmp_path):
    path = tmp_path / "keys.json"
    threads = [
        threading.Thread(target=KeyFile(path).add, args=(f"user{number}",)) for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.user for key in KeyFile(path).list()} == {f"user{number}" for number in range(8)}
