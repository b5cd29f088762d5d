"""Logs on their way: every byte once the daemon answers, one piece at a time, and the disk given
back.
"""

import errno
import os

import pytest

from malletrain.agent import logs
from malletrain.agent.logs import CHUNK_BYTES, LogForwarder, tail
from malletrain.protocol.messages import LogAck, LogChunk, LogEnd, LogsShipped


class Sink:
    """A daemon that keeps chunks, if it is there, and acknowledges when told to."""

    def __init__(self):
        self.there = True
        self.chunks = []
        self.messages = []
        self.data = b""

    def send(self, chunk):
        if not isinstance(chunk, LogChunk):
            self.messages.append(chunk)
        elif self.there:
            self.chunks.append(chunk)
            self.data = self.data[: chunk.offset] + chunk.data
        return self.there

    def ack(self):
        chunk = self.chunks[-1]
        return LogAck(chunk.job, chunk.generation, chunk.stream, chunk.node, len(self.data))


@pytest.fixture
def sink():
    return Sink()


@pytest.fixture
def forwarder(sink, tmp_path):
    forwarder = LogForwarder("n0", sink.send)
    forwarder.add("j1", 1, "rank0", tmp_path / "log")
    return forwarder


def test_a_log_is_sent_in_pieces_and_deleted_when_it_is_over(forwarder, sink, tmp_path):
    data = os.urandom(CHUNK_BYTES + 1000)
    (tmp_path / "log").write_bytes(data)
    forwarder.send_due()
    forwarder.send_due()  # nothing new before the answer
    assert [len(c.data) for c in sink.chunks] == [CHUNK_BYTES]
    forwarder.acknowledged(sink.ack())
    forwarder.send_due()
    forwarder.acknowledged(sink.ack())
    assert sink.data == data
    forwarder.send_due()
    assert (tmp_path / "log").exists()  # something may still be written
    forwarder.mark_complete("j1", before_generation=2)
    forwarder.send_due()
    assert not (tmp_path / "log").exists()
    assert not forwarder.files
    assert sink.messages == [LogsShipped("j1")]


def test_what_was_not_acknowledged_is_sent_again_after_a_reconnection(forwarder, sink, tmp_path):
    (tmp_path / "log").write_bytes(b"one\n")
    sink.there = False
    forwarder.send_due()
    sink.there = True
    forwarder.send_due()
    (tmp_path / "log").write_bytes(b"one\ntwo\n")
    forwarder.send_due()
    forwarder.reconnected()
    forwarder.send_due()
    assert [c.data for c in sink.chunks] == [b"one\n", b"one\ntwo\n"]
    assert sink.data == b"one\ntwo\n"


def test_no_answer_means_again(forwarder, sink, tmp_path, monkeypatch):
    (tmp_path / "log").write_bytes(b"one\n")
    forwarder.send_due()
    monkeypatch.setattr(logs, "_ACK_TIMEOUT_S", 0.0)
    forwarder.send_due()
    assert [c.offset for c in sink.chunks] == [0, 0]


def test_a_daemon_that_lost_its_copy_gets_it_again(forwarder, sink, tmp_path):
    (tmp_path / "log").write_bytes(b"one\ntwo\n")
    forwarder.send_due()
    forwarder.acknowledged(sink.ack())
    forwarder.acknowledged(LogAck("j1", 1, "rank0", "n0", 4))
    forwarder.send_due()
    assert (sink.chunks[-1].offset, sink.chunks[-1].data) == (4, b"two\n")


def test_a_log_at_its_limit_is_not_sent_any_further(forwarder, sink, tmp_path):
    forwarder.limit_bytes = 10
    (tmp_path / "log").write_bytes(b"x" * 20)
    forwarder.send_due()
    forwarder.acknowledged(sink.ack())
    (tmp_path / "log").write_bytes(b"x" * 2000)
    forwarder.send_due()
    assert len(sink.chunks) == 1
    forwarder.mark_complete("j1")
    forwarder.send_due()
    assert sink.messages == [LogEnd("j1", 1, "rank0", "n0", 2000), LogsShipped("j1")]


