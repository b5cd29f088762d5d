"""The client against a daemon that is absent, deaf, gone half-way, foreign, or of another
version.
"""

import asyncio
import dataclasses
import gc
import threading

import msgspec
import pytest
import zmq

from malletrain.client import ClientError, Connection, Unreachable, exchange, operations
from malletrain.client.aio import AsyncConnection
from malletrain.client.exchange import find
from malletrain.identity.keys import new_pair, write_key
from malletrain.identity.state_directory import INFO, write_daemon_info
from malletrain.protocol import messages, wire
from tests.malletrain.cli.fake_daemon import SILENCE, FakeDaemon, Refuse, default_answers, job_view
from tests.waiting import PATIENCE_S


@pytest.fixture
def daemon(tmp_path):
    fake = FakeDaemon(tmp_path / "state", default_answers())
    yield fake
    fake.stop()


SPEC = messages.JobSpec(
    name="a", owner="b", script="/c", workdir="/d", python="/e", curve={"1": 2.0}
)


def test_operations(daemon):
    with Connection.of(daemon.state_dir) as client:
        assert client.submit(SPEC).state == "queued"
        assert daemon.seen[0][1]["spec"]["curve"] == {"1": 2.0}
        assert client.jobs() == [job_view()]
        assert client.job("train").rescales[0].phases == {"rendezvous": 0.5}
        assert client.nodes()[1].gone_in_s == 4.0
        assert [e.seq for e in client.events(since=1)] == [2, 3]
        assert client.logs("train").text == "hello\n"
        assert client.status().pid == 42
        assert client.cancel(["a"])[0]["ok"]


def test_refused(daemon):
    def refuse(params):
        raise Refuse("No such job.")

    daemon.answers["job"] = refuse
    with Connection.of(daemon.state_dir) as client:
        with pytest.raises(ClientError, match=r"^No such job\.$") as caught:
            client.job("x")
        assert caught.value.code == "refused"
        assert client.status().pid == 42  # the connection is still good


def test_never_started(tmp_path):
    with pytest.raises(Unreachable, match="Start one with: malletrain daemon --config"):
        Connection.of(tmp_path / "nothing")


def test_killed(daemon):
    """kill -9 leaves daemon.json; this process is alive, so only the address tells."""
    daemon.stop(forget=False)
    with (
        Connection.of(daemon.state_dir) as client,
        pytest.raises(Unreachable, match=r"not running\. Start one with"),
    ):
        client.status()


def test_process_gone(daemon):
    write_daemon_info(daemon.state_dir / INFO, dataclasses.replace(daemon.info, pid=2**22 + 1))
    with pytest.raises(Unreachable, match="is gone"):
        Connection.of(daemon.state_dir)


def test_restarted_between_two_calls(daemon, tmp_path):
    with Connection.of(daemon.state_dir) as client:
        assert client.status().pid == 42
        daemon.stop(forget=False)
        with pytest.raises(Unreachable):
            client.status()
    again = FakeDaemon(tmp_path / "state", default_answers())
    try:
        with Connection.of(tmp_path / "state") as client:
            assert client.status().pid == 42
    finally:
        again.stop()


def test_deaf(daemon):
    daemon.answers["submit"] = lambda p: SILENCE
    with Connection.of(daemon.state_dir, timeout_s=0.2) as client:
        with pytest.raises(
            Unreachable,
            match=r"did not answer within 0\.2 s\. Whether it carried the request out is not known",
        ):
            client.submit(SPEC)
        daemon.answers["jobs"] = lambda p: SILENCE
        with pytest.raises(Unreachable) as caught:
            client.jobs()
        assert "carried" not in str(caught.value)
        daemon.answers["events"] = lambda p: SILENCE
        with pytest.raises(Unreachable, match=r"did not answer within 0\.5 s"):
            client.events(wait_s=0.3)
    with Connection.of(daemon.state_dir) as client:
        assert client.status().pid == 42


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 10.0), ("90", 90.0), ("0", 1.0), ("inf", 86400.0), ("long", 10.0)]
)
def test_the_user_says_how_long_an_answer_may_take(text, seconds):
    assert exchange.timeout_of(text) == seconds


def test_the_tests_wait_for_answers_longer_than_users_do():
    assert exchange.TIMEOUT_S == PATIENCE_S
    assert exchange.CONNECT_S >= PATIENCE_S / 2


