"""What a parameter may be, and how its value reaches the script."""

from __future__ import annotations

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.sweep.space import (
    Parameter,
    SpaceError,
    check_choices,
    parameter,
    trial_arguments,
    unknown_places,
)


@pytest.mark.parametrize(
    ("form", "made"),
    [
        ({"low": 1, "high": 8}, Parameter(1, 8)),
        ({"low": 1, "high": 8.0}, Parameter(1.0, 8.0)),
        ({"low": 1e-4, "high": 0.1, "log": True}, Parameter(1e-4, 0.1, None, True)),
        ({"low": 16, "high": 64, "step": 16}, Parameter(16, 64, 16)),
        (["relu", "tanh"], Parameter(choices=("relu", "tanh"))),
        ({"choices": [1, True]}, Parameter(choices=(1, True))),
        (optuna.distributions.FloatDistribution(0.1, 1, log=True), Parameter(0.1, 1.0, None, True)),
        (optuna.distributions.FloatDistribution(0, 1, step=0.5), Parameter(0.0, 1.0, 0.5)),
        (optuna.distributions.IntDistribution(1, 64, log=True), Parameter(1, 64, None, True)),
        (optuna.distributions.IntDistribution(2, 8, step=2), Parameter(2, 8, 2)),
        (optuna.distributions.CategoricalDistribution(["a", 1]), Parameter(choices=("a", 1))),
    ],
)
def test_forms(form, made):
    assert parameter(form) == made


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (3, "3 is no search space; accepted is a range such as"),
        ({"low": 1}, '"high" is missing'),
        ({"low": 2, "high": 1}, "low = 2 is above high = 1"),
        ({"low": 0, "high": 1, "log": True}, "with log begins above 0"),
        ({"low": 1, "high": 9, "log": True, "step": 2}, "log and step exclude each other"),
        ({"low": 1, "high": 9, "step": 0}, "step = 0 is not above 0"),
        ({"low": "1", "high": 9}, "'1' is no number"),
        ({"low": True, "high": 9}, "True is no number"),
        ({"low": 0, "high": float("inf")}, "not a finite number"),
        ({"low": 0, "high": 1, "lo": 1}, '"lo" is not known here'),
        ([], "name one at least"),
        ([["a"]], "is no choice"),
        (["a", "a"], "listed twice"),
        ({"choices": ["a"], "low": 1}, "choices go with nothing else"),
    ],
)
def test_what_is_refused(form, words):
    with pytest.raises(SpaceError, match=words):
        parameter(form)


@pytest.mark.parametrize(
    ("form", "values"),
    [
        ({"low": 1, "high": 3}, [1, 2, 3]),
        ({"low": 0.0, "high": 0.3, "step": 0.1}, pytest.approx([0.0, 0.1, 0.2, 0.3])),
        (["a", "b"], ["a", "b"]),
    ],
)
def test_grid(form, values):
    assert parameter(form).grid() == values


def test_no_grid_of_a_continuum():
    with pytest.raises(SpaceError, match="ranges with a step"):
        parameter({"low": 0.0, "high": 1.0}).grid()


def test_arguments():
    args = ["--epochs", "3", "--save=s/{trial}.pt", "--adam={beta},0.9", "{other}"]
    values = {"lr": 0.01, "beta": 0.5, "nesterov": True, "width": 64, "act": "relu"}
    assert trial_arguments(args, values, 7) == (
        *("--epochs", "3", "--save=s/7.pt", "--adam=0.5,0.9", "{other}"),
        *("--lr", "0.01", "--nesterov", "true", "--width", "64", "--act", "relu"),
    )


def test_double_braces_are_the_text_itself():
    args = ["--format={{lr}}", "--run={trial}"]
    assert unknown_places(args, ["lr"]) == []
    assert unknown_places(["{a}{lr}{a}", "{b}", '{"json": 1}'], ["lr"]) == ["a", "b"]
    assert trial_arguments(args, {"lr": 1}, 7) == ("--format={lr}", "--run=7", "--lr", "1")


def test_a_value_that_begins_with_a_dash_is_joined_to_its_option():
    args = ["--shift", "{shift}", "--name", "{tag}", "-s", "{shift}", "{shift}", "--n", "-1"]
    values = {"shift": -1e-05, "tag": "--", "lr": -2, "kind": "-x", "up": 1}
    assert trial_arguments(args, values, 7) == (
        *("--shift=-1e-05", "--name=--", "-s", "-1e-05", "-1e-05", "--n", "-1"),
        *("--lr=-2", "--kind=-x", "--up", "1"),
    )


@pytest.mark.parametrize("choices", [[1, True, 1.0], [0, False], ["a", 2, 2.0]])
def test_choices_that_a_study_cannot_tell_apart_are_refused(choices):
    with pytest.raises(SpaceError, match="are one value in the study"):
        check_choices(parameter(choices))
    check_choices(parameter([str(choice) for choice in choices]))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_reaches_the_script_as_it_is(value):
    words = " ".join(trial_arguments([], {"x": value}, 0)).replace("=", " ").split()
    assert float(words[1]) == value
