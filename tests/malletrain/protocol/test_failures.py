"""The one sentence on why a job failed: the first cause, and what to do where that is known."""

from __future__ import annotations

import pytest

from malletrain.protocol.failures import describe, no_way, secondary
from malletrain.protocol.messages import Failure


def failed(exitcode, tail):
    return Failure(0, exitcode, 0.0, tail)


@pytest.mark.parametrize(
    ("exitcode", "tail", "words"),
    [
        (1, "ModuleNotFoundError: No module named 'a'", "pip install"),
        (1, "[rank0]: ModuleNotFoundError: No module named 'a.b'\n\n", "pip install"),
    ],
)
def test_the_mend_is_named_where_the_cause_is_known(exitcode, tail, words):
    assert words in describe([failed(exitcode, tail)])


def test_the_mend_stands_after_a_known_cause_too():
    failure = Failure(0, 1, 0.0, "noise\n", cause="ModuleNotFoundError: No module named 'a'")
    assert "pip install" in describe([failure])


def test_other_causes_speak_for_themselves():
    assert describe([failed(2, "a.py: error: argument --b: expected one argument\n")]) == (
        "Rank 0 exited with code 2. Its last line: a.py: error: argument --b: expected one argument"
    )
    assert describe([failed(-15, "")]) == "Rank 0 was killed by signal 15."


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("RuntimeError: [/gloo/transport/tcp/pair.cc:144] connect [10.0.0.2]:9: {}", True),
        ("The client socket has failed to connect to [n1]:9 (errno: 113 - {}).", True),
        ("socket.gaierror\nOSError: [Errno 101] {}", False),
        ("Failed to establish a new connection: [Errno 113] {}'))", False),
    ],
)
@pytest.mark.parametrize(
    "words", ["No route to host", "Network is unreachable", "Host is unreachable"]
)
def test_a_way_that_a_firewall_rejects_is_a_lost_peer_and_a_download_that_fails_is_none(
    tail, expected, words
):
    failure = failed(1, tail.format(words))
    assert (secondary(failure), no_way(failure.tail)) == (expected, expected)
