"""Requests that no client of ours sends: each costs its sender an error, or is moved within bounds,
and the daemon goes on.
"""

from __future__ import annotations

import asyncio
import math
import threading

import msgspec
import pytest
from structlog.testing import capture_logs

from malletrain.client import ClientError
from malletrain.daemon.jobs.admission import (
    MAX_SPEC_BYTES,
    RequestRefused,
    number,
    problem_of,
    text,
    whole,
)
from malletrain.protocol.bounds import MAX_NODES
from malletrain.protocol.messages import JobSpec, Request
from tests.malletrain.daemon.forged import Imagined, RunningDaemon
from tests.waiting import PATIENCE_S

INF, BIG = math.inf, 2**64 - 1


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    running = RunningDaemon(tmp_path_factory.mktemp("requests"), Imagined("n0", "n1", "n2"))
    running.job_of_ann = running.submit("ann")
    logs = running.components.api.logs
    running.call(lambda: logs.write(running.job_of_ann, 1, "rank0", "n0", 0, b"hello\n"))
    yield running
    running.stop()


@pytest.mark.parametrize(
    ("op", "params"),
    [
        ("events", {"since": INF}),
        ("events", {"since": math.nan}),
        ("events", {"since": "0"}),
        ("events", {"since": [1]}),
        ("events", {"limit": INF}),
        ("events", {"wait_s": math.nan}),
        ("events", {"job": ["j1"]}),
        ("events", {"job": "x" * 1_000_000}),
        ("logs", {"limit": INF}),
        ("logs", {"limit": True}),
        ("logs", {"stream": b"rank0"}),
        ("logs", {"cursor": "1" * 400}),
        ("jobs", {"ended": INF}),
        ("job", {"job": None}),
        ("job", {"job": {"id": 1}}),
        ("members", {"job": 1.5}),
        ("worth", {"job": 1.5}),
        ("link", {"name": "TensorBoard", "url": 7}),
        ("link", {"name": "TensorBoard"}),
        ("cancel", {"jobs": ["x" * 4_000_000]}),
        ("cancel", {"jobs": ["x"] * 2000}),
        ("cancel", {"jobs": "j1"}),
        ("cancel", {}),
        ("cancel", {"jobs": ["j1"], "why": 7}),
        ("cancel", {"jobs": ["j1"], "why": "two\nlines"}),
        ("cancel", {"jobs": ["j1"], "why": "x" * 101}),
        ("submit", {}),
        ("submit", {"spec": {"name": 1}}),
    ],
    ids=lambda x: repr(x)[:50],
)
def test_parameters_that_make_no_sense_are_refused(running, op, params):
    arguments = {"job": running.job_of_ann, **params} if op in ("logs", "link") else params
    with running.client("ann") as client, pytest.raises(ClientError) as refused:
        client.call(op, arguments)
    assert refused.value.code == "usage"
    assert len(str(refused.value)) < 500
    assert running.alive()


@pytest.mark.parametrize(
    "packed", [b"\xc0", b"\x90", b"\x81\x01\x01", b"\x81\xa1\xff\x01", b"\x81\xa1a\xa1\xff"]
)
def test_parameters_that_are_none_are_refused(running, packed):
    """None, a list, a number or bytes as a name: they are decoded when it is their turn."""
    request = Request("r1", "jobs", msgspec.Raw(packed))
    reply = asyncio.run(running.components.api.answer("ann", request))
    assert (reply.ok, reply.code) == (False, "usage")
    assert "is malformed" in reply.error


@pytest.mark.parametrize(
    ("op", "params"),
    [
        ("events", {"since": BIG}),
        ("events", {"since": -(2**63)}),
        ("events", {"since": 1e300}),
        ("events", {"limit": -1}),
        ("events", {"limit": BIG}),
        ("events", {"wait_s": -1e300}),
        ("jobs", {"ended": -5}),
        ("jobs", {"ended": BIG}),
        ("logs", {"limit": BIG}),
        ("logs", {"cursor": f"1:{2**63 - 1}:n0"}),
        ("logs", {"cursor": "1:99999999999999999999:n0"}),
        ("logs", {"cursor": "٣:٣:n0"}),
        ("logs", {"cursor": "tail:-5"}),
        ("logs", {"cursor": "tail:99999999999999999999"}),
        ("logs", {"stream": "../../keys/server"}),
    ],
    ids=lambda x: repr(x)[:50],
)
def test_numbers_out_of_bounds_are_moved_within(running, op, params):
    arguments = {"job": running.job_of_ann, **params} if op == "logs" else params
    with running.client("ann") as client:
        assert client.call(op, arguments) is not None
    assert running.alive()


def test_a_place_beyond_the_end_of_a_log_reads_nothing(running):
    with running.client("ann") as client:
        assert client.logs(running.job_of_ann, cursor="1:999999999999999:n0").text == ""
        assert client.logs(running.job_of_ann).text == "hello\n"


