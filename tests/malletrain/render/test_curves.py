"""A curve in a terminal: its dots are where the numbers say."""

from __future__ import annotations

import math

import pytest

from malletrain.protocol.views import SeriesView
from malletrain.render.curves import curve, dots


def bits(lines):
    """The dots of Braille lines as (column, row) from the upper left."""
    places = {
        0: (0, 0),
        1: (0, 1),
        2: (0, 2),
        3: (1, 0),
        4: (1, 1),
        5: (1, 2),
        6: (0, 3),
        7: (1, 3),
    }
    return {
        (2 * x + places[bit][0], 4 * y + places[bit][1])
        for y, line in enumerate(lines)
        for x, character in enumerate(line)
        for bit in range(8)
        if ord(character) - 0x2800 >> bit & 1
    }


def test_a_line_goes_from_corner_to_corner():
    assert bits(dots([(0, 0.0), (10, 7.0)], 4, 2)) == {(k, 7 - k) for k in range(8)}
    assert bits(dots([(5, 3.0)], 4, 2)) == {(0, 7)}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_curve_that_diverges_is_drawn_as_far_as_it_has_numbers(value):
    def series(*values):
        many = len(values)
        return SeriesView(
            "loss", values, tuple(range(many)), (0.0,) * many, (1,) * many, (None,) * many, many
        )

    text = str(curve(series(1.0, 2.0, value), over="time"))
    assert f"the last {value}" in text
    assert "2" in text
    assert str(curve(series(value, value))) == "loss has no value that is a number."


def test_a_constant_is_a_flat_line():
    drawn = bits(dots([(0, 1.0), (9, 1.0)], 5, 3))
    assert len({y for _, y in drawn}) == 1
    assert {x for x, _ in drawn} == set(range(10))


LOSS = SeriesView("loss", (4.0, 1.0), (10.0, 130.0), (0.0, 8e6), (1, 2), (0, 30), 700)


@pytest.mark.parametrize(
    ("over", "low", "high"),
    [("time", "0.0 s", "2 min"), ("samples", "0", "8,000,000"), ("step", "0", "30")],
)
def test_axes_say_from_where_to_where(over, low, high):
    *_, last = lines = curve(LOSS, over=over, width=60, height=10).plain.splitlines()
    assert len(lines) == 10
    assert max(map(len, lines)) <= 60
    assert lines[0] == f"loss over {over}, 700 values, the last 1"
    assert (lines[1].startswith("4 ┤"), lines[8].startswith("1 ┤")) == (True, True)
    assert last.strip().startswith(f"└{low} ")
    assert last.endswith(f" {high}")


def test_the_command_line_draws_what_there_is_and_names_what_there_is_not(tmp_path, daemon, run):
    daemon.answers["metrics"] = lambda params: [LOSS]
    drawn = run("show", "train", "--plot", "loss", "--over", "step")
    assert drawn.exit_code == 0, drawn.stderr
    assert "loss over step, 700 values, the last 1" in drawn.stdout
    refused = run("show", "train", "--plot", "lost")
    assert refused.exit_code == 1
    assert "train has reported no metric 'lost'; it has loss." in refused.stderr
    assert '"values": [' in run("show", "train", "--plot", "loss", "--json").stdout
