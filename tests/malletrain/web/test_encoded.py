"""Large answers: encoded once for a version, packed for those who ask, not sent to those who have
them.
"""

import gzip
import json

import pytest

fastapi = pytest.importorskip("fastapi")

from malletrain.web.api import EncodedAnswers  # noqa: E402


def request(**headers):
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return fastapi.Request({"type": "http", "headers": raw})


def test_a_version_is_made_once_for_all():
    calls = []
    answers = EncodedAnswers()

    def make():
        calls.append(1)
        return list(range(1000))

    for version in (1, 1, 1, 2, 2):
        plain = answers.answer(request(), "nodes", version, make)
        packed = answers.answer(request(accept_encoding="gzip, br"), "nodes", version, make)
        assert json.loads(plain.body) == list(range(1000))
        assert gzip.decompress(packed.body) == plain.body
        assert packed.headers["content-encoding"] == "gzip"
        assert "content-encoding" not in plain.headers
        assert plain.headers["vary"] == packed.headers["vary"] == "accept-encoding"
    assert len(calls) == 2
    small = answers.answer(request(accept_encoding="gzip"), "jobs", 2, list)
    assert small.body == b"[]"


def test_who_has_a_version_is_told_so():
    answers, other = EncodedAnswers(), EncodedAnswers()
    tag = answers.answer(request(), "nodes", 7, list).headers["etag"]
    same = answers.answer(request(if_none_match=f'"x", W/{tag}'), "nodes", 7, list)
    assert (same.status_code, same.body) == (304, b"")
    assert answers.answer(request(if_none_match=tag), "nodes", 8, list).status_code == 200
    assert answers.answer(request(if_none_match=tag), "jobs", 7, list).status_code == 200
    assert other.answer(request(if_none_match=tag), "nodes", 7, list).status_code == 200
