"""The value file of a service, and what submit makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from malletrain.submission.curve_file import read_value, span
from malletrain.submission.error import SpecError
from malletrain.submission.options import ScriptOptions
from malletrain.submission.spec import build


def write(tmp_path, text):
    path = tmp_path / "value"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nodes,value\n1,10\n4,80.5\n", {"1": 10.0, "4": 80.5}),
        ("# a comment\n\nNodes, Value\n8,5\n2,7\n", {"2": 7.0, "8": 5.0}),  # need not grow
        ("nodes,value\n3,0\n4,100\n8,130\n", {"3": 0.0, "4": 100.0, "8": 130.0}),  # nor be concave
        ("nodes,value\n1,0\n8,0\n", {"1": 0.0, "8": 0.0}),  # no node until it is valued
        ("# toml\n[value]\n4 = 100\n2 = 1.5\n", {"2": 1.5, "4": 100.0}),
    ],
)
def test_both_forms(tmp_path, text, expected):
    assert read_value(write(tmp_path, text)) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "lists no size"),
        ("nodes,value\n", "lists no size"),
        ("nodes,samples_per_s\n1,2\n", 'The first line is "nodes,samples_per_s"'),
        ("nodes,value\n1\n", 'line 2: "1" is not two numbers'),
        ("nodes,value\n1,ten\n", 'line 2: "1,ten" is not two numbers'),
        ("nodes,value\n1.5,1\n", "1.5 is not a number of nodes"),
        ("nodes,value\n0,1\n", "0 is not a number of nodes"),
        ("nodes,value\n1,-1\n", "-1 is not a value"),
        ("nodes,value\n1,inf\n", "inf is not a value"),
        ("nodes,value\n1,1\n1,2\n", "1 nodes are named twice"),
        ("[value]\n1 = 'x'\n", "is not a size and its value"),
        ("[values]\n1 = 2\n", "The file has the sections values"),
        ("[value\n", "not valid TOML"),
        (f"[value]\n1 = 1{'0' * 400}\n", "is too large"),
        (f"nodes,value\n1,{'1' * 200_000}\n", "This is not valid CSV"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, sentence):
    with pytest.raises(SpecError) as caught:
        read_value(write(tmp_path, text))
    assert sentence in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SpecError, match="cannot be read"):
        read_value(tmp_path / "nothing")


def test_the_sizes_that_are_worth_something():
    assert span({"2": 0.0, "4": 1.0, "16": 0.5}) == "4:16"
    assert span({"2": 0.0, "16": 0.0}) == "2:16"


def test_submit(tmp_path):
    script = write(tmp_path, "nodes,value\n2,0\n4,10\n8,11\n")
    spec = build(str(script), (), ScriptOptions(service=True, value=script))
    assert (spec.mode, spec.min_nodes, spec.max_nodes, spec.nproc_per_node) == ("service", 4, 8, 1)
    assert (spec.curve, spec.profile, spec.goal) == (
        {"2": 0.0, "4": 10.0, "8": 11.0},
        False,
        "throughput",
    )
    assert (
        build(str(script), (), ScriptOptions(service=True, value=script, nodes="5")).max_nodes == 5
    )


def test_auto_is_worth_a_little_until_its_process_says_more(tmp_path):
    script = tmp_path / "script.py"
    script.touch()
    spec = build(str(script), (), ScriptOptions(service=True, value=Path("auto"), nodes="2:16"))
    assert (spec.mode, spec.min_nodes, spec.max_nodes) == ("service", 2, 16)
    assert spec.curve == {"2": 1.0}


def test_a_service_may_be_worth_nothing_at_first(tmp_path):
    script = tmp_path / "script.py"
    script.touch()
    spec = build(str(script), (), ScriptOptions(service=True, value=Path("0"), nodes="2:16"))
    assert (spec.mode, spec.min_nodes, spec.max_nodes) == ("service", 2, 16)
    assert spec.curve == {"1": 0.0}
    value = write(tmp_path, "nodes,value\n2,0\n16,0\n")
    spec = build(str(script), (), ScriptOptions(service=True, value=value))
    assert (spec.min_nodes, spec.max_nodes, spec.curve) == (2, 16, {"2": 0.0, "16": 0.0})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"service": True}, "--value FILE"),
        ({"value": "nodes,value\n1,1\n"}, "--value is for services"),
        ({"service": True, "value": "nodes,value\n1,1\n", "live": True}, "leave --live"),
        (
            {"service": True, "value": "nodes,value\n1,1\n", "nproc_per_node": 2},
            "one process on each node",
        ),
    ],
)
def test_options_that_do_not_go_together(tmp_path, options, sentence):
    script = tmp_path / "script.py"
    script.touch()
    if "value" in options:
        options = {**options, "value": write(tmp_path, options["value"])}
    with pytest.raises(SpecError) as caught:
        build(str(script), (), ScriptOptions(**options))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("word", ["auto", "0"])
def test_a_word_instead_of_a_file_does_not_say_how_many_nodes(tmp_path, word):
    script = tmp_path / "script.py"
    script.touch()
    with pytest.raises(SpecError, match=f"--value {word} says nothing .* give --nodes MIN:MAX too"):
        build(str(script), (), ScriptOptions(service=True, value=Path(word)))
    with pytest.raises(SpecError, match="--value is for services"):
        build(str(script), (), ScriptOptions(value=Path(word), nodes="1:2"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, (None, False)),
        ("auto", (None, True)),
        ("auto:180s", (180.0, True)),
        ("180s", (180.0, False)),
        ("3 min", (180.0, False)),
        ("0 s", (0.0, False)),
    ],
)
def test_the_start_cost_of_a_service(tmp_path, text, expected):
    script = tmp_path / "serve.py"
    script.touch()
    value = write(tmp_path, "nodes,value\n1,10\n")
    spec = build(str(script), (), ScriptOptions(service=True, value=value, start_cost=text))
    assert (spec.start_cost_s, spec.start_cost_measured) == expected


@pytest.mark.parametrize(
    ("text", "service", "says"),
    [
        ("180s", False, "--start-cost is for services"),
        ("soon", True, "--start-cost: .* Or auto, to have it measured."),
        ("-5 s", True, "--start-cost: .*"),
        ("2 d", True, "a day at most"),
        ("auto:", True, "--start-cost: .* with a first guess"),
        ("auto:soon", True, "--start-cost: .* with a first guess"),
        ("auto:2 d", True, "a day at most"),
    ],
)
def test_a_wrong_start_cost(tmp_path, text, service, says):
    script = tmp_path / "serve.py"
    script.touch()
    value = write(tmp_path, "nodes,value\n1,10\n") if service else None
    with pytest.raises(SpecError, match=says):
        build(str(script), (), ScriptOptions(service=service, value=value, start_cost=text))
