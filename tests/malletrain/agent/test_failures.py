"""What failed on a node, from the words and the exit code of launchers."""

from __future__ import annotations

import pytest

from malletrain.agent.failures import killed, lacks_folder, signal_of, stock_failures, unfit
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


MISSING = "The process cannot be started: [Errno 2] No such file or directory: '/scratch/me'."


def test_a_working_directory_that_is_missing_on_the_node_is_named():
    (failure,) = lacks_folder(f"of an earlier start\n{MISSING}\n", 126, "/scratch/me", 5.0)
    assert describe([failure]) == ("There is no folder /scratch/me on this node.")
    with_quote = 'The process cannot be started: [Errno 2] No such file or directory: "/it\'s".'
    assert lacks_folder(with_quote, 126, "/it's", 5.0)


@pytest.mark.parametrize(
    ("log", "code", "folder"),
    [
        (MISSING, 126, "/scratch"),
        (MISSING, 126, "/scratch/me/more"),
        (MISSING, 137, "/scratch/me"),
        (f"{MISSING}\nTraceback", 126, "/scratch/me"),
        ("can't open file '/scratch/me': [Errno 2] No such file or directory", 126, "/scratch/me"),
        ("", 126, "/scratch/me"),
    ],
)
def test_another_end_is_not_taken_for_a_missing_directory(log, code, folder):
    assert lacks_folder(log, code, folder, 5.0) == ()
