"""How numbers, names and curves look."""

from __future__ import annotations

import math

import pytest

from malletrain.protocol.views import SeriesView
from malletrain.render.text import (
    bar,
    count,
    curve,
    dots,
    figure,
    plain,
    rate,
    since,
    span,
    spark,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (12345, "12,345"),
        (9_999_999, "9,999,999"),
        (12_345_678, "12.3 M"),
        (3e11, "300.0 G"),
    ],
)
def test_count(value, text):
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0/s"), (-1, "0/s"), (0.526, "0.53/s"), (42.13, "42.1/s"), (1234.4, "1,234/s")],
)
def test_rate(value, text):
    assert rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.98437, "0.9844"),
        (10690.0, "10,690"),
        (999.96, "1000"),
        (1e-05, "0.00001"),
        (-2.5e-7, "-0.00000025"),
        (0.0, "0"),
        (1.5e12, "1,500.0 G"),
        (float("nan"), "nan"),
    ],
)
def test_a_figure_has_no_exponent(value, text):
    assert figure(value) == text


def test_spark():
    assert spark([], 4) == "    "
    assert spark([0, 0], 2) == "  "
    assert spark([1, 2, 4, 8], 4) == "▂▃▅█"
    assert spark([8, 0, 8], 5) == "  █ █"
    assert spark([1] * 100, 3) == "███"


def test_bar():
    assert bar(2, 4) == "●●○○"
    assert bar(0, 2) == "○○"
    assert bar(20, 100) == "20/100"
    assert bar(5, 4) == "5/4"  # leaving nodes may stand beside the maximum for a moment


def test_span():
    assert (span(4, 4), span(1, 16)) == ("4", "1:16")


def test_since():
    assert since(None, 5) == "never"
    assert since(100, 100.4) == "0.0 s"
    assert since(100, 161) == "1 min 1 s"
    assert since(100, 90) == "0.0 s"  # clocks differ


def test_plain_keeps_lines_and_drops_control():
    assert plain("a\r\nb\tc\x1b[2Jd\x9be\x00") == "a\nb\tc·[2Jd·e·"


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
