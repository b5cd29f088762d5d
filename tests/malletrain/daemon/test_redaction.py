"""What one answer holds, and what others read of a job."""

from __future__ import annotations

import msgspec
import pytest

from malletrain.daemon.api.job_views import fitting, slim
from malletrain.protocol.redaction import PRIVATE, detail_for_others, event_for_others
from malletrain.protocol.views import EventView, JobView
from tests.malletrain.cli.fake_daemon import detail

UNFINISHED = ("running",)


def job(number, state="completed", metrics=0):
    named = {f"m{i}": 1.0 for i in range(metrics)}
    return JobView(
        f"j{number}", "job", "ann", state, "", (), 1, 1, 0.0, 0.0, 0, 0, 0.0, None, None, named
    )


def size(views):
    return sum(len(msgspec.msgpack.encode(view)) for view in views)


def test_what_fits_is_left_as_it_is():
    jobs = [job(1, metrics=5), job(2, "running", 5), job(3)]
    assert fitting(jobs, UNFINISHED) == jobs


def test_the_oldest_that_ended_go_first_and_the_order_stays():
    jobs = [job(0, "running"), *(job(i) for i in range(1, 10)), job(10, "running")]
    remaining = fitting(jobs, UNFINISHED, max_bytes=size(jobs) - 1)
    assert [j.id for j in remaining] == ["j0", *(f"j{i}" for i in range(2, 11))]
    assert [j.id for j in fitting(jobs, UNFINISHED, max_bytes=size(jobs[:1]) * 2 + 10)] == [
        "j0",
        "j10",
    ]
    assert fitting(jobs, UNFINISHED, max_bytes=0) == []


def test_metrics_go_before_jobs_do():
    jobs = [job(i, metrics=50) for i in range(10)]
    remaining = fitting(jobs, UNFINISHED, max_bytes=size(jobs) // 2)
    assert [j.id for j in remaining] == [j.id for j in jobs]
    assert size(remaining) <= size(jobs) // 2
    assert [bool(j.metrics) for j in remaining] == sorted(bool(j.metrics) for j in remaining), (
        "the newest keep theirs"
    )


def event(kind="round-formed", sentence="secret", **data):
    return EventView(1, 0.0, kind, "j1", "n1", "", sentence, data)


@pytest.mark.parametrize("kind", sorted(PRIVATE))
def test_events_that_quote_a_script_say_less_to_others(kind):
    shown = event_for_others(event(kind, ranks=["secret"]))
    assert (shown.kind, shown.job, shown.node, shown.seq) == (kind, "j1", "n1", 1)
    assert "secret" not in repr(shown)


def test_other_events_are_everybodys():
    assert event_for_others(event(members=["n1"])) == event(members=["n1"])


def test_a_page_of_long_events_is_made_to_fit():
    short = [event(members=["n1"])] * 3
    assert slim(short) == short
    long = [event(sentence="ä" * 5000, members=["n" * 50] * 100)] * 1000
    page = slim(long)
    assert len(page) == 1000
    assert size(page) < 3 * 1024 * 1024
    assert page[0].sentence.endswith("ä…")
    assert page[0].data == {}


def test_others_do_not_read_the_command_of_a_farm():
    farm = {"command": ["run", "--key", "secret"], "total": 3}
    shown = detail_for_others(detail(spec={"script": "run", "farm": farm}))
    assert shown.spec["farm"] == {"command": [], "total": 3}
    assert "secret" not in repr(shown)
    assert "farm" not in detail_for_others(detail()).spec
