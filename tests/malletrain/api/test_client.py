"""The client for Python against a daemon whose answers are known, and its asyncio twin likewise."""

from __future__ import annotations

import asyncio
import inspect
import threading

import pytest

from malletrain import AsyncClient, Client
from malletrain.api.job import Job
from malletrain.api.session import finish
from malletrain.client import ClientError, Unreachable
from malletrain.protocol.views import SeriesView
from tests.malletrain.cli.fake_daemon import (
    FakeDaemon,
    Refuse,
    default_answers,
    detail,
    event_view,
    job_view,
    log_view,
)

LOSS = SeriesView("loss", (3.0, 1.0), (10.0, 11.0), (8.0, 16.0), (1, 2), (0, None), 7)


@pytest.fixture
def daemon(tmp_path):
    fake = FakeDaemon(tmp_path / "state", {**default_answers(), "metrics": lambda p: [LOSS]})
    yield fake
    fake.stop()


@pytest.fixture
def client(daemon):
    with Client(daemon.state_dir) as client:
        yield client


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import malletrain\n")
    return path


def ending(daemon, jobs):
    """The daemon's jobs end one after another, an event each."""
    over: list[str] = []

    def events(params):
        if params["since"] < 0:
            return [event_view(5)]
        if params["since"] == 5 + len(over) < 5 + len(jobs):
            over.append(jobs[len(over)])
        views = [event_view(6 + k, "job-completed", job=job) for k, job in enumerate(over)]
        return [event for event in views if event.seq > params["since"]]

    def job(params):
        state = "completed" if params["job"] in over else "running"
        return detail(job=job_view(id=params["job"], state=state))

    daemon.answers.update(events=events, job=job)


def test_a_job_is_submitted_as_the_command_line_does(client, daemon, script):
    job = client.submit(script, ["--lr", 0.1], nodes=(1, 8), env={"A": "b"}, curve={1: 2, 4: 7})
    assert (job.id, job.name, job.view.state) == ("j1", "train", "queued")
    ((_, params),) = [seen for seen in daemon.seen if seen[0] == "submit"]
    spec = params["spec"]
    assert (spec.get("min_nodes", 1), spec["max_nodes"]) == (1, 8)
    assert spec["args"] == ["--lr", "0.1"]
    assert spec["env"] == {"A": "b", "MALLETRAIN_UMASK": "0022"}
    assert spec["curve"] == {"1": 2.0, "4": 7.0}


@pytest.mark.parametrize("size", [2, "1:2", (1, 2)])
@pytest.mark.parametrize("counts", ["slots", "gpus"])
def test_sizes_in_slots_and_gpus(client, daemon, script, counts, size):
    client.submit(script, **{counts: size})
    ((_, params),) = [seen for seen in daemon.seen if seen[0] == "submit"]
    assert (params["spec"]["counts"], params["spec"]["max_nodes"]) == (counts, 2)


def test_an_option_that_there_is_not_is_named(client, script):
    with pytest.raises(TypeError, match=r"no option 'node'; it has after, .*nodes"):
        client.submit(script, node=3)


def test_beginning_from_the_snapshot_of_another_job_by_its_name(client, daemon, script):
    client.submit(script, resume_from="other")
    assert daemon.seen[-1][1]["spec"]["env"]["MALLETRAIN_RESUME_FROM"] == "j1"


def test_all_jobs_are_waited_for_by_one_ear(client, daemon):
    ending(daemon, ["j2", "j1"])
    jobs = client.wait(["j1", "j2"])
    assert [(job.id, job.view.state) for job in jobs] == [("j1", "completed"), ("j2", "completed")]
    assert [p["since"] for op, p in daemon.seen if op == "events"] == [-1, 5, 6]


def test_a_job_that_does_not_end_in_time(client, daemon):
    daemon.answers["events"] = lambda p: []
    with pytest.raises(TimeoutError, match=r"Job j1 has not ended within 0 s\."):
        client.job("train").wait(timeout=0)


def test_waiting_goes_on_when_the_daemon_is_started_again(client, daemon, tmp_path):
    job = client.job("train")
    ending(daemon, ["j1"])
    listening = threading.Event()
    answered = daemon.answers["events"]

    def heard(params):
        listening.set()
        return answered(params) if params["since"] < 0 else []

    daemon.answers["events"] = heard
    waited: list[str] = []
    thread = threading.Thread(target=lambda: waited.append(job.wait()))
    thread.start()
    listening.wait()
    daemon.stop(forget=False)
    # The next one has the keys of this one and another address, as after a restart of the machine.
    again = FakeDaemon(tmp_path / "state", {**daemon.answers, "events": answered})
    try:
        thread.join()
    finally:
        again.stop()
    assert waited == ["completed"]