def test_a_log_that_is_over_goes_as_fast_as_the_daemon_takes_it(forwarder, sink, tmp_path):
    data = os.urandom(9 * CHUNK_BYTES + 1)
    (tmp_path / "log").write_bytes(data)
    forwarder.mark_complete("j1")
    forwarder.send_due()
    while forwarder.files:
        forwarder.acknowledged(sink.ack())
    assert sink.data == data
    assert sink.messages == [LogsShipped("j1")]


def test_what_could_not_be_sent_is_named(forwarder, sink, tmp_path):
    (tmp_path / "log").write_bytes(b"x" * 5000)
    forwarder.add("j2", 1, "rank1", tmp_path / "other")
    (tmp_path / "other").write_bytes(b"y" * 70)
    forwarder.send_due()
    forwarder.abandon()
    assert sink.messages == [
        LogEnd("j1", 1, "rank0", "n0", 5000),
        LogsShipped("j1"),
        LogEnd("j2", 1, "rank1", "n0", 70),
        LogsShipped("j2"),
    ]
    assert forwarder.unfinished_jobs() == ()


def test_a_launcher_started_again_takes_the_place_of_the_first(forwarder, sink, tmp_path):
    (tmp_path / "log").write_bytes(b"first launcher\n")
    forwarder.send_due()
    late = sink.ack()
    (tmp_path / "second").write_bytes(b"2nd\n")
    forwarder.add("j1", 1, "rank0", tmp_path / "second")
    forwarder.acknowledged(late)  # of the log that had the name before
    forwarder.send_due()
    assert (sink.chunks[-1].offset, sink.chunks[-1].data) == (0, b"2nd\n")


def test_the_disk_is_given_back_while_a_log_grows(forwarder, sink, tmp_path):
    size = 40 * CHUNK_BYTES
    (tmp_path / "log").write_bytes(os.urandom(size))
    before = (tmp_path / "log").stat().st_blocks
    for _ in range(size // CHUNK_BYTES):
        forwarder.send_due()
        forwarder.acknowledged(sink.ack())
    after = (tmp_path / "log").stat()
    assert len(sink.data) == after.st_size == size
    if after.st_blocks == before:
        pytest.skip("this file system cannot punch holes")
    assert after.st_blocks * 512 < size / 2
    assert tail(tmp_path / "log")


def test_logs_of_later_rounds_and_the_launchers_go_on(forwarder, tmp_path):
    forwarder.add("j1", 2, "rank0", tmp_path / "second")
    forwarder.add("j1", 0, "launcher", tmp_path / "launcher")
    forwarder.mark_complete("j1", before_generation=2)
    forwarder.send_due()
    assert sorted(forwarder.files) == [("j1", 0, "launcher"), ("j1", 2, "rank0")]
    forwarder.mark_complete("j1")
    forwarder.send_due()
    assert not forwarder.files


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ""),
        (b"a\nb\n", "a\nb"),
        (b"no newline", "no newline"),
        (b"\xff\xfe broken utf-8\n", "\ufffd\ufffd broken utf-8"),
        (
            b"".join(b"line %d\n" % i for i in range(100)),
            "\n".join(f"line {i}" for i in range(80, 100)),
        ),
        (b"x" * 10000, "x" * 4096),
        (b"first\n" + b"y" * 4086 + b"\nlast\n", "y" * 4086 + "\nlast"),
    ],
)
def test_tail(tmp_path, content, expected):
    (tmp_path / "log").write_bytes(content)
    assert tail(tmp_path / "log") == expected


def test_tail_of_nothing(tmp_path):
    assert tail(tmp_path / "none") == ""


def test_a_log_that_cannot_be_read_now_is_not_deleted(forwarder, sink, tmp_path, monkeypatch):
    """The node has no free file descriptors when the job ends."""
    (tmp_path / "log").write_bytes(b"its last words")
    forwarder.mark_complete("j1")

    def no_descriptors(path, mode):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(logs, "open", no_descriptors, raising=False)
    forwarder.send_due()
    assert (tmp_path / "log").exists()
    assert forwarder.unfinished_jobs() == ("j1",)
    monkeypatch.undo()
    forwarder.send_due()
    forwarder.acknowledged(sink.ack())
    assert sink.data == b"its last words"
    assert not (tmp_path / "log").exists()
