"""What a notebook shows of a job: well-formed, true to the numbers, nobody's markup but ours."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from malletrain import Client
from malletrain.api.job import EDGE, HEIGHT, WIDTH, job_html, scale, shown
from malletrain.api.series import JobMetrics
from malletrain.protocol.views import JobDetail, RescaleView, SeriesView
from tests.malletrain.cli.fake_daemon import detail, job_view

EVIL = "<script>alert('x')</script>&\"'"


def step(generation, to, ended, before=0):
    return RescaleView(generation, "up", before, to, ended - 1, 1.0, {}, ended)


def series(name, values, times=None):
    times = tuple(times or map(float, range(len(values))))
    n = len(values)
    return SeriesView(name, tuple(values), times, (0.0,) * n, (1,) * n, (None,) * n, n)


def lines(html):
    """The corners of each picture's line, by title."""
    tree = ElementTree.fromstring(html.replace("&#9679;", ""))
    corners_of = {}
    for figure in tree.iter("figure"):
        points = figure.find("svg/polyline").get("points")
        corners = [tuple(map(float, corner.split(","))) for corner in points.split()]
        corners_of[figure.find("figcaption").text] = corners
    return corners_of


def test_the_scale_over_time_is_steps_from_its_start_to_its_end():
    steps = (step(1, 1, 100.0), step(2, 4, 110.0, 1), step(3, 2, 130.0, 4))
    assert scale(steps, 140.0, holds=True) == [
        (100.0, 0.0),
        (100.0, 1.0),
        (110.0, 4.0),
        (130.0, 2.0),
        (140.0, 2.0),
    ]
    pictures = lines(job_html(JobDetail(job_view(ended=140.0), {}, rescales=steps), {}, 999.0))
    (corners,) = pictures.values()
    assert list(pictures) == ["nodes: 0 to 4 in 40 s"]
    right, top, bottom = WIDTH - EDGE, EDGE, HEIGHT - EDGE
    assert corners[0] == (EDGE, bottom)
    assert corners[-1] == (right, (top + bottom) / 2)
    assert (round(EDGE + (right - EDGE) / 4, 1), top) in corners, "four nodes after ten seconds"


def test_the_metric_drawn_is_the_loss_where_there_is_one():
    several = JobMetrics(
        [series("other", range(9)), series("loss", [3.0, 1.0]), series("a", [1.0])]
    )
    assert shown(several) == "loss"
    assert shown(JobMetrics([series("a", [1, 2]), series("b", [1, 2, 3])])) == "b"
    assert shown(JobMetrics([series("loss", [1.0])])) == ""
    pictures = lines(job_html(JobDetail(job_view(), {}), several, 0.0))
    assert pictures == {"loss: 1 to 3 in 1 s": [(EDGE, EDGE), (WIDTH - EDGE, HEIGHT - EDGE)]}


@pytest.mark.parametrize("field", ["name", "id", "owner", "state", "reason"])
def test_markup_of_others_stays_text(field):
    html = job_html(JobDetail(job_view(**{field: EVIL}), {}), {}, 0.0)
    assert "<script" not in html
    assert EVIL in "".join(ElementTree.fromstring(html.replace("&#9679;", "")).itertext())


def test_names_of_metrics_stay_text():
    html = job_html(
        JobDetail(job_view(metrics={EVIL: 1.0}), {}), JobMetrics([series(EVIL, [1, 2])]), 0.0
    )
    assert "<script" not in html
    ElementTree.fromstring(html.replace("&#9679;", ""))


def test_a_notebook_asks_the_daemon(daemon):
    daemon.answers["metrics"] = lambda params: [series("loss", [3.0, 1.0])]
    with Client(daemon.state_dir) as client:
        daemon.answers["job"] = lambda params: detail(job=job_view(state="completed"))
        html = client.job("train")._repr_html_()
    assert "completed" in html
    assert "loss: 1 to 3" in html
