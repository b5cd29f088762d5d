"""The layout of a node, from the row of a search to what ``malletrain show`` prints."""

import io

import msgspec
import pytest
from rich.console import Console

from jpa.layout import LayoutSearch, NodeLayout
from malletrain.daemon.jobs.layout_tuner import has_measured_loaders, layout_record, layout_view
from malletrain.protocol.views import JobDetail
from malletrain.render import job_detail
from malletrain.render.job_detail import layouts
from malletrain.store.records import LayoutSearchRow
from tests.malletrain.cli.fake_daemon import detail

ARMS = (NodeLayout(1, 2), NodeLayout(2, 1), NodeLayout(1, 2, 1))


def row(search: LayoutSearch, layout: NodeLayout, source: str = "") -> LayoutSearchRow:
    return LayoutSearchRow("j1", "cpu", 2, search.to_dict(), layout_record(layout), {}, source)


def printed(view) -> str:
    detail = JobDetail(job=None, spec={}, layout=view)
    console = Console(file=io.StringIO(), width=100, color_system=None)
    for part in layouts(detail):
        console.print(part)
    return console.file.getvalue()


def measured(rates: dict[NodeLayout, float]) -> LayoutSearch:
    search = LayoutSearch.of(ARMS)
    for step in range(200):
        search = search.measured(rates[search.layout] * (1 + 0.002 * (step % 2)), 1).spent(0.1)
    return search


def test_a_search_that_has_ended():
    search = measured({ARMS[0]: 100.0, ARMS[1]: 150.0, ARMS[2]: 90.0})
    view = layout_view(row(search, ARMS[1]), None)
    assert view is not None
    assert (view.layout, view.searching) == ("2 processes × 1 thread", False)
    assert [tried.result for tried in view.tried] == ["slower, default", "chosen", "slower"]
    text = printed(view)
    assert "Each node: 2 processes × 1 thread." in text
    assert "50% faster than the default, 1 process × 2 threads" in text
    assert "The search took" in text
    assert "slower, default" in text


def test_a_search_under_way():
    search = LayoutSearch.of(ARMS).measured(100.0, 1).measured(101.0, 1).spent(4.0)
    view = layout_view(row(search, ARMS[0]), search)
    assert view is not None
    assert view.searching
    assert "1 of 3 are measured, after 4 s of 60 s at most" in view.sentence
    assert [tried.result for tried in view.tried] == ["measured now, default", "to come", "to come"]
    assert view.tried[0].rate == 100.5
    assert view.tried[1].rate is None


def test_a_layout_of_an_earlier_job_has_no_table():
    search = LayoutSearch.of(ARMS).ended("Job j0, of the same kind, found it.")
    view = layout_view(row(search, ARMS[0], "j0"), None)
    text = printed(view)
    assert "Job j0, of the same kind, found it." in text
    assert "PROCESSES" not in text


def test_a_job_that_asks_for_nothing_shows_nothing():
    assert layout_view(None, None) is None
    assert printed(None) == ""


def test_numbers_of_loader_workers_are_compared_by_this_job_or_an_earlier_one():
    compared = measured({ARMS[0]: 100.0, ARMS[1]: 150.0, ARMS[2]: 90.0})
    assert has_measured_loaders(layout_view(row(compared, ARMS[1]), None))
    assert not has_measured_loaders(layout_view(row(LayoutSearch.of(ARMS), ARMS[0]), None))
    assert not has_measured_loaders(None)
    without = LayoutSearch.of(ARMS).ended("It saves nothing.")
    assert not has_measured_loaders(layout_view(row(without, ARMS[0]), None))
    earlier = LayoutSearch.of(ARMS).ended("Job j0, of the same kind, found it.")
    assert has_measured_loaders(layout_view(row(earlier, ARMS[0], "j0"), None))


def test_layouts_that_are_left_out_are_said_with_the_reason_also_after_a_restart():
    limit = "Layouts with more than 1 processes on a node are left out: the batch is small."
    search = LayoutSearch.of(ARMS).excluding(lambda layout: layout.processes > 1, "too many", limit)
    stored = LayoutSearch.from_dict(search.to_dict())
    for view in (
        layout_view(row(search, ARMS[0]), stored),
        layout_view(row(stored, ARMS[0]), None),
    ):
        assert view.sentence.endswith(limit)
        assert [tried.result for tried in view.tried][1] == "too many"
        assert limit in " ".join(printed(view).split())
    ended = layout_view(row(stored.ended("It was asked to stop."), ARMS[0]), None)
    assert ended.sentence.endswith(f"s. {limit}")


def test_a_search_of_an_earlier_version_leaves_nothing_out():
    data = LayoutSearch.of(ARMS).to_dict()
    del data["limit"]
    assert LayoutSearch.from_dict(data).limit == ""


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        ({}, "1 process each"),  # the default is left out of what is stored
        ({"nproc_per_node": 4}, "4 processes each"),
        ({"nproc_per_node": 0}, "a process for each GPU"),
        ({"nproc_per_node": 0, "tuned": ["processes"]}, "the fastest number of processes"),
    ],
)
def test_the_number_of_processes_of_a_node(stored, text):
    made = detail()
    file = io.StringIO()
    shown = job_detail.job(msgspec.structs.replace(made, spec={**made.spec, **stored}))
    Console(file=file, width=120, color_system=None).print(shown)
    [line] = [line for line in file.getvalue().splitlines() if line.startswith("Nodes  ")]
    assert line.rstrip().endswith(f"wanted, {text}")