SPEC = JobSpec("job", "ann", "/x.py", "/", "python", goal="throughput")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_nodes": 10**7}, "100000 is the most"),
        ({"max_nodes": 10**12}, "100000 is the most"),
        ({"min_nodes": 2**63, "max_nodes": BIG}, "100000 is the most"),
        ({"nproc_per_node": 2**63}, "processes a node"),
        ({"weight": 1e308}, "weight"),
        ({"weight": 1e-300}, "weight"),
        ({"weight": INF}, "weight"),
        ({"weight": math.nan}, "weight"),
        ({"curve": {"1": 1e308}}, "1e\\+15 is the most"),
        ({"curve": {"1": 1e12}, "weight": 1e4}, "1e\\+15 is the most"),
        ({"curve": {"1": INF}}, "finite"),
        ({"curve": {"1": 1.0, str(10**12): 2.0}}, "is the most"),
        ({"curve": {"1": 1.0, "100001": 2.0}}, "is the most"),
        ({"curve": {"9" * 5000: 1.0}}, "is the most"),
        ({"curve": {}}, "no points"),
        ({"profile_sizes": (1, 2**63)}, "not a size to profile"),
        ({"profile_sizes": (0,)}, "not a size to profile"),
        ({"profile_sizes": tuple(range(1, 102)), "max_nodes": 200}, "100 is the most"),
        ({"args": ("x" * MAX_SPEC_BYTES,)}, "put long lists into a file"),
        ({"env": {"A": "x" * MAX_SPEC_BYTES}}, "put long lists into a file"),
        ({"name": "x" * 201}, "1 to 200"),
        ({"script": "/\0x"}, "NUL"),
        ({"workdir": "/\0"}, "NUL"),
        ({"args": ("a\0b",)}, "NUL"),
        ({"env": {"A": "\0"}}, "NUL"),
        ({"env": {"A=B": "1"}}, "no name, or one with '='"),
        ({"env": {"": "1"}}, "no name, or one with '='"),
        ({"profile_key": "k" * 201}, "200 characters"),
    ],
    ids=lambda x: repr(x)[:50],
)
def test_a_job_beyond_all_bounds_is_refused(running, changes, words):
    with running.client("ann") as client, pytest.raises(ClientError, match=words) as refused:
        client.submit(
            JobSpec(**{**{f: getattr(SPEC, f) for f in SPEC.__struct_fields__}, **changes})
        )
    assert refused.value.code == "usage"
    assert len(str(refused.value)) < 500
    assert running.alive()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_nodes": MAX_NODES},
        {"max_nodes": MAX_NODES, "profile": True, "profile_sizes": (1, MAX_NODES)},
        {"curve": {"1": 1e15}},
        {"curve": {"1": 1e9, str(MAX_NODES): 1e9}, "weight": 1e6, "max_nodes": MAX_NODES},
        {"weight": 1e-6},
        {"env": {"A": "ü" * 50_000}},
    ],
    ids=lambda x: repr(x)[:50],
)
def test_a_job_just_within_the_bounds_is_taken_and_planned(running, changes):
    job = running.submit("ann", **changes)
    with running.client("bob") as client:
        assert client.job(job).job.state == "queued"
    with running.client("ann") as client:
        assert client.cancel([job])[0]["ok"]


def test_the_same_bounds_hold_where_files_are_looked_at(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    spec = JobSpec(
        "job",
        "ann",
        str(script),
        str(tmp_path),
        "python",
        goal="throughput",
        max_nodes=4,
        profile_sizes=(4, 2, 1),
    )
    assert problem_of(spec) == ""


def test_parameters_by_name():
    assert whole({"n": 3.9}, "n", 0, 0, 10) == 3
    assert whole({"n": 10**400}, "n", 0, 0, 10) == 10
    assert whole({}, "n", 7, 0, 10) == 7
    assert number({"n": -2.5}, "n", 0.0, -1.0, 1.0) == -1.0
    assert text({}, "t", "x") == "x"
    for call in (
        lambda: text({}, "t"),
        lambda: text({"t": "x" * 301}, "t"),
        lambda: number({"n": None}, "n", 0, 0, 1),
    ):
        with pytest.raises(RequestRefused) as refused:
            call()
        assert refused.value.code == "usage"


def test_a_request_that_fails_costs_its_sender_an_error_and_a_database_that_refuses_ends_the_daemon(
    tmp_path, monkeypatch
):
    from malletrain.store.store import StoreError

    running = RunningDaemon(tmp_path, Imagined())
    job = running.submit("ann")

    def broken(*args, **kwargs):
        raise ZeroDivisionError("nobody thought of this")

    monkeypatch.setattr(running.components.api.logs, "read", broken)
    with running.client("ann") as client:
        with pytest.raises(ClientError) as failed:
            client.logs(job)
        assert failed.value.code == "internal"
        assert running.alive()

        def full(*args, **kwargs):
            raise StoreError("The disk is full.")

        monkeypatch.setattr(running.components.state.store, "change_job", full)
        with pytest.raises(ClientError) as failed:
            client.cancel([job])
        assert failed.value.code == "internal"
    assert isinstance(running.ended(), StoreError)


def test_a_flood_of_invalid_messages_does_not_fill_the_log(running):
    router = running.components.message_router
    with capture_logs() as lines:
        for _ in range(1000):
            running.call(lambda: router.invalid("lease:l1: The message does not fit."))
            running.call(lambda: router.dropped("lease:l1", 1))
        handled = threading.Event()
        running.call(handled.set)
        assert handled.wait(PATIENCE_S)
    events = [line["event"] for line in lines]
    for event in ("message refused", "messages dropped: too many of one sender wait"):
        assert 1 <= events.count(event) < 100


def test_whose_words_the_reason_of_a_cancel_is_stands_before_it(running):
    words = "The main scheduler wants the node back."
    jobs = [running.submit("ann") for _ in range(2)]
    with running.client("ann") as client:
        client.call("cancel", {"jobs": jobs[:1], "why": words}, changes=True)
    with running.client("olga") as client:
        client.cancel(jobs[1:])
    assert [running.job(job).reason for job in jobs] == [
        f"cancelled by its owner: {words}",
        "cancelled by olga, an operator",
    ]
