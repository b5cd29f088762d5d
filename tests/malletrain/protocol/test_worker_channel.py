"""Both ends of the worker-agent channel: what is sent arrives the same, what is malformed is
refused with a sentence.
"""

import json
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.protocol.flags import FlagsReader, FlagsWriter
from malletrain.protocol.worker_channel import (
    MAX_DATAGRAM_BYTES,
    BatchFacts,
    Capable,
    DataCacheFacts,
    DrainDone,
    ModelFacts,
    Outbox,
    OwnerNotice,
    ScriptMetric,
    Sender,
    SnapshotTaken,
    StartupMark,
    WorkerProgress,
    decode_datagram,
    encode,
    progress_encoder,
)

SENDER = Sender("job-1", 4, 2, 4711)
EVERY_KIND = [
    WorkerProgress(SENDER, 640, 10, 64.5, 1000.25, 1001.5, 3),
    StartupMark(SENDER, "import", 1000.125),
    SnapshotTaken(SENDER, True, "/spool/x.pt", 1024, 0.25, 640.0, 10),
    SnapshotTaken(
        SENDER, False, '/spool/\udc80 % " x.pt', 0, 0.25, 640, 10, "Kein Platz für «x»: 磁盘已满"
    ),
    Capable(SENDER),
    BatchFacts(SENDER, 256),
    BatchFacts(SENDER, None),
    BatchFacts(SENDER, 256, 64, 4096, 511.5),
    OwnerNotice(SENDER, "3 batches are left out."),
    DataCacheFacts(SENDER, "images", "n1", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0.5),
    DrainDone(SENDER, 7, False, "No space left on device"),
    ScriptMetric(SENDER, "log likelihood", -3.5),
    ModelFacts(SENDER, 10_000, None),
]


@pytest.mark.parametrize("message", EVERY_KIND, ids=lambda message: type(message).__name__)
def test_every_kind_arrives_as_sent(message):
    assert decode_datagram(encode(message)) == message


@given(
    st.text(max_size=40),
    st.floats(0, 1e15),
    st.integers(0, 2**62),
    st.floats(0, 1e9) | st.integers(0, 10**9),
)
def test_the_fast_progress_encoder_agrees_with_the_plain_one(job, samples, steps, batch):
    sender = Sender(job, 1, 0, 1)
    data = progress_encoder(sender)(samples, steps, batch, 1.5, 2.5, 0)
    assert decode_datagram(data) == WorkerProgress(sender, samples, steps, batch, 1.5, 2.5, 0)
    assert data == encode(WorkerProgress(sender, samples, steps, batch, 1.5, 2.5, 0))


@given(st.text(), st.text())
def test_long_texts_are_shortened_and_stay_valid(path, sentence):
    message = SnapshotTaken(SENDER, False, path * 500, 0, 0.0, 0, 0, sentence * 500)
    data = encode(message)
    assert len(data) <= MAX_DATAGRAM_BYTES
    decoded = decode_datagram(data)
    assert decoded.path[:50] == message.path[:50]
    assert decoded.sentence[-50:] == message.sentence[-50:]


def body(**changes):
    fields = json.loads(encode(EVERY_KIND[0]))
    for name, value in changes.items():
        if value is None:
            del fields[name]
        else:
            fields[name] = value
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 4000, "not JSON"),
        (b"[1]", "not a JSON object"),
        (b" " * (MAX_DATAGRAM_BYTES + 1), "at most 4096"),
        (body(v=2), "version 2"),
        (body(v=None), "version None"),
        (body(kind="shutdown"), "unknown kind 'shutdown'"),
        (body(kind=[1]), "unknown kind"),
        (body(steps=None), "without the field 'steps'"),
        (body(rank=None), "without the field 'rank'"),
        (body(rank=-1), "rank is '-1'"),
        (body(pid=True), "pid is 'True'"),
        (body(job=5), "job is '5'"),
        (body(samples="64"), "samples is '64'"),
        (body(samples=-1.5), "must not be negative"),
        (body(steps=1.5), "steps is '1.5'"),
        (body(surprise=1), "unknown field 'surprise'"),
        (body(sender=1), "unknown field 'sender'"),
        (body().replace(b"1001.5", b"NaN"), "last is 'nan'"),
        (body().replace(b"1001.5", b"1e999"), "last is 'inf'"),
        (body().replace(b"640", b"9" * 3000), "samples"),
    ],
)
def test_malformed_datagrams_are_refused_with_a_sentence(data, complaint):
    with pytest.raises(ValueError, match="datagram") as caught:
        decode_datagram(data)
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 300


