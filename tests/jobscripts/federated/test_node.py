"""The process of a node without Flower: its SuperNode is a script that notes that it runs."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from fedcase import node
from fedcase.node import SuperNode, serve

from malletrain.membership import LEAVING, STAYING, Change, Member
from tests.waiting import until

ME, OTHER = Member("n1", "h", "a"), Member("n2", "h", "b")
PROGRAM = f"""#!{sys.executable}
import os, signal, sys, time
log = os.open({{log!r}}, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
def note(*words):
    os.write(log, (" ".join(map(str, words)) + "\\n").encode())  # also within a signal handler
signal.signal(signal.SIGTERM, lambda *_: (note("left"), sys.exit(0)))
note("runs", os.getpid(), *sys.argv[1:3], sys.argv[-1])
while not os.path.exists({{end!r}}):
    time.sleep(0.01)
sys.exit(1)
"""


class Group:
    """A membership whose changes are those of ``story``, a generator."""

    me = ME

    def __init__(self, story):
        self.changes, self.drained = story, 0

    def report_drained(self):
        self.drained += 1


@pytest.fixture
def log(tmp_path):
    """The lines of the SuperNode's log."""
    path = tmp_path / "log"
    return lambda: path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def supernode(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "flower-supernode"
    program.write_text(PROGRAM.format(log=str(tmp_path / "log"), end=str(tmp_path / "end")))
    program.chmod(0o755)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield SuperNode("head:9091", "n1", str(folder), ["--insecure"])
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_notice_stops_the_supernode_and_its_withdrawal_starts_it_again(supernode, log):
    def story():
        until(lambda: len(log()) == 1, "it runs")
        yield Change(LEAVING, OTHER)
        yield Change(LEAVING, ME)
        until(lambda: group.drained, "the node is drained")
        assert log()[1:] == ["left"], "the SuperNode has left before the node is given back"
        yield Change(STAYING, ME)
        until(lambda: len(log()) == 3, "it runs again")
        os.kill(os.getpid(), signal.SIGTERM)

    group = Group(story)
    assert serve(supernode, group) == 0
    lines = log()
    assert [line.split()[0] for line in lines] == ["runs", "left", "runs", "left"]
    assert lines[0].split()[2:] == ["--superlink", "head:9091", "--insecure"]
    assert group.drained == 1


def test_a_supernode_that_dies_is_a_failure(supernode, log, tmp_path):
    def story():
        until(lambda: len(log()) == 1, "it runs")
        (tmp_path / "end").touch()
        yield Change(LEAVING, OTHER)

    assert serve(supernode, Group(story)) == 1


def test_an_address_without_a_port_is_refused(capsys):
    with pytest.raises(SystemExit):
        node.main(["--superlink", "head"])
    assert "head is not an address; write HOST:PORT" in capsys.readouterr().err


def test_a_missing_flower_is_a_sentence(tmp_path, capsys):
    assert node.main(["--superlink", "head:1", "--flower", str(tmp_path)]) == 1
    assert f"flower-supernode is not in {tmp_path}" in capsys.readouterr().err
