"""What failed on a node, from the words and the exit code of launchers."""

from __future__ import annotations

import pytest

from malletrain.agent.failures import killed, signal_of, stock_failures, unfit
from malletrain.protocol import messages
from malletrain.protocol.failures import describe, secondary


def test_an_environment_that_is_not_fit_is_told_in_the_sentence_of_its_log():
    log = "Lmod: unknown module\nmalletrain: The module 'x' cannot be loaded.\n"
    (failure,) = unfit(log, 78, 5.0)
    assert (failure.exitcode, failure.cause) == (78, "The module 'x' cannot be loaded.")
    assert describe([failure]) == "The module 'x' cannot be loaded."
    assert unfit(log, 1, 5.0) == unfit("malletrain: x\nTraceback", 78, 5.0) == ()


def test_torchruns_words_on_a_failure():
    text = (
        "E0101 api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: python\n"
        "E0101 api.py:1002] failed (exitcode: -11) local_rank: 1 (pid: 9) of binary: python\n"
    )
    assert stock_failures(text, 3, 2, 5.0) == (messages.Failure(7, -11, 5.0),)
    assert stock_failures("nothing of the kind", 3, 2, 5.0) == ()


@pytest.mark.parametrize(
    ("code", "number"), [(0, 0), (1, 0), (78, 0), (128, 0), (137, 9), (-9, 9), (143, 15), (255, 0)]
)
def test_the_signal_that_killed_a_process(code, number):
    assert signal_of(code) == number
    failures = killed(code, 4, 5.0)
    assert [(f.rank, f.exitcode, f.time) for f in failures] == (
        [(4, -number, 5.0)] if number else []
    )


def test_a_killed_launcher_is_a_first_cause_and_says_so():
    (failure,) = killed(137, 4, 5.0)
    assert not secondary(failure)
    assert describe([failure]) == (
        "Rank 4 was killed by signal 9: The launcher was killed; often the node ran out of memory."
    )
    (failure,) = killed(139, 4, 5.0)
    assert describe([failure]) == "Rank 4 was killed by signal 11: The launcher was killed."