def test_an_unknown_key(daemon):
    """Somebody else's key is told so at once."""
    write_key(daemon.state_dir / "keys" / "client.key", new_pair())
    with (
        Connection.of(daemon.state_dir) as client,
        pytest.raises(Unreachable, match="does not accept this client's key"),
    ):
        client.status()


def test_wrong_server_key(daemon):
    foreign, own = new_pair(), new_pair()
    client = Connection(
        daemon.info.endpoint, foreign.public.encode(), own.public.encode(), own.secret.encode()
    )
    with client, pytest.raises(Unreachable):
        client.status()


def test_answer_of_another_version(daemon):
    daemon.answers["status"] = lambda p: {"surprise": 1}
    with (
        Connection.of(daemon.state_dir) as client,
        pytest.raises(ClientError, match="data this version does not know"),
    ):
        client.status()


def test_request_too_large(daemon):
    with Connection.of(daemon.state_dir) as client:
        with pytest.raises(ClientError, match="over the limit") as caught:
            client.submit(msgspec.structs.replace(SPEC, env={"A": "x" * wire.MAX_MESSAGE_BYTES}))
        assert caught.value.code == "usage"
    assert daemon.seen == []


@pytest.mark.parametrize(
    ("endpoint", "server"),
    [
        ("tcp://127.0.0.1:4711", "short"),
        ("tcp://127.0.0.1:4711", "#" * 40),
        ("tcp://127.0.0.1", "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"),
    ],
)
def test_an_address_that_cannot_be_used_is_told_and_leaves_nothing_open(endpoint, server):
    own = new_pair()
    client = Connection(
        endpoint, server.encode(), own.public.encode(), own.secret.encode(), start_hint="Ask them."
    )
    for _ in range(2):
        with pytest.raises(Unreachable, match=r"cannot be used \(.*\)\. Ask them\."):
            client.status()
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive(), "a socket left open lets it wait for ever"


def test_a_site_file_with_a_wrong_key_is_told(tmp_path, daemon, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MALLETRAIN_DAEMON", str(tmp_path / "site.json"))
    write_daemon_info(tmp_path / "site.json", dataclasses.replace(daemon.info, server_key="#" * 40))
    with Connection.of() as client, pytest.raises(Unreachable, match="key cannot be used"):
        client.status()
    write_daemon_info(tmp_path / "site.json", dataclasses.replace(daemon.info, server_key="x"))
    with pytest.raises(Unreachable, match=r"damaged \(its server_key .*ask the operators"):
        Connection.of()


def test_a_site_daemon_that_stopped_is_the_operators_business(tmp_path, daemon, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MALLETRAIN_DAEMON", str(tmp_path / "site.json"))
    write_daemon_info(
        tmp_path / "site.json", dataclasses.replace(daemon.info, pid=2**22 + 1)
    )  # a copy of before the last start
    with (
        Connection.of() as client,
        pytest.raises(Unreachable, match="does not accept this client's key"),
    ):
        client.status()
    daemon.stop()
    with (
        Connection.of() as client,
        pytest.raises(Unreachable, match=r"not running\. Ask the operators"),
    ):
        client.status()


def forgotten_connection(folder):
    connection = Connection.of(folder)
    assert connection.status().pid == 42
    connection.itself = connection
    return open_sockets()


def forgotten_async_connection(folder):
    async def use():
        connection = AsyncConnection(find(folder))
        assert (await connection.do(operations.status())).pid == 42
        connection.itself = connection
        return open_sockets()

    return asyncio.run(use())


def open_sockets():
    """The number of open sockets of clients. The daemon's authenticator makes others all the
    time, in a thread of its own.
    """
    sockets = (o for o in gc.get_objects() if isinstance(o, zmq.Socket))
    return sum(not o.closed and o.type == zmq.DEALER for o in sockets)


@pytest.mark.parametrize("use", [forgotten_connection, forgotten_async_connection])
def test_a_connection_that_nobody_closes_is_collected(daemon, use):
    """Its context would wait for ever for sockets that the collector finds together with it."""
    gc.collect()
    before = open_sockets()
    assert use(daemon.state_dir) > before
    collector = threading.Thread(target=gc.collect, daemon=True)
    collector.start()
    collector.join(PATIENCE_S)
    assert not collector.is_alive()
    assert open_sockets() == before
