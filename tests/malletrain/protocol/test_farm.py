"""Templates of tasks: known expansions, and sentences about unknown names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.protocol.farm import escaped, expand, template_problems

KNOWN = [
    (["sim", "--seed", "{seed}"], ["seed"], ["7"], ["sim", "--seed", "7"]),
    (["sim", "{}"], ["file"], ["a b.dat"], ["sim", "a b.dat"]),
    (["{a}-{b}/{a}"], ["a", "b"], ["1", "2"], ["1-2/1"]),
    (["run{index}.log"], ["x"], ["9"], ["run4.log"]),
    (["run{index}.log"], ["index"], ["17"], ["run17.log"]),
    (["awk", "{{print $1}}", "{x}"], ["x"], ["f"], ["awk", "{print $1}", "f"]),
    (["{x}"], ["x"], ["{y}{{"], ["{y}{{"]),
    (["a}b"], ["x"], ["1"], ["a}b"]),
    (["{temperature in K}"], ["temperature in K"], ["300"], ["300"]),
    (["{{{x}}}"], ["x"], ["1"], ["{1}"]),
]


@pytest.mark.parametrize(("words", "columns", "values", "expected"), KNOWN)
def test_values_replace_names(words, columns, values, expected):
    assert template_problems(words, columns) == ""
    assert expand(words, columns, values, 4) == expected


def test_further_names_are_replaced():
    words = ["sim", "{seed}", "-o", "{output}"]
    assert template_problems(words, ["seed"], ["output"]) == ""
    assert expand(words, ["seed"], ["7"], 0, {"output": "/tmp/r"}) == ["sim", "7", "-o", "/tmp/r"]


@pytest.mark.parametrize(
    ("words", "columns", "sentence"),
    [
        (["{sed}"], ["seed"], "{sed} in '{sed}' is no column"),
        (["{}"], ["a", "b"], "means the only column, and the tasks have 2"),
        (["x{y"], ["y"], "opening brace without a closing one"),
        (["{print $1}"], ["x"], "Write {{ and }} for braces."),
    ],
)
def test_unknown_names_are_problems(words, columns, sentence):
    assert sentence in template_problems(words, columns)
    assert f"{{{columns[0]}}}" in template_problems(words, columns) or "brace" in template_problems(
        words, columns
    )
    with pytest.raises(ValueError, match=r"known are|brace"):
        expand(words, columns, ["1"] * len(columns), 0)


@given(st.text())
def test_escaped_text_stands_for_itself(text):
    assert expand([escaped(text)], ["a"], ["x"], 0) == [text]
