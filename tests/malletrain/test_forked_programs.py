"""Programs of tests that are forks end as an interpreter does, and do not outlive their run."""

import pytest

from tests.forks import Forked
from tests.malletrain import forked_programs
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow
pytest.importorskip("torch")

PROGRAM = """
import os, sys, threading
class Last:
    def __del__(self):
        print("destructor")
last = Last()
def end():
    threading.main_thread().join()
    print("thread")
threading.Thread(target=end).start()
print(os.getcwd(), sys.argv, os.environ["COLOUR"], __name__)
print([name for name in sys.modules if name.partition(".")[0] == "malletrain"])
sys.exit("no data")
"""
HANGS = "import signal\nwhile True:\n    signal.pause()"


def test_a_program_ends_as_an_interpreter_does(tmp_path):
    environment = {"COLOUR": "green"}
    ended = forked_programs.run(PROGRAM, "x", folder=tmp_path, environment=environment)
    begin = f"{tmp_path} ['-c', 'x'] green __main__\n[]\n"
    assert (ended.output, ended.errors) == (f"{begin}thread\ndestructor\n", "no data\n")
    assert ended.code == 1


def test_a_program_that_does_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(forked_programs, "PATIENCE_S", 0.0)
    assert forked_programs.run(HANGS, folder=tmp_path).code == -9


def test_a_program_is_killed_where_its_test_is_interrupted(tmp_path, monkeypatch):
    started = []

    def wait(process, _):
        started.append(process)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Forked, "wait", wait)
        with pytest.raises(KeyboardInterrupt):
            forked_programs.run(HANGS, folder=tmp_path)
    try:
        assert started[0].wait(PATIENCE_S) == -9
    finally:
        started[0].kill()
