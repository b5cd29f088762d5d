"""The report is one file that needs nothing else, and says what was found."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from malletrain.assess.gaps import gap_report
from malletrain.assess.page import Assessment, page, text, verdict
from malletrain.assess.whatif import cases
from malletrain.sim.settings import SimSettings
from tests.malletrain.sim.conftest import job, trace_of

GAPS = {"a": [(0, 4000)], "b": [(0, 1500), (2500, 4000)], "c": [(1000, 3000)]}


@pytest.fixture(scope="module")
def assessment():
    trace = trace_of(GAPS, 4000.0)
    runs = cases(
        trace, [job("one", samples=1e9), job("<two>", samples=1e9)], SimSettings(max_running=2)
    )
    return Assessment(
        "log <x> & y",
        gap_report(trace),
        tuple(runs),
        (0.0, 4000 / 3600),
        ("It was so.",),
        "malletrain assess --swf <x>",
    )


class Reader(HTMLParser):
    """Collects ids, links and unclosed elements."""

    VOID = ("meta", "br", "img", "path", "use", "rect", "line", "circle")

    def __init__(self):
        super().__init__()
        self.ids, self.outside, self.open, self.words = [], [], [], []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href") and not value.startswith("#"):
                self.outside.append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_is_whole_and_needs_nothing_else(assessment):
    content = page(assessment)
    reader = Reader()
    reader.feed(content)
    assert reader.open == []
    assert reader.outside == []
    assert len(set(reader.ids)) == len(reader.ids), "ids of different pictures must not meet"
    assert set(re.findall(r"url\(#([^)]*)\)", content)) <= set(reader.ids)
    assert content.count("<svg") == 4
    assert "<script" not in content
    assert "@import" not in content
    assert page(assessment) == content
    assert len(content) < 400_000


def test_what_came_from_outside_is_escaped(assessment):
    content = page(assessment)
    assert "log <x>" not in content
    assert "log &lt;x&gt; &amp; y" in content
    assert "--swf &lt;x&gt;" in content


def test_the_numbers_on_the_page_are_those_of_the_simulation(assessment):
    words = " ".join(verdict(assessment))
    r = assessment.cases[0].result
    assert f"{100 * r.harvested_fraction:.0f} % of the idle node-hours" in words
    assert f"{assessment.gaps.idle_mean:.1f} of 3 nodes" in words
    content = page(assessment)
    for case in assessment.cases:
        assert f"{100 * case.result.fraction_of_ideal:.1f} %" in content
    assert "It was so." in content
    assert any(line == "Assumed: It was so." for line in text(assessment))


def test_cases_differ_as_they_say(assessment):
    by_name = {c.name: c.result for c in assessment.cases}
    assert list(by_name) == ["as asked for", "equal division", "30 s of notice", "live mode"]
    assert by_name["30 s of notice"].samples > by_name["as asked for"].samples
    assert by_name["live mode"].samples > by_name["as asked for"].samples
    series = assessment.cases[0].series
    assert series[0][1] == 2
    assert {used for _, _, used in series} <= {0, 1, 2, 3}
    assert all(used <= idle for _, idle, used in series)


def test_the_data_are_plain(assessment):
    data = assessment.to_dict()
    assert data["gaps"]["nodes"] == 3
    assert [c["name"] for c in data["cases"]] == [c.name for c in assessment.cases]
    assert data["window_hours"] == [0.0, 4000 / 3600]
