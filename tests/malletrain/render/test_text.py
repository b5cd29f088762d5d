"""How numbers and names look."""

import pytest

from malletrain.render.text import (
    bar,
    count,
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
