"""A job that is submitted again under its key, and one that its owner weighs anew."""

from __future__ import annotations

import msgspec
import pytest

from malletrain.client import ClientError, operations
from malletrain.protocol.messages import JobSpec
from tests.malletrain.daemon.forged import Imagined, RunningDaemon

SPEC = JobSpec("trial-3", "", "/x.py", "/", "python", profile=False, key="a1-3")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    daemon = RunningDaemon(tmp_path_factory.mktemp("weigh"), Imagined())
    yield daemon
    daemon.stop()


def of_key(key):
    return msgspec.structs.replace(SPEC, key=key)


def test_a_submission_under_a_key_is_one_job_however_often_it_comes(running):
    with running.client("ann") as client:
        first = client.submit(SPEC).id
        assert client.submit(SPEC).id == first
        assert client.submit(msgspec.structs.replace(SPEC, weight=2.0)).id == first
        gone = msgspec.structs.replace(SPEC, workdir="relative")
        assert client.submit(gone).id == first, "though it could not be submitted any more"
        client.cancel([first])
        assert client.submit(SPEC).id == first, "its end does not make it another"
        assert client.submit(msgspec.structs.replace(SPEC, key="a1-4")).id != first
        assert client.submit(msgspec.structs.replace(SPEC, key="")).id != first
    with running.client("bob") as client:
        assert client.submit(SPEC).id != first, "a key is its owner's"
    with running.client("ann") as client:
        assert len(client.jobs()) == 4


def test_trials_of_an_owners_sweep_are_one_entry_of_the_queue(running):
    job_of = {}
    for user in ("ann", "bob"):
        with running.client(user) as client:
            for n in range(2):
                spec = msgspec.structs.replace(of_key(f"entry-{n}"), sweep="lr/1a")
                job_of[user, n] = client.submit(spec).id
            with pytest.raises(ClientError, match="200 characters at most"):
                client.submit(msgspec.structs.replace(SPEC, key="", sweep="s" * 201))
    records = {who: running.components.state.controller.jobs[job] for who, job in job_of.items()}
    places = {who: record.place for who, record in records.items()}
    assert places["ann", 0] == places["ann", 1] != places["bob", 0] == places["bob", 1]


def test_a_new_weight_counts_and_outlives_the_daemon(tmp_path):
    daemon = RunningDaemon(tmp_path, Imagined())
    with daemon.client("ann") as client:
        job = client.submit(SPEC).id
        client.do(operations.weigh(job, 0.25))
        assert client.job(job).spec["weight"] == 0.25
    assert daemon.components.state.controller.jobs[job].submitted.weight == 0.25
    daemon.stop()
    again = RunningDaemon(tmp_path, Imagined())
    assert again.components.state.controller.jobs[job].submitted.weight == 0.25
    again.stop()


@pytest.mark.parametrize(
    ("user", "weight", "words"),
    [
        ("bob", 1.0, "belongs to ann; only its owner or an operator"),
        ("ann", 0.0, "weight is 0; give a number above 0"),
        ("ann", 1e9, "from 1e-06 to 1e[+]06"),
        ("ann", "much", "'weight' is 'much'; it is a number"),
        ("ann", True, "it is a number"),
    ],
)
def test_who_may_weigh_and_how_much(running, user, weight, words):
    with running.client("ann") as client:
        job = client.submit(of_key(words)).id
    with running.client(user) as client, pytest.raises(ClientError, match=words):
        client.do(operations.weigh(job, weight))
    with running.client("ann") as client:
        assert client.job(job).spec.get("weight", 1.0) == 1.0


def test_what_has_ended_is_not_weighed(running):
    with running.client("ann") as client:
        job = client.submit(of_key("ends")).id
        client.cancel([job])
        with pytest.raises(ClientError, match="is cancelled already"):
            client.do(operations.weigh(job, 2.0))
