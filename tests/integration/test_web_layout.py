"""How the page looks with forty-two jobs on forty nodes, in the width of a desk and of a telephone:
what a person has to see is in sight, whole, and told apart.
"""

from __future__ import annotations

import re

import pytest

from tests.integration.browser import browser
from tests.integration.web_page import page, when_fitted
from tests.malletrain.web.crowd import JOBS, LINKS, NODES, REASONS, crowded_daemon

pytest.importorskip("fastapi")

PAGES = {"": "#timeline svg", "jobs": "#jobs td", "job/j2": "#job-costs svg"} | {
    "forecast": "#forecast svg",
    "usage": "#usage td",
}
"""Page → what it has once its data are there."""

NARROW_CHARTS = """\
[...document.querySelectorAll('figure > svg')].filter((svg) => svg.closest('figure').clientWidth
  && Math.abs(svg.getBoundingClientRect().width - svg.closest('section, main').clientWidth) > 1)
  .map((svg) => `${svg.getAttribute('aria-label')}: ${svg.getBoundingClientRect().width}`)
"""
CUT_LABELS = """\
[...document.querySelectorAll('figure > svg text')].filter((text) => {
  const [own, all] = [text, text.ownerSVGElement].map((e) => e.getBoundingClientRect());
  return own.left < all.left - 1 || own.right > all.right + 1 || own.top < all.top - 4
    || own.bottom > all.bottom + 4;
}).map((text) => text.textContent)
"""
LABELS_ON_OTHERS = """\
[...document.querySelectorAll('figure > svg')].flatMap((svg) => {
  const labels = [...svg.querySelectorAll('text[text-anchor=middle]:not(.taken)')].map((e) =>
    [e.textContent, e.getBoundingClientRect()]);
  return labels.filter(([, a], k) => labels.some(([, b], j) => j > k && a.left < b.right
    && b.left < a.right && a.top < b.bottom && b.top < a.bottom)).map(([text]) => text);
})
"""
TINY_WORDS = """\
[...document.querySelectorAll('figure > svg text')].filter((e) =>
  e.getBoundingClientRect().height < 11).map((e) => e.textContent)
"""
FAULTS_OF_CHARTS = f"""{{
  "narrow charts": {NARROW_CHARTS},
  "cut labels": {CUT_LABELS},
  "labels on others": {LABELS_ON_OTHERS},
  "tiny words": {TINY_WORDS},
}}"""
EMPTY_COLUMNS = """\
[...document.querySelectorAll('table')].flatMap((table) => [...table.tHead.rows[0].cells]
  .filter((cell, k) => cell.offsetParent && table.tBodies[0].rows.length
    && [...table.tBodies[0].rows].every((row) => !row.cells[k].textContent.trim()))
  .map((cell) => cell.textContent))
"""
OUT_OF_SIGHT = """\
[...document.querySelectorAll('#jobs tbody tr')].filter((row) => {
  const box = row.closest('.scroll').getBoundingClientRect();
  return ['.state', '.reason', 'td.name a'].some((selector) => [...row.querySelectorAll(selector)]
    .some((each) => [...each.getClientRects()].some((r) => r.left < box.left - 1
      || r.right > box.right + 1)));
}).map((row) => row.textContent)
"""
CUES = """\
[...document.querySelectorAll('#timeline figure > svg rect.node-job')].map((rect) => [
  rect.querySelector('title').textContent.match(/training (.*),/)[1],
  getComputedStyle(rect).fill,
  rect.nextElementSibling?.classList.contains('pattern')
    ? rect.nextElementSibling.getAttribute('fill') : ''])
"""
FILLS = """\
['busy', 'idle', 'free', 'leasing', 'leaving', 'sick', 'slow'].map((state) =>
  getComputedStyle(document.querySelector(`#timeline rect.node-${state}`)).fill)
"""


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """The page of a daemon with many jobs, and a browser: (page, browser)."""
    folder = tmp_path_factory.mktemp("crowd")
    with (
        crowded_daemon(folder / "state"),
        page(folder / "state") as web,
        browser(folder / "profile") as tab,
    ):
        yield web, tab


def test_forty_two_jobs_can_be_read_on_a_desk_and_on_a_telephone(crowd):
    web, tab = crowd
    tab.open(web.url)
    tab.until_text(".numbers", "Idle")
    for pixels in (1200, 400):
        tab.width(pixels)
        for address, shown in PAGES.items():
            tab.run(f"location.hash = '#/{address}'")
            there = f"document.querySelectorAll('{shown}').length"
            tab.until(lambda there=there: tab.run(there), f"{address} has its data")
            where = f"{address or 'machine'} at {pixels}"
            assert tab.run("document.documentElement.scrollWidth <= innerWidth"), where
            for kind, charts in when_fitted(tab, FAULTS_OF_CHARTS).items():
                assert charts == [], (kind, where)
            assert tab.run(EMPTY_COLUMNS) == [], where
            text = tab.text("main")
            assert not re.search(r"\b0\.0\d* h\b", text), where
            assert not re.search(r"\de[+]\d", tab.text("figure > svg text")), where
            if address == "jobs":
                assert tab.run("document.querySelectorAll('#jobs tbody tr').length") == JOBS
                assert tab.run(OUT_OF_SIGHT) == [], where
                for reason in REASONS.values():
                    assert reason in text
                wide = "document.querySelector('#jobs').parentElement"
                assert pixels < 1200 or tab.run(f"{wide}.scrollWidth <= {wide}.clientWidth")
            if address == "":
                names = tab.texts("#timeline svg text[text-anchor=end]")
                assert set(NODES) <= set(names), "the names of nodes are whole"
            if address == "usage":
                assert "5 min" in text, "0.08 h"
    assert tab.complaints() == []


@pytest.mark.parametrize("dark", [False, True])
def test_jobs_and_states_are_told_apart_in_the_timeline(crowd, dark):
    """Seven colours and twenty jobs: those of one colour differ by their pattern."""
    web, tab = crowd
    tab.width(1200)
    tab.dark(dark)
    tab.open("about:blank")
    tab.open(web.url)
    tab.until(
        lambda: len(set(tab.texts("#timeline .job-name"))) >= 19,
        "all jobs with nodes are drawn, with their ids",
    )
    cues = {(colour, pattern) for _, colour, pattern in tab.run(CUES)}
    assert len(cues) == 20
    assert len({colour for colour, _ in cues}) == 7
    fills = tab.run(FILLS)
    assert len(set(fills)) == len(fills)
    assert not {colour for colour, _ in cues} & set(fills)


def test_the_links_of_a_job_open_in_another_tab(crowd):
    web, tab = crowd
    tab.open(web.url)
    tab.run("location.hash = '#/job/j2'")
    tab.until_text("#job-facts", LINKS["TensorBoard"])
    attributes = "['href', 'rel', 'target'].map((name) => link.getAttribute(name))"
    anchors = f"[...document.querySelectorAll('#job-facts a')].map((link) => {attributes})"
    assert tab.run(anchors) == [[LINKS["TensorBoard"], "noopener noreferrer", "_blank"]]
