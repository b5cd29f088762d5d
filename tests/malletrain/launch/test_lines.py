"""The socket of a launcher to its processes takes any input, and never waits for a process."""

import json
import socket

import pytest

from malletrain.launch.lines import MAX_BUFFERED_BYTES, MAX_CONNECTIONS, LineEndpoint, ProcessLine


@pytest.fixture
def endpoint(tmp_path):
    watched = set()
    made = LineEndpoint(
        str(tmp_path / "l"), lambda fd, on: watched.add(fd) if on else watched.discard(fd)
    )
    made.watched = watched
    yield made
    made.close()
    assert not watched


def process(endpoint):
    """The end of a process that has connected."""
    own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    own.settimeout(10)
    own.connect(endpoint.path)
    return own


def send_all(endpoint, own, data):
    """Send ``data`` while the launcher reads; return what it received."""
    received = []
    own.setblocking(False)
    while data:
        try:
            data = data[own.send(data) :]
        except BlockingIOError:
            received += endpoint.receive()
        except (BrokenPipeError, ConnectionResetError):
            break
    return received + endpoint.receive()


def test_lines_arrive_whole_and_an_answer_goes_to_its_sender(endpoint):
    with process(endpoint) as first, process(endpoint) as second:
        first.sendall(b'{"say": "hello", "local_rank": 1}\n{"say": "rea')
        ((connection, line),) = endpoint.receive()
        assert line == ProcessLine("hello", local_rank=1)
        first.sendall(b'dy", "generation": 2, "new": [1]}\n')
        assert endpoint.receive() == [(connection, ProcessLine("ready", generation=2))]
        connection.send({"round": 3})
        assert json.loads(first.makefile().readline()) == {"round": 3}
        second.setblocking(False)
        with pytest.raises(BlockingIOError):
            second.recv(1)


@pytest.mark.parametrize(
    "line", [b"\xff", b"[]", b"{}", b"null", b'{"say": 1}', b"[" * 10_000, b""], ids=repr
)
def test_an_invalid_line_is_dropped_and_the_next_one_read(endpoint, capsys, line):
    with process(endpoint) as own:
        own.sendall(line + b'\n{"say": "running"}\n')
        assert [received.say for _, received in endpoint.receive()] == ["running"]
        assert "sent an invalid line" in capsys.readouterr().out


def test_a_process_that_sends_an_endless_line_is_disconnected(endpoint, capsys):
    with process(endpoint) as endless, process(endpoint) as other:
        assert send_all(endpoint, endless, b"x" * (4 * MAX_BUFFERED_BYTES)) == []
        other.sendall(b'{"say": "ready"}\n')
        assert [line.say for _, line in endpoint.receive()] == ["ready"]
        assert "sent an endless line" in capsys.readouterr().out
        assert len(endpoint.watched) == 2  # the listener and the other process


def test_a_process_that_reads_nothing_is_disconnected(endpoint, capsys):
    with process(endpoint) as own:
        own.sendall(b'{"say": "hello"}\n')
        ((connection, _),) = endpoint.receive()
        for _ in range(4 * MAX_BUFFERED_BYTES // 65536):
            connection.send({"text": "x" * 65536})
        assert not connection.open
        endpoint.receive()
        assert "does not read its messages" in capsys.readouterr().out
        assert len(endpoint.watched) == 1


def test_an_end_is_noticed_after_the_last_lines(endpoint):
    with process(endpoint) as own:
        own.sendall(b'{"say": "drained"}\n')
    assert [line.say for _, line in endpoint.receive()] == ["drained"]
    assert endpoint.receive() == []
    assert len(endpoint.watched) == 1


def test_more_connections_than_allowed_are_closed(endpoint):
    processes = []
    try:
        for _ in range(MAX_CONNECTIONS + 1):
            processes.append(process(endpoint))
            endpoint.receive()
        assert processes[-1].recv(1) == b""
        processes[0].sendall(b'{"say": "ready"}\n')
        assert [line.say for _, line in endpoint.receive()] == ["ready"]
    finally:
        for own in processes:
            own.close()
