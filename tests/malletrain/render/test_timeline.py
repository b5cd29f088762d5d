"""The picture: it is a PNG whose pixels say what the data say."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from malletrain.render.palette import BUSY, IDLE, JOB_COLOURS, LEASED, colours
from malletrain.render.timeline import (
    LEFT,
    RIGHT,
    WIDTH,
    PreemptionMark,
    Span,
    ThroughputSeries,
    Timeline,
    animation,
    draw,
    resample,
    tint,
)


def rgb(colour):
    return tuple(int(colour[k : k + 2], 16) for k in (1, 3, 5))


def has(image, colour):
    """How many pixels have exactly this colour."""
    return int((image == np.array(rgb(colour))).all(axis=-1).sum())


def pixels(path):
    from PIL import Image

    return np.asarray(Image.open(path).convert("RGB"))


def timeline(**changes):
    base = {
        "nodes": ("n1", "n2"),
        "jobs": ("a", "b"),
        "begin": 100.0,
        "end": 200.0,
        "spans": (
            Span("n1", 100, 150, "idle"),
            Span("n1", 105, 150, "leased"),
            Span("n1", 120, 150, "job", "a"),
            Span("n1", 110, 120, "pause", "a"),
            Span("n2", 100, 200, "idle"),
            Span("n2", 150, 200, "job", "b"),
            Span("gone", 100, 200, "idle"),
        ),
        "marks": (PreemptionMark("n1", 150), PreemptionMark("n2", 160, notice=False)),
        "series": (
            ThroughputSeries("a", (100.0, 150.0), (10.0, 0.0)),
            ThroughputSeries("b", (150.0, 190.0), (5.0, 8.0)),
        ),
        "outages": ((130.0, 135.0),),
        "title": "A test",
    }
    return Timeline(**{**base, **changes})


def test_every_state_has_its_colour(tmp_path):
    image = pixels(draw(timeline(), tmp_path / "t.png"))
    for colour in (BUSY, IDLE, LEASED, JOB_COLOURS[0], JOB_COLOURS[1]):
        assert has(image, colour) > 500


def test_area_is_time(tmp_path):
    """Twice the time is twice the area."""
    short = (Span("n1", 100, 125, "job", "a"),)
    long = (Span("n1", 100, 150, "job", "a"),)
    areas = [
        has(
            pixels(draw(timeline(spans=s, marks=(), series=(), outages=()), tmp_path / "t.png")),
            JOB_COLOURS[0],
        )
        for s in ((), short, long)
    ]
    assert (areas[2] - areas[0]) / (areas[1] - areas[0]) == pytest.approx(2.0, rel=0.02)


def test_nothing_happened(tmp_path):
    assert (
        draw(
            timeline(spans=(), marks=(), series=(), outages=(), jobs=(), nodes=()),
            tmp_path / "t.png",
        )
        .stat()
        .st_size
        > 1000
    )


def test_many_nodes(tmp_path):
    nodes = tuple(f"n{k}" for k in range(300))
    spans = tuple(Span(n, 100, 200, "pause", "a") for n in nodes)
    assert draw(timeline(nodes=nodes, spans=spans), tmp_path / "t.png").exists()


def test_resample():
    assert resample(ThroughputSeries("a", (1.0, 3.0), (5.0, 7.0)), [0.0, 1.0, 2.0, 3.0, 9.0]) == [
        0.0,
        5.0,
        5.0,
        7.0,
        7.0,
    ]


def test_tint():
    assert tint("#000000", 1.0) == "#000000"
    assert tint("#0072B2", 0.0) == "#FFFFFF"


def test_colours_are_in_order_and_repeat():
    colour_of = colours([f"j{k}" for k in range(9)])
    assert colour_of["j0"] == colour_of["j7"] == JOB_COLOURS[0]
    assert len(set(JOB_COLOURS)) == len(JOB_COLOURS)


SVG = "{http://www.w3.org/2000/svg}"


def test_what_happened_is_where_it_belongs():
    timeline = Timeline(
        ("n1", "n2"),
        ("<a>",),
        100.0,
        200.0,
        (Span("n1", 100.0, 150.0, "job", "<a>"), Span("n2", 90.0, 300.0, "idle")),
        (PreemptionMark("n1", 150.0),),
        (ThroughputSeries("<a>", (100.0, 150.0), (10.0, 0.0)),),
        title="<b> & co",
    )
    root = ET.fromstring(animation(timeline))
    assert root.find(f"{SVG}title").text == "<b> & co"
    (shown,) = root.findall(f"{SVG}g")
    idle, job = shown.findall(f"{SVG}rect")
    assert job.get("fill") == colours(["<a>"])["<a>"]
    assert float(job.get("x")) == LEFT
    assert float(job.get("width")) == (WIDTH - LEFT - RIGHT) / 2
    assert float(idle.get("width")) == WIDTH - LEFT - RIGHT, "cut at the ends"
    mark, rates = shown.findall(f"{SVG}path")
    assert mark.get("d").startswith("M466.0 ")
    assert rates.get("fill") == job.get("fill")
    assert "prefers-reduced-motion" in root.find(f"{SVG}style").text
    assert root.findall(".//*[@href]") == []
