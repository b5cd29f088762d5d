"""The one sentence on why a job failed: the first cause, and what to do where that is known.

The first error of a script, found in what it and its libraries printed.
"""

from __future__ import annotations

import pytest

from malletrain.protocol.failures import (
    NOISE,
    SCRIPT_ENDED,
    describe,
    first_error,
    no_way,
    raised,
    secondary,
    without_noise,
    without_repeats,
)
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


ARGPARSE = """usage: train.py [-h] [--epochs EPOCHS]
train.py: error: unrecognized arguments: --epochz 3
"""
TORCH = """begin
/usr/lib/torch/x.py:81: UserWarning: Failed to initialize NumPy
  warnings.warn("no numpy")
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/ann/train.py", line 3, in <module>
[rank0]:     data = load("data.npz")
[rank0]: FileNotFoundError: data.npz is not there
[rank0]:[W1122 03:20:10.1 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed
[W1122 03:20:11.123456789 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=5)
Exception raised from recvBytes at ../torch/csrc/distributed/c10d/Utils.hpp:678
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7f in libc10.so)
Exception ignored in: <function Pool.__del__ at 0x7f>
Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/pool.py", line 268, in __del__
ResourceWarning: unclosed running multiprocessing pool
/usr/lib/python3.11/multiprocessing/resource_tracker.py:224: UserWarning: resource_tracker: There appear to be 1 leaked
  warnings.warn('resource_tracker: There appear to be %d '
"""  # noqa: E501
SYNTAX = """  File "/home/ann/train.py", line 2
    x = = 3
        ^
SyntaxError: invalid syntax
"""
CHAIN = """Traceback (most recent call last):
  File "a.py", line 2, in <module>
KeyError: 'mnits'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 4, in <module>
ValueError: no data set is named mnits
Traceback (most recent call last):
  File "b.py", line 9, in at_exit
RuntimeError: called after the end
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (ARGPARSE, "train.py: error: unrecognized arguments: --epochz 3"),
        (TORCH, "FileNotFoundError: data.npz is not there"),
        (SYNTAX, "SyntaxError: invalid syntax"),
        (CHAIN, "ValueError: no data set is named mnits"),
        ("step 1\nstep 2\n", "step 2"),
        ("mypkg.errors.DataError: no such table\nmore\n", "mypkg.errors.DataError: no such table"),
        ("", ""),
        ("malletrain launcher: released\n", "malletrain launcher: released"),
    ],
)
def test_first_error(text, error):
    assert first_error(text) == error


def test_noise_is_left_out_and_nothing_else():
    assert without_noise(TORCH).splitlines() == [
        "begin",
        "Traceback (most recent call last):",
        '  File "/home/ann/train.py", line 3, in <module>',
        '    data = load("data.npz")',
        "FileNotFoundError: data.npz is not there",
    ]
    for text in (ARGPARSE, SYNTAX, CHAIN):
        assert without_noise(text) == text.strip("\n")


def test_every_pattern_says_where_it_comes_from():
    assert all(pattern and source for pattern, source in NOISE)


def test_a_cause_that_is_known_is_told():
    failure = Failure(0, 2, 1.0, ARGPARSE, "train.py: error: unrecognized arguments: --epochz 3")
    assert describe([failure]) == (
        "Rank 0 exited with code 2: train.py: error: unrecognized arguments: --epochz 3"
    )


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        ("step 3\nNo space left in /scratch", ". Its last line: No space left in /scratch"),
        (
            '  File "/a/train.py", line 3, in run\nOSError: busy',
            ": OSError: busy (train.py, line 3",
        ),
        ("", "."),
    ],
)
def test_a_script_with_the_exit_code_of_a_restart_is_described_as_any_other(tail, words):
    failure = Failure(0, 75, 0.0, tail, cause=SCRIPT_ENDED)
    assert describe([failure]).startswith(f"Rank 0 exited with code 75{words}")


LOADER = """Traceback (most recent call last):
  File "/home/ann/train.py", line 9, in <module>
    for batch in loader:
  File "/site-packages/torch/utils/data/dataloader.py", line 701, in __next__
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/ann/data.py", line 3, in __getitem__
    raise ValueError("sample 7 is empty.")
ValueError: sample 7 is empty.
[W1122 03:20:11.123456789 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=5)
"""
OWN = """epoch 3
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 30, in main
[rank1]:     step()
[rank1]: mypkg.Diverged
"""
CUT_OFF = """    loss = step(batch)
           ^^^^^^^^^^^
  File "/home/ann/train.py", line 5, in step
    return net(batch)
RuntimeError: mat1 and mat2 shapes cannot be multiplied
with (8x3)
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (LOADER, "ValueError: sample 7 is empty (data.py, line 3, in __getitem__)"),
        (OWN, "mypkg.Diverged (train.py, line 30, in main)"),
        (
            CUT_OFF,
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (train.py, line 5, in step)",
        ),
        (TORCH, "FileNotFoundError: data.npz is not there (train.py, line 3, in module)"),
        (ARGPARSE, ""),
        ("ValueError: skipped a sample\n", ""),
        ("", ""),
    ],
)
def test_what_was_raised_and_where(text, error):
    assert raised(text) == error


def test_a_failure_is_told_by_its_exception_and_not_by_its_last_line():
    tail = OWN.replace("Diverged", "Diverged: loss is nan") + "wandb: synced\n"
    assert describe([Failure(1, 1, 0.0, tail)]) == (
        "Rank 1 exited with code 1: mypkg.Diverged: loss is nan (train.py, line 30, in main)."
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("a\nb\na", "a\nb\na"),
        ("a\na\nb\nb\nb\na", "a (2 times)\nb (3 times)\na"),
        ("a\n\n\nb\n", "a\n\n\nb"),
    ],
)
def test_equal_lines_that_follow_each_other_are_one_with_their_number(text, shown):
    assert without_repeats(text) == shown