def test_lines_of_a_log_are_whole_wherever_its_pieces_end(client, daemon):
    pieces = [("on", "1"), ("e\ntw", "2"), ("o\n\nthree", "3")]

    def logs(params):
        text, cursor = pieces[int(params["cursor"] or 0)]
        over = cursor == "3"
        return log_view(text, cursor, more=not over, ended=over)

    daemon.answers["logs"] = logs
    job = client.job("train")
    assert list(job.logs(follow=True)) == ["one", "two", "", "three"]
    assert job.logs() == "one\ntwo\n\nthree\n"


def test_metrics_over_time(client):
    metrics = client.job("train").metrics()
    assert list(metrics) == ["loss"]
    loss = metrics["loss"]
    assert (loss.values, loss.reported, len(loss)) == ((3.0, 1.0), 7, 2)
    assert loss[-1] == (1.0, 11.0, 16.0, 2, None)
    assert min(loss).samples == 16.0
    frame = metrics.frame()
    assert frame["value"].tolist() == [3.0, 1.0]
    assert frame["nodes"].tolist() == [1, 2]
    assert frame["step"].isna().tolist() == [False, True]
    assert frame["time"].dt.second.tolist() == [10, 11]


def test_cancelling_what_has_ended_is_no_error_and_what_is_not_mine_is(client, daemon):
    job = client.job("train")
    assert job.cancel() is True
    refusal = {"job": "j1", "ok": False, "sentence": "Job j1 belongs to bob."}
    daemon.answers["cancel"] = lambda p: {"results": [refusal]}
    with pytest.raises(ClientError, match="belongs to bob"):
        job.cancel()
    daemon.answers["job"] = lambda p: detail(job=job_view(state="completed"))
    assert job.cancel() is False


def test_threads_have_connections_of_their_own(client, daemon):
    """A thread that waits for news does not keep others from asking."""
    request, answer = threading.Event(), threading.Event()

    def events(params):
        request.set()
        return []

    daemon.answers["events"] = events
    thread = threading.Thread(target=lambda: (client.events(wait_s=1), answer.set()))
    thread.start()
    request.wait()
    assert client.status().pid == 42
    thread.join()
    assert answer.is_set()


def test_no_daemon(tmp_path):
    with pytest.raises(Unreachable, match="Start one with"):
        Client(tmp_path / "nothing")
    with pytest.raises(Unreachable, match="Start one with"):
        AsyncClient(tmp_path / "nothing")


def test_the_twin_asks_many_things_at_once(daemon, script):
    """Two waits and a submission share one socket, though the daemon answers in its own order."""
    ending(daemon, ["j1", "j2"])

    async def session():
        async with AsyncClient(daemon.state_dir) as client:
            submitted = await client.submit(script, nodes="1:4")
            jobs = [await client.job(name) for name in ("j1", "j2")]
            states = await asyncio.gather(*(job.wait() for job in jobs))
            metrics = await submitted.metrics()
            lines = [line async for line in submitted.logs()]
            return states, metrics["loss"].values, lines, await submitted.cancel()

    assert asyncio.run(session()) == (["completed"] * 2, LOSS.values, ["hello"], True)


def test_the_twin_is_told_when_the_daemon_refuses_and_when_it_goes(daemon):
    def refuse(params):
        raise Refuse("There is no job 'x'.")

    async def session():
        async with AsyncClient(daemon.state_dir) as client:
            assert (await client.status()).pid == 42
            daemon.answers["job"] = refuse
            with pytest.raises(ClientError, match=r"There is no job 'x'\."):
                await client.job("x")
            daemon.stop(forget=False)
            with pytest.raises(Unreachable):
                await client.status()

    asyncio.run(session())


def test_a_coroutine_that_waits_for_an_event_loop_is_refused():
    with pytest.raises(RuntimeError, match="there is none"):
        finish(asyncio.sleep(0.0))


def public(kind):
    return {name for name in vars(kind) if not name.startswith("_")}


def test_the_twins_have_the_same_methods_and_parameters():
    from malletrain.api.aio import AsyncJob

    for one, other in ((Client, AsyncClient), (Job, AsyncJob)):
        assert public(one) - public(other) <= {"ended", "executor", "view"}
        for name in public(one) & public(other):
            mine, theirs = getattr(one, name), getattr(other, name)
            if inspect.isfunction(mine) and name != "logs":
                parameters = inspect.signature(mine).parameters
                assert list(parameters) == list(inspect.signature(theirs).parameters), name


def test_a_link_of_a_job_is_set_by_both_clients_and_by_the_job(daemon, client):
    daemon.answers["link"] = lambda params: {"sentence": f"{params['name']} links there."}
    url = "http://login1:6006/"

    async def of_the_twin():
        async with AsyncClient(daemon.state_dir) as twin:
            return await twin.set_link("train", "TensorBoard", url)

    sentences = [
        client.set_link("train", "TensorBoard", url),
        client.job("j1").set_link("TensorBoard", url),
        asyncio.run(of_the_twin()),
    ]
    assert sentences == ["TensorBoard links there."] * 3
    requests = [params for op, params in daemon.seen if op == "link"]
    assert [params["job"] for params in requests] == ["train", "j1", "train"]
    assert all(params["url"] == url for params in requests)