@given(st.binary(max_size=200))
def test_no_bytes_at_all_crash_the_decoder(data):
    with pytest.raises(ValueError, match="datagram"):
        decode_datagram(data)


def test_an_absent_agent_costs_nothing_but_a_count(tmp_path):
    outbox = Outbox(str(tmp_path / "nobody"))
    assert not outbox.send(b"1")
    assert not outbox.send(b"2", keep=True)
    assert outbox.unsent == 2
    assert not outbox.agent_is_slow()
    too_long = Outbox("/tmp/" + "x" * 200)
    assert not too_long.send(b"1")


def test_what_must_arrive_is_kept_for_an_agent_that_is_slow(tmp_path):
    path = os.path.relpath(tmp_path / "agent")
    outbox = Outbox(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(path)
        agent.setblocking(False)
        sent = 0
        while outbox.send(b"%d" % sent):
            sent += 1
        assert not outbox.send(b"progress")
        assert not outbox.send(b"last metric", keep=True)
        assert outbox.agent_is_slow()
        assert [agent.recv(100) for _ in range(sent)] == [b"%d" % number for number in range(sent)]
        assert outbox.send(b"more")
        assert agent.recv(100) == b"last metric"
        assert agent.recv(100) == b"more"
    outbox.close()


def test_the_worker_sees_the_drain_request_of_the_agent(tmp_path):
    writer = FlagsWriter(str(tmp_path / "flags"))
    reader = FlagsReader(str(tmp_path / "flags"))
    assert reader.drain_request() == 0
    for number in (1, 255, 256, 2**63):
        writer.request_drain(number)
        assert reader.drain_request() == number
    writer.request_drain(0)
    assert reader.drain_request() == 0
    writer.request_drain(9)
    writer.close()
    assert reader.drain_request() == 9  # a worker outlives the file
    assert not os.path.exists(tmp_path / "flags")
    reader.close()


def test_heirs_that_cannot_be_written_down_stop_no_drain(tmp_path):
    """A full disk of the node: the agent goes on, and the snapshot goes to the shared disk."""
    writer = FlagsWriter(str(tmp_path / "flags"))
    reader = FlagsReader(str(tmp_path / "flags"))
    writer.request_drain(1, ("n1:7",))
    assert reader.heirs(1) == ("n1:7",)
    (tmp_path / "flags.heirs.tmp").mkdir()
    writer.request_drain(2, ("n1:7",))
    assert (reader.drain_request(), reader.heirs(2)) == (2, ())


def test_a_new_flags_file_leaves_readers_of_the_old_one_alone(tmp_path):
    old = FlagsWriter(str(tmp_path / "flags"))
    reader = FlagsReader(str(tmp_path / "flags"))
    old.request_drain(5)
    new = FlagsWriter(str(tmp_path / "flags"))
    new.request_drain(6)
    assert reader.drain_request() == 5
    assert FlagsReader(str(tmp_path / "flags")).drain_request() == 6


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"\1" * 65])
def test_a_file_that_is_no_flags_file_is_refused(tmp_path, content):
    (tmp_path / "flags").write_bytes(content)
    with pytest.raises(ValueError, match="flags file"):
        FlagsReader(str(tmp_path / "flags"))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_metric_that_is_no_number_travels_as_json(value):
    data = encode(ScriptMetric(SENDER, "loss", float(value)))

    def refuse(token):
        raise AssertionError(f"{token} is no JSON")

    assert json.loads(data, parse_constant=refuse)["value"] == value
    assert str(decode_datagram(data).value) == value


@pytest.mark.parametrize("value", ['"1.0"', '"NaN"', "NaN", "1e999", "null", "true"])
def test_what_no_metric_is_is_refused(value):
    data = encode(ScriptMetric(SENDER, "loss", 17.25)).replace(b"17.25", value.encode())
    with pytest.raises(ValueError, match=r'it must be a number, or one of the texts "nan", "inf"'):
        decode_datagram(data)
