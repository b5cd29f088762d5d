"""The one sentence on why a job failed: the first cause, and what to do where that is known."""

from __future__ import annotations

import pytest

from malletrain.protocol.failures import describe
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
    known = Failure(0, 1, 0.0, "noise\n", cause="ModuleNotFoundError: No module named 'a'")
    assert "pip install" in describe([known])


def test_other_causes_speak_for_themselves():
    assert describe([failed(2, "a.py: error: argument --b: expected one argument\n")]) == (
        "Rank 0 exited with code 2. Its last line: a.py: error: argument --b: expected one argument"
    )
    assert describe([failed(-15, "")]) == "Rank 0 was killed by signal 15."
