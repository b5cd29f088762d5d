"""Whose turn it is, among the agents of one machine."""

import os
import subprocess
import sys

import pytest

from malletrain.agent import turns
from malletrain.agent.turns import Turns

HOLDER = """
import sys, time
from malletrain.agent.turns import Turns
print(Turns("d", 1, sys.argv[1]).take(), flush=True)
sys.stdin.read()
"""


def test_as_many_at_a_time_as_there_may_be(tmp_path):
    place = str(tmp_path)
    first, second, third = (Turns("d", 2, place) for _ in range(3))
    assert [one.take() for one in (first, second, third, first)] == [True, True, False, True]
    assert Turns("another", 2, place).take(), "of another daemon"
    third.give()
    assert not third.take()
    second.give()
    assert third.take()
    assert not second.take()
    for one in (first, third):
        one.give()
    assert [path.name.count("turn") for path in tmp_path.iterdir()] == [1], "that of the other"


def test_the_dead_give_theirs_back(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout.readline() == "True\n"
        waits = Turns("d", 1, str(tmp_path))
        assert not waits.take()
        holder.kill()
        holder.wait()
        assert waits.take()
        waits.give()


def test_who_stands_still_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    stands, waits = (Turns("d", 1, str(tmp_path)) for _ in range(2))
    assert stands.take()
    assert not waits.take()
    monkeypatch.setattr(turns, "PATIENCE_S", 0.0)
    assert waits.take()
    stands.give()
    waits.give()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
def test_a_file_of_somebody_else_keeps_nobody_waiting(tmp_path):
    first = Turns("d", 1, str(tmp_path))
    assert first.take()
    (taken,) = tmp_path.iterdir()
    first.give()
    taken.touch()
    os.chown(taken, 65534, 65534)
    assert first.take()
    assert Turns("d", 1, str(tmp_path)).take()
    first.give()
    assert taken.exists()
