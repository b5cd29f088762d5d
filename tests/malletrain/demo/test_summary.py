"""The end of a demo: the object for programs and the tables for people."""

import io

import pytest

from malletrain.demo.account import Account
from malletrain.demo.summary import DemoResult, JobResult, render
from malletrain.render.columns import console

GOOD = JobResult("a", "completed", 1000.0, 4, 0.95, 0.9528)


def result(*jobs, notes=()):
    return DemoResult(
        jobs, 12, 5, 2000.4, 130.04, Account(400.0, 200.0, 60.0, 40.0, 50.0, 50.0), notes
    )


def test_json_has_exactly_these_keys():
    data = result(GOOD).to_dict()
    assert list(data) == [
        "jobs",
        "rescales",
        "preemptions",
        "node_seconds_offered",
        "node_seconds_harvested",
        "samples",
        "wall_s",
    ]
    assert list(data["jobs"][0]) == [
        "name",
        "state",
        "samples",
        "rescales",
        "accuracy",
        "undisturbed_accuracy",
    ]
    assert (data["samples"], data["wall_s"]) == (2000, 130.0)


@pytest.mark.parametrize(
    ("accuracy", "undisturbed", "good"),
    [
        (0.95, 0.96, True),
        (0.97, 0.96, True),
        (0.95, 0.9611, False),
        (None, 0.9, False),
        (0.9, None, False),
    ],
)
def test_as_good(accuracy, undisturbed, good):
    assert JobResult("a", "completed", 0, 0, accuracy, undisturbed).as_good is good


def test_completed():
    assert result(GOOD).completed
    assert not result(GOOD, JobResult("b", "failed", 0, 0, None, None)).completed
    assert not result().completed


def test_tables():
    terminal = console(io.StringIO())
    terminal.print(
        render(
            result(GOOD, JobResult("b", "failed", 0, 0, None, 0.9), notes=("Mind this.",)),
            [("picture", "/x/t.png")],
        )
    )
    text = terminal.file.getvalue()
    for words in (
        "offered by the main scheduler",
        "400",
        "50 %",
        "15 %",
        "95.00 %",
        "95.28 %",
        "as good",
        "unknown",
    ):
        assert words in text
    for words in ("12 rescales and 5 preemptions", "Mind this.", "/x/t.png"):
        assert words in text
