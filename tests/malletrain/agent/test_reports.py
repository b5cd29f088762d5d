"""Workers' reports: what is sent when, and what is sent again."""

import socket

import pytest

from malletrain.agent.reports import DrainServed, WorkerReports, WorkerSocket
from malletrain.protocol import messages
from malletrain.protocol import worker_channel as local
from malletrain.protocol.launcher_channel import socket_directory


class Daemon:
    def __init__(self):
        self.there = True
        self.got = []

    def send(self, message):
        if self.there:
            self.got.append(message)
        return self.there


@pytest.fixture
def daemon():
    return Daemon()


@pytest.fixture
def reports(daemon):
    return WorkerReports("j1", daemon.send)


def sender(rank=0, generation=1, job="j1", pid=10):
    return local.Sender(job, generation, rank, pid)


def progress(steps, **who):
    return local.WorkerProgress(sender(**who), steps * 8.0, steps, 8.0, 100.0, 100.0 + steps)


def test_the_newest_counts_of_every_worker_are_sent_once(reports, daemon):
    for steps in (1, 2, 3):
        reports.take(progress(steps))
    reports.take(progress(7, rank=1))
    reports.take(progress(1, generation=2, pid=11))
    assert daemon.got == []
    reports.flush()
    reports.flush()
    assert [(m.generation, m.rank, m.steps, m.samples) for m in daemon.got] == [
        (1, 0, 3, 24.0),
        (1, 1, 7, 56.0),
        (2, 0, 1, 8.0),
    ]


def test_everything_else_is_sent_at_once(reports, daemon):
    reports.take(local.StartupMark(sender(), "import", 5.0))
    reports.take(local.ScriptMetric(sender(2), "accuracy", 0.9))
    reports.take(local.SnapshotTaken(sender(), True, "/p", 10, 0.5, 80.0, 10))
    reports.take(local.SnapshotTaken(sender(), False, "/p", 0, 0.5, 80.0, 10, "The disk is full."))
    reports.take(local.ModelFacts(sender(), 1000, None))
    assert daemon.got[:2] == [
        messages.Mark("j1", 1, 0, "import", 5.0),
        messages.Metric("j1", 2, "accuracy", 0.9),
    ]
    assert [
        (m.kind, m.sentence, m.data.get("saved"), m.data.get("parameters")) for m in daemon.got[2:]
    ] == [
        ("snapshot", "", True, None),
        ("snapshot", "The disk is full.", False, None),
        ("profile", "", None, 1000),
    ]
    assert daemon.got[2].data["samples"] == 80.0


def test_drains_and_the_ability_to_serve_them(reports, daemon):
    assert reports.take(local.Capable(sender(generation=4))) is None
    assert reports.capable == {4}
    assert reports.take(local.DrainDone(sender(generation=4), 2, False, "why")) == DrainServed(
        4, 2, False, "why"
    )
    assert daemon.got == []


def test_training_without_anything_to_save_is_noticed(reports):
    assert not reports.trains_unsaved(1), "nobody has begun"
    reports.take(progress(1))
    assert reports.trains_unsaved(1)
    assert not reports.trains_unsaved(2)
    reports.take(local.Capable(sender()))
    assert not reports.trains_unsaved(1)


def test_workers_of_a_job_that_was_here_before_are_not_heard(reports, daemon):
    reports.take(progress(1, job="j0"))
    reports.take(local.StartupMark(sender(job="j0"), "import", 5.0))
    reports.flush()
    assert daemon.got == []


def test_nothing_that_counts_is_lost_while_the_daemon_is_away(reports, daemon):
    reports.take(progress(1))
    reports.flush()
    daemon.there = False
    reports.take(local.StartupMark(sender(), "first", 5.0))
    reports.take(local.ScriptMetric(sender(), "accuracy", 0.1))
    reports.take(local.ScriptMetric(sender(), "accuracy", 0.9))
    reports.take(local.ScriptMetric(sender(1), "loss", 0.3))
    reports.flush()
    daemon.there, daemon.got = True, []
    reports.reconnected()
    assert daemon.got[0] == messages.Mark("j1", 1, 0, "first", 5.0)
    assert [(m.name, m.value) for m in daemon.got[1:3]] == [("accuracy", 0.9), ("loss", 0.3)]
    assert daemon.got[3].steps == 1  # the last message before may have been lost
    daemon.got = []
    reports.reconnected()
    assert [type(m) for m in daemon.got] == [
        messages.Metric,
        messages.Metric,
        messages.Progress,
    ]  # marks went out once


def test_what_is_kept_is_bounded(reports, daemon):
    daemon.there = False
    for i in range(1000):
        reports.take(progress(1, pid=i))
        reports.take(local.ScriptMetric(sender(), f"m{i}", 1.0))
        reports.take(local.StartupMark(sender(), f"m{i}", 1.0))
    daemon.there = True
    reports.reconnected()
    assert len(daemon.got) <= 3 * 256


def test_the_socket_drops_what_does_not_fit(tmp_path):
    directory = socket_directory(tmp_path)
    workers = WorkerSocket(str(directory / "workers.sock"))
    client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        for data in (b"junk", b"", b"[1]", b"x" * 9000, local.encode(progress(3))):
            client.sendto(data, workers.path)
        assert workers.receive() == [progress(3)]
        assert workers.refused == 4
        assert workers.receive() == []
        assert (directory / "workers.sock").stat().st_mode & 0o777 == 0o600
    finally:
        client.close()
        workers.close()
    assert not (directory / "workers.sock").exists()
