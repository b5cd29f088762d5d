"""What ``client.map`` says of tasks without results, whenever the farm ends, and of errors."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest

from malletrain.api.map_results import MapResults
from malletrain.protocol.views import TasksView, TaskView
from malletrain.training.functions import (
    EACH_SCRIPT,
    FunctionFailed,
    FunctionLost,
    FunctionOutcome,
    outcomes,
    pack,
)

FAILED = TaskView(0, ("x",), "failed", tries=1, exit_code=9, tail="no memory")


class Farm:
    """A daemon whose farm of one task fails after ``answers`` answers."""

    def __init__(self, answers):
        self.answers = answers
        self.id, self.name = "j5", "leave"
        self.view = SimpleNamespace(reason="1 of 1 tasks failed")

    def has_ended(self):
        self.answers -= 1
        return self.answers < 0

    def refresh(self):
        return SimpleNamespace(state="failed" if self.has_ended() else "running")

    def do(self, operation):
        assert operation.op == "tasks"
        if not self.has_ended():
            return TasksView("j5", ("x",), 1, {"failed": 0, "done": 0})
        after = operation.params["after"]
        tasks = (FAILED,) if operation.params["limit"] and after < 0 else ()
        return TasksView("j5", ("x",), 1, {"failed": 1, "done": 0}, tasks)


@pytest.mark.parametrize("answers", [0, 1, 2, 3])
def test_the_end_of_a_process_is_named_whenever_the_farm_ends(tmp_path, answers):
    (tmp_path / "results").mkdir()
    farm = Farm(answers)
    results = MapResults(farm, farm, tmp_path, [1], True, None)
    with pytest.raises(FunctionLost, match=r"ended with exit code 9\.\nno memory"):
        next(results)


def test_an_item_whose_function_meets_the_end_of_an_iterator_costs_no_other_result(tmp_path):
    def first(values):
        return next(iter(values))

    script = pack(tmp_path / "f", "each", first, (), {}, text=EACH_SCRIPT)
    (tmp_path / "f" / "results").mkdir()
    items = tmp_path / "items.pkl"
    items.write_bytes(pickle.dumps([[1], [], [3]]))
    written = tmp_path / "f" / "results" / "0.pkl"
    subprocess.run([sys.executable, script, items, written], check=True)
    farm = Farm(100)
    results = MapResults(farm, farm, tmp_path / "f", [3], True, None)
    assert next(results) == 1
    with pytest.raises(FunctionFailed, match="StopIteration"):
        next(results)
    assert list(results) == [3]


def test_a_fork_of_the_function_does_not_go_on_with_the_other_items(tmp_path):
    def note(item):
        child = os.fork() if item == 0 else 1
        if child > 1:
            os.waitpid(child, 0)
        with open(tmp_path / "called", "a") as file:
            file.write(f"{item}\n")
        return os.getpid() if child else "child"

    script = pack(tmp_path / "f", "each", note, (), {}, text=EACH_SCRIPT)
    items = tmp_path / "items.pkl"
    items.write_bytes(pickle.dumps([0, 1, 2]))
    subprocess.run([sys.executable, script, items, tmp_path / "0.pkl"], check=True)
    assert sorted((tmp_path / "called").read_text().split()) == ["0", "0", "1", "2"]
    assert len({one.result() for one in outcomes(tmp_path / "0.pkl")}) == 1


def test_a_stale_handle_of_nfs_costs_no_result_and_no_farm(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "0.pkl").touch()
    answers = [OSError(errno.ESTALE, os.strerror(errno.ESTALE)), [FunctionOutcome(7)]]

    def outcomes(file):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr("malletrain.api.map_results.outcomes", outcomes)
    farm = Farm(100)
    assert list(MapResults(farm, farm, tmp_path, [1], True, None)) == [7]
    answers.append(OSError(errno.EACCES, os.strerror(errno.EACCES)))
    with pytest.raises(PermissionError):
        next(MapResults(farm, farm, tmp_path, [1], True, None))


def test_results_that_stay_unreadable_after_the_farms_end_are_told_as_that(tmp_path, monkeypatch):
    """The result is there; a lost one would let the user run the farm again."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "0.pkl").touch()

    def outcomes(file):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(file))

    monkeypatch.setattr("malletrain.api.map_results.outcomes", outcomes)
    monkeypatch.setattr("malletrain.api.map_results.MAX_OUTAGE_S", 0.0)
    farm = Farm(10**6)
    monkeypatch.setattr(farm, "refresh", lambda: SimpleNamespace(state="completed"))
    with pytest.raises(OSError, match=r"Stale file handle.*0\.pkl"):
        next(MapResults(farm, farm, tmp_path, [1], True, None))


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOENT])
def test_a_file_server_that_restarts_is_told_once_and_ends_no_farm(tmp_path, monkeypatch, number):
    """A with block around a map cancels the farm when the program gets an error."""
    (tmp_path / "results").mkdir()
    for file in ("0.pkl", "1.pkl"):
        (tmp_path / "results" / file).touch()
    failures = [OSError(number, os.strerror(number))] * 4

    def outcomes(file):
        if file.name == "0.pkl" and failures:
            raise failures.pop()
        return [FunctionOutcome(int(file.stem))]

    monkeypatch.setattr("malletrain.api.map_results.outcomes", outcomes)
    monkeypatch.setattr("malletrain.api.map_results.POLL_S", 0.0)
    monkeypatch.setattr("malletrain.api.map_results.MAX_VISIBILITY_DELAY_S", 0.0)
    farm = Farm(1000)
    unordered = MapResults(farm, farm, tmp_path, [1, 1], False, None)
    with pytest.warns(RuntimeWarning, match="results of job j5 .* cannot be read") as warned:
        assert list(unordered) == [1, 0], "the other result is there before"
    assert len(warned) == 1


def test_a_stale_handle_is_waited_for_after_the_farms_end(tmp_path, monkeypatch):
    """Also after the end of a farm that was cancelled, whose results are read once more."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "0.pkl").touch()
    answers = [OSError(errno.ESTALE, os.strerror(errno.ESTALE))] * 3

    def outcomes(file):
        if answers:
            raise answers.pop()
        return [FunctionOutcome(7)]

    monkeypatch.setattr("malletrain.api.map_results.outcomes", outcomes)
    farm = Farm(100)
    monkeypatch.setattr(farm, "refresh", lambda: SimpleNamespace(state="cancelled"))
    assert list(MapResults(farm, farm, tmp_path, [1], True, None)) == [7]
