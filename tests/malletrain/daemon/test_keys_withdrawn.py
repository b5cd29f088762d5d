"""Keys change while the daemon runs: who was taken off the list is out, on the connection that is
open too; a new key of the same user is in.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from malletrain.client import ClientError, Connection
from malletrain.daemon.server.sender_limits import RequestLimits
from malletrain.identity.keys import new_pair
from tests.malletrain.daemon.forged import USERS, Imagined, RunningDaemon, until
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


def refused(client):
    try:
        client.status()
    except ClientError as error:
        return "your key" in str(error).lower()
    return False


def replace_list(folder, text):
    """Replace the list at once: the daemon could read a list that is being written."""
    (folder / "users.new").write_text(text)
    (folder / "users.new").replace(folder / "users")


def take_off(folder, name):
    """Take the user off the list."""
    lines = (folder / "users").read_text().splitlines(keepends=True)
    replace_list(folder, "".join(one for one in lines if not one.startswith(name)))


@pytest.fixture
def running(tmp_path):
    running = RunningDaemon(tmp_path, Imagined())
    yield running
    running.stop()


@pytest.mark.parametrize("asks", ["events", "news"])
def test_who_waits_for_news_with_a_key_that_is_revoked_waits_no_longer(
    running, tmp_path, monkeypatch, asks
):
    monkeypatch.setattr("malletrain.daemon.api.operations.MAX_WAIT_S", 3600.0)
    job = running.submit("ann")
    with ThreadPoolExecutor() as pool, running.client("ann") as client:
        newest = max(event.seq for event in running.events())
        cursor = client.call("news", {"jobs": [job], "cursor": ""})["cursor"]
        params = {
            "events": {"since": newest, "job": job},
            "news": {"jobs": [job], "cursor": cursor},
        }[asks]
        waits = {**params, "wait_s": 3600.0}
        reply = pool.submit(client.call, asks, waits, wait_s=3600.0)
        until(lambda: running.components.message_router.long_polls, "it waits")
        take_off(tmp_path, "ann")
        assert "your key" in str(reply.exception()).lower()
        until(lambda: not running.components.message_router.long_polls, "nobody waits")


def test_what_waits_for_its_turn_when_the_key_is_revoked_is_not_done(
    running, tmp_path, monkeypatch
):
    arrival, permission = threading.Event(), threading.Event()

    async def begin(self, turn):
        arrival.set()
        while not permission.is_set():  # noqa: ASYNC110 (set in another thread)
            await asyncio.sleep(0.01)

    monkeypatch.setattr(RequestLimits, "begin", begin)
    with ThreadPoolExecutor() as pool:
        submitted = pool.submit(running.submit, "ann")
        try:
            assert arrival.wait(PATIENCE_S)
            take_off(tmp_path, "ann")
            identity = running.daemon.keys.identity
            until(lambda: identity(USERS["ann"].public) != "client:ann", "the key is out")
        finally:
            permission.set()
        assert "your key" in str(submitted.exception()).lower()
    with running.client() as client:
        assert client.jobs() == []


def test_a_revoked_key_is_out_and_a_new_one_in(tmp_path):
    running = RunningDaemon(tmp_path, Imagined("n0"))
    job, new = running.submit("ann"), new_pair()
    keys = running.daemon.keys.server.public.encode(), new.public.encode(), new.secret.encode()
    old, others = USERS["ann"].public, (tmp_path / "users").read_text()
    with running.client("ann") as client, running.client("bob") as bob:
        assert client.job(job).job.owner == "ann"
        replace_list(tmp_path, others.replace(old, new.public))
        until(lambda: refused(client), "the old key is out")
        with pytest.raises(ClientError):
            client.cancel([job])
        assert bob.status().pid
        with Connection(running.daemon.endpoint, *keys) as again:
            assert again.job(job).job.owner == "ann"
    running.stop()


def test_what_cannot_be_read_of_a_list_is_told_and_takes_nobody_else_away(running, tmp_path, capfd):
    """Whoever edited the list believes that the user has no access any more."""
    users, output = tmp_path / "users", ""

    def problem_count():
        nonlocal output
        output += capfd.readouterr().out
        return output.count("list of users not read")

    def metric():
        return running.metric("users_list_problems")

    assert not problem_count()
    with running.client("ann") as client:
        whole = users.read_text()
        replace_list(tmp_path, f"{whole}bob no key at all\n")
        until(problem_count, "a line is told")
        assert f"line {len(whole.splitlines()) + 1}" in output
        assert client.status().pid, "the other lines are in force"
        until(lambda: metric() == 1, "a line is counted")
        users.chmod(0o666)
        users.write_text("")
        until(lambda: problem_count() == 2, "the file is told")
        until(lambda: metric() == 2, "a line of the list before, and the file")
        assert client.status().pid, "the list before is in force"
        users.chmod(0o644)
        until(lambda: refused(client), "the list that can be read is")
        until(lambda: metric() == 0, "nothing is wrong any more")
    assert problem_count() == 2


def test_users_whose_line_is_ignored_are_told_and_learn_nothing_of_other_lines(running, tmp_path):
    with running.client("ann") as client, running.client("olga") as olga:
        replace_list(tmp_path, f"ann: {USERS['ann'].public}\nbob {USERS['bob'].public}\n")
        until(lambda: refused(client), "the line is ignored")
        with pytest.raises(ClientError, match="has your key in a line that it ignores") as caught:
            client.status()
        assert "'malletrain check' tells its operators what is wrong with it" in str(caught.value)
        assert str(caught.value).endswith(f" {USERS['ann'].public}")
        with pytest.raises(ClientError, match="Give its operators this line") as caught:
            olga.status()
        assert "ignores" not in str(caught.value)
