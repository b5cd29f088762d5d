import xml.etree.ElementTree as ET

from malletrain.render.animation import LEFT, RIGHT, WIDTH, animation
from malletrain.render.palette import colours
from malletrain.render.timeline import PreemptionMark, Span, ThroughputSeries, Timeline

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
