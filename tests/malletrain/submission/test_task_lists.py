"""The tasks of a farm: which inputs are read, what they mean, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.protocol.farm import MAX_ROWS
from malletrain.submission import task_lists
from malletrain.submission.error import SpecError
from malletrain.submission.task_lists import (
    GROUP_BYTES,
    TaskInput,
    TaskList,
    array_of,
    files_of,
    natural,
    open_lines,
    open_tasks,
)


def read(
    text: str | bytes, name: str = "runs.csv"
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    data = text.encode() if isinstance(text, str) else text
    source = open_tasks(io.BytesIO(data), name)
    tasks = TaskList(source)
    return tasks.columns, tasks.head(tasks.count)


@pytest.mark.parametrize(
    ("text", "name", "columns", "rows"),
    [
        ("a,b\n1,2\n3,4\n", "t.csv", ("a", "b"), [("1", "2"), ("3", "4")]),
        ("a, b\r\n1,2\r\n", "t.txt", ("a", "b"), [("1", "2")]),
        ("\n\na\n\n1\n\n2", "t.csv", ("a",), [("1",), ("2",)]),
        ('a,b\n"x, y","two\nlines"\n', "t.csv", ("a", "b"), [("x, y", "two\nlines")]),
        ("a\tb\n1, 2\t3\n", "t.txt", ("a", "b"), [("1, 2", "3")]),
        ("a,b\tc\n1\t2\n", "t.tsv", ("a,b", "c"), [("1", "2")]),
        ("﻿a\nä\n", "t.csv", ("a",), [("ä",)]),
        (
            '{"lr": 1e-3, "s": "x"}\n\n{"s": null, "lr": 0.10}\n',
            "-",
            ("lr", "s"),
            [("1e-3", "x"), ("0.10", "")],
        ),
        ('\n{"a": true, "b": [1, 2]}\n', "t.jsonl", ("a", "b"), [("true", "[1, 2]")]),
    ],
)
def test_tables(text, name, columns, rows):
    assert read(text, name) == (columns, rows)


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        ("", "t.csv", "t.csv is empty"),
        ("\n \n", "t.csv", "t.csv is empty"),
        ("a,b\n", "t.csv", "t.csv has no tasks"),
        ("a,b\n1,2\n3\n", "t.csv", r"line 3 has 1 value, and the header has 2 columns \(a, b\)"),
        ('a,b\n"x\ny",2\n3,4,5\n', "t.csv", "line 4 has 3 values"),
        ("a,b,a\n1,2,3\n", "t.csv", "two columns called a"),
        ("a,,b\n1,2,3\n", "t.csv", "column 2 has no name"),
        ("a{\n1\n", "t.csv", "no braces"),
        ('a\n"x\n', "t.csv", "t.csv line 2: "),
        ("a\nx\0y\n", "t.csv", "NUL"),
        (b"a\n1\n\xff\n", "t.csv", "t.csv line 3 is not UTF-8"),
        ("a\n" + "x" * 40000 + "\n", "t.csv", "the value of a is longer than 32,768"),
        ('{"a": 1}\n{"b": 1}\n', "t.jsonl", "line 2 has no a"),
        ('{"a": 1}\n{"a": 1, "b": 1}\n', "t.jsonl", "line 2 has b"),
        ('{"a": 1}\nx\n', "t.jsonl", "line 2 is no JSON object"),
        ("[1]\n", "t.txt", "line 1 is no JSON object"),
        (",".join(f"c{k}" for k in range(101)) + "\n", "t.csv", "101 columns"),
    ],
)
def test_what_is_no_table_is_refused(text, name, sentence):
    with pytest.raises(SpecError, match=sentence):
        read(text, name)


VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=20))
def test_csv_written_by_python_is_read_back(rows):
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows([("a", "b"), *rows])
    # A line break in a value is a line break of the file; csv keeps only those it wrote.
    assert read(text.getvalue())[1] == rows


@given(st.lists(st.dictionaries(st.sampled_from("ab"), VALUES, min_size=2), min_size=1))
def test_json_lines_are_read_back(rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    columns, read_rows = read(text, "t.jsonl")
    assert [dict(zip(columns, row, strict=True)) for row in read_rows] == rows


def test_lines():
    source = open_lines(io.BytesIO(b"a b\n\n c\r\nlast"), "stdin")
    assert source.columns == ("line",)
    assert [values for _, values in source.rows] == [("a b",), (" c",), ("last",)]


def test_files_are_in_natural_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("run10.nc", "run2.nc", "run1.nc", "b[1].nc", "other.txt"):
        (tmp_path / name).touch()
    source = files_of(["run*.nc", "b[1].nc", "run2.nc"])
    assert source.columns == ("path",)
    assert [values[0] for _, values in source.rows] == [
        "b[1].nc",
        "run1.nc",
        "run2.nc",
        "run10.nc",
    ]
    with pytest.raises(SpecError, match=r"\*\.h5 matches no file"):
        files_of(["run*.nc", "*.h5"])


@given(st.lists(st.integers(min_value=0, max_value=10**12)))
def test_natural_order_of_numbers_is_that_of_the_numbers(numbers):
    names = [f"x{number}.dat" for number in numbers]
    assert sorted(names, key=natural) == [f"x{number}.dat" for number in sorted(numbers)]


@pytest.mark.parametrize(
    ("text", "indices", "at_once"),
    [
        ("1-4", "1 2 3 4", None),
        ("0-20:5%2", "0 5 10 15 20", 2),
        ("1,4,9", "1 4 9", None),
    ],
)
def test_arrays(text, indices, at_once):
    source, limit = array_of(text)
    assert ([values[0] for _, values in source.rows], limit) == (indices.split(), at_once)


@pytest.mark.parametrize("text", ["", "%5", "1-3%", "4-1", "a", "1-2000000"])
def test_what_is_no_array_is_refused(text):
    with pytest.raises(SpecError):
        array_of(text)


@given(st.lists(st.integers(min_value=0, max_value=3000), min_size=1, max_size=60))
def test_groups_hold_all_tasks_in_order_and_fit_into_requests(sizes):
    rows = [(f"{k}" + "x" * (size * 10),) for k, size in enumerate(sizes)]
    tasks = TaskList(TaskInput("t", ("a",), enumerate(rows, 1)))
    groups = list(tasks.groups())
    assert [row for _, group in groups for row in group] == rows
    starts = [first for first, _ in groups]
    assert starts == [sum(len(group) for _, group in groups[:k]) for k in range(len(groups))]
    for _, group in groups:
        assert len(group) == 1 or sum(len(row[0]) for row in group) <= GROUP_BYTES
        assert len(group) <= MAX_ROWS


@pytest.mark.parametrize(
    ("count", "limit_bytes"),
    [(50_000, 20e6), pytest.param(1_000_000, 200e6, marks=pytest.mark.thorough)],
)
def test_many_rows_need_little_memory(count, limit_bytes):
    rows = ((k, (str(k), "configuration-of-a-run", "0.125")) for k in range(1, count + 1))
    tracemalloc.start()
    try:
        tasks = TaskList(TaskInput("t", ("a", "b", "c"), rows))
        assert tasks.count == count
        assert tracemalloc.get_traced_memory()[1] < limit_bytes
    finally:
        tracemalloc.stop()
    assert tasks.head(1) == [("1", "configuration-of-a-run", "0.125")]


def test_too_many_rows_are_refused(monkeypatch):
    monkeypatch.setattr(task_lists, "MAX_TASKS", 10)
    TaskList(TaskInput("t", ("a",), ((k, ("x",)) for k in range(10))))
    with pytest.raises(SpecError, match="t has more than 10 tasks"):
        TaskList(TaskInput("t", ("a",), ((k, ("x",)) for k in range(11))))


def test_names_that_are_not_utf8_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).touch()
    with pytest.raises(SpecError, match=r"not UTF-8: b'caf\\xe9.txt'; rename it"):
        files_of(["*.txt"])
