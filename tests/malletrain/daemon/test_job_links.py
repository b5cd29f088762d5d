"""Links of jobs on a daemon: set, replaced, removed, refused, and there after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from malletrain.client import ClientError, operations
from malletrain.render import job_detail
from tests.malletrain.daemon.forged import Imagined, RunningDaemon

URL = "http://login1:6006/"


@pytest.fixture
def running(tmp_path) -> Iterator[Any]:
    daemon = RunningDaemon(tmp_path, Imagined("n0"))
    yield daemon
    daemon.stop()


def links(running: RunningDaemon, job: str, user: str = "ann") -> dict[str, str]:
    with running.client(user) as client:
        return client.job(job).spec.get("links", {})


def set_link(running: RunningDaemon, *args: str, user: str = "ann") -> str:
    with running.client(user) as client:
        return client.do(operations.link(*args))


def test_a_link_is_set_replaced_shown_to_every_user_and_removed(running):
    job = running.submit("ann")
    assert links(running, job) == {}
    says = set_link(running, job, "TensorBoard", "http://other/")
    assert says == f"Job {job} (ann): TensorBoard links to http://other/."
    set_link(running, job, "TensorBoard", URL)
    set_link(running, job, "Notes", "https://wiki.example.org/run", user="olga")
    expected = {"TensorBoard": URL, "Notes": "https://wiki.example.org/run"}
    assert links(running, job) == links(running, job, "bob") == expected
    with running.client("bob") as client:
        console = Console(record=True, width=120)
        console.print(job_detail.job(client.job(job)))
    text = console.export_text()
    assert f"TensorBoard: {URL}" in text
    assert set_link(running, job, "Notes", "").endswith("Notes has no link of this name.")
    assert links(running, job) == {"TensorBoard": URL}


def test_links_outlive_the_daemon(tmp_path):
    machine = Imagined("n0")
    first = RunningDaemon(tmp_path, machine)
    job = first.submit("ann")
    set_link(first, job, "TensorBoard", URL)
    first.stop()
    second = RunningDaemon(tmp_path, machine)
    assert links(second, job) == {"TensorBoard": URL}
    second.stop()


def test_what_is_refused_is_refused_in_a_sentence(running):
    job = running.submit("ann")
    with pytest.raises(ClientError, match="only its owner or an operator can change the links"):
        set_link(running, job, "TensorBoard", URL, user="bob")
    with pytest.raises(ClientError, match="is not one of a web page") as refused:
        set_link(running, job, "TensorBoard", "javascript:alert(1)")
    assert refused.value.code == "usage"
    with pytest.raises(ClientError, match="is not one of a web page"):
        running.submit("ann", name="linked", links={"TensorBoard": "javascript:alert(1)"})
    waits = running.submit("ann", name="waits", after=(job,))
    with pytest.raises(ClientError, match="waits for other jobs"):
        set_link(running, waits, "TensorBoard", URL)
    with running.client("ann") as client:
        client.cancel([job])
    with pytest.raises(ClientError, match="is cancelled already"):
        set_link(running, job, "TensorBoard", URL)
    assert links(running, job) == {}
