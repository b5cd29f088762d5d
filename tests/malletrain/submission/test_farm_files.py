"""Whether the tasks of a farm have files of their own: a table with known answers."""

from __future__ import annotations

import os

import pytest

from malletrain.protocol.farm import FarmSpec
from malletrain.submission.error import SpecError
from malletrain.submission.farm import TaskOptions, build_farm, check_files

SEEDS = [(0, [("1", "a"), ("2", "a")]), (2, [("1", "b")])]


def farm_of(**patterns):
    return FarmSpec(("x",), ("seed", "model"), 3, **{"log": "{index}.log", **patterns})


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [
        ({"output": "res/{seed}.txt"}, "--output: task 2 .* would use res/1.txt"),
        ({"output": "res/{model}"}, "--output: task 1 "),
        ({"log": "{seed}.log"}, "--log: task 2 "),
        ({"output": "res//{seed}/../x{model}"}, "--output: task 1 "),
    ],
)
def test_two_tasks_with_one_file_are_refused(patterns, sentence):
    with pytest.raises(SpecError, match=sentence):
        check_files(farm_of(**patterns), SEEDS)


@pytest.mark.parametrize(
    "patterns",
    [
        {},
        {"output": "res/{seed}-{model}.txt"},
        {"output": "res/{index}", "checkpoint": "one-for-all"},
    ],
)
def test_files_that_differ(patterns):
    check_files(farm_of(**patterns), SEEDS)


def test_the_number_of_a_task_can_be_a_column():
    farm = FarmSpec(("x",), ("index",), 2, log="{index}.log")
    with pytest.raises(SpecError, match="task 1 "):
        check_files(farm, [(0, [("7",), ("7",)])])


def test_the_rows_of_an_array_are_not_expanded_one_by_one():
    rows = iter([(0, [("1",), ("2",)])])
    one_array = {"array_range": (1, 2, 1), "log": "{index}.log"}
    check_files(FarmSpec(("x",), ("index",), 2, output="{index}/{{out}}", **one_array), rows)
    assert next(rows, None) is not None
    for pattern in ("{{index}}", "{index}/../out", "../out"):
        farm = FarmSpec(("x",), ("index",), 2, output=pattern, **one_array)
        with pytest.raises(SpecError, match="--output: task 1 "):
            check_files(farm, [(0, [("1",), ("2",)])])


@pytest.mark.parametrize(
    ("command", "noted"),
    [
        (["true"], True),
        (["true", "{{x}}", "{{output}}"], True),
        (["true", "{x}"], False),
        (["true", "{index}"], False),
        (["true", "{output}"], False),
    ],
)
def test_a_note_tells_that_all_tasks_run_the_same_command(command, noted):
    _, notes = build_farm(command, ["x"], 2, TaskOptions(output="{index}"))
    assert any("all tasks run the same one" in note for note in notes) == noted


@pytest.mark.parametrize("option", ["log", "output"])
def test_one_file_for_all_tasks_is_refused(option):
    with pytest.raises(SpecError, match=f"--{option}: all tasks would write to one; add"):
        build_farm(["true", "{x}"], ["x"], 2, TaskOptions(**{option: "one"}))
    build_farm(["true", "{x}"], ["x"], 2, TaskOptions(**{option: "{x}"}))
    build_farm(["true", "{x}"], ["x"], 1, TaskOptions(**{option: "one"}))


def test_a_command_that_is_not_utf8_is_refused():
    with pytest.raises(SpecError, match="is not UTF-8"):
        build_farm(["true", os.fsdecode(b"\xff")], ["x"], 1, TaskOptions())
