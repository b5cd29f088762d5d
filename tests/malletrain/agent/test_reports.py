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


def measured(value, at=0.0, rank=0, name="accuracy"):
    return local.ScriptMetric(sender(rank), name, value, at or 100.0 + value, 8.0, 1)


def test_values_of_metrics_go_together_after_the_counts_that_they_belong_to(reports, daemon):
    reports.take(progress(1))
    for value in (0.5, 0.25, 0.75):
        reports.take(measured(value))
    reports.take(measured(3.0, name="loss"))
    assert daemon.got == []
    reports.flush_due(now=10.0)
    assert [type(m) for m in daemon.got] == [messages.Progress, messages.Metric, messages.Metric]
    accuracy, loss = daemon.got[1:]
    assert (accuracy.name, accuracy.value, accuracy.generation) == ("accuracy", 0.75, 1)
    assert [p.value for p in accuracy.points] == [0.5, 0.25, 0.75]
    assert accuracy.points[0] == messages.MetricSample(100.5, 0.5, 8.0, 1)
    assert loss.points == (messages.MetricSample(103.0, 3.0, 8.0, 1),)
    reports.take(measured(0.8))
    reports.flush_due(now=10.1)
    assert len(daemon.got) == 3, "half a second is not over"
    reports.flush_due(now=10.6)
    assert daemon.got[3].points[0].value == 0.8


def test_a_value_that_somebody_may_wait_for_goes_at_once(reports, daemon):
    assert reports.take_all([progress(1)], now=10.0) == []
    assert daemon.got == [], "counts can wait"
    reports.take_all([measured(0.5)], now=10.0)
    assert [type(m) for m in daemon.got] == [messages.Progress, messages.Metric]
    reports.take_all([measured(0.6), measured(3.0, name="loss")], now=10.1)
    assert [m.name for m in daemon.got[2:]] == ["loss"], "half a second is not over for the other"
    reports.take_all([measured(0.7)], now=10.6)
    assert [p.value for p in daemon.got[3].points] == [0.6, 0.7]


def test_of_many_values_that_wait_the_extremes_and_the_newest_stay(reports, daemon):
    daemon.there = False
    values = [float(i % 7) for i in range(1000)]
    values[500], values[501] = -9.0, 99.0
    for number, value in enumerate(values):
        reports.take(measured(value, at=1.0 + number))
    daemon.there = True
    reports.flush_metrics()
    (message,) = daemon.got
    sent_values = [point.value for point in message.points]
    assert len(sent_values) <= 256
    assert (min(sent_values), max(sent_values), sent_values[-1]) == (-9.0, 99.0, values[-1])
    assert [p.time for p in message.points] == sorted(p.time for p in message.points)


def test_everything_else_is_sent_at_once(reports, daemon):
    reports.take(local.StartupMark(sender(), "import", 5.0))
    reports.take(local.SnapshotTaken(sender(), True, "/p", 10, 0.5, 80.0, 10))
    reports.take(local.SnapshotTaken(sender(), False, "/p", 0, 0.5, 80.0, 10, "The disk is full."))
    reports.take(local.ModelFacts(sender(), 1000, None))
    reports.take(local.OwnerNotice(sender(), "3 batches are left out."))
    assert daemon.got[0] == messages.Mark("j1", 1, 0, "import", 5.0)
    assert [
        (m.kind, m.sentence, m.data.get("saved"), m.data.get("parameters")) for m in daemon.got[1:]
    ] == [
        ("snapshot", "", True, None),
        ("snapshot", "The disk is full.", False, None),
        ("profile", "", None, 1000),
        ("script", "3 batches are left out.", None, None),
    ]
    assert daemon.got[1].data["samples"] == 80.0


def test_drains_and_the_ability_to_serve_them(reports, daemon):
    assert reports.take(local.Capable(sender(generation=4))) is None
    assert reports.capable == {4}
    assert reports.take(local.DrainDone(sender(generation=4), 2, False, "why")) == DrainServed(
        4, 2, False, "why"
    )
    assert daemon.got == []


def test_facts_about_layouts_are_sent_for_jobs_that_look_for_one(reports, daemon):
    facts = (local.Capable(sender()), local.BatchFacts(sender(), 64), local.BatchFacts(sender()))
    for fact in facts:
        reports.take(fact)
    assert daemon.got == []
    tuned = WorkerReports("j1", daemon.send, tuned=True)
    for fact in facts:
        tuned.take(fact)
    assert [(m.kind, m.data) for m in daemon.got] == [
        ("layout", {"saves": True, "generation": 1}),
        ("layout", {"global_batch": 64, "generation": 1}),
        ("layout", {"global_batch": None, "generation": 1}),
    ]


def test_a_stated_batch_is_sent_for_every_job(reports, daemon):
    reports.take(local.BatchFacts(sender(), 64, 64))
    reports.take(local.BatchFacts(sender(), 128, 64, 512, 99.5))
    reports.take(local.BatchFacts(sender()))  # each rank has a batch of its own
    assert [(m.kind, m.data) for m in daemon.got] == [
        ("batch", {"current": 64, "base": 64, "most": None, "noise_scale": None}),
        ("batch", {"current": 128, "base": 64, "most": 512, "noise_scale": 99.5}),
    ]


def test_the_counts_of_a_data_cache_are_sent_with_their_process(reports, daemon):
    counts = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    reports.take(local.DataCacheFacts(sender(generation=4), "images", "n1", *counts, 0.5))
    (notice,) = daemon.got
    assert (notice.kind, notice.sentence) == ("data", "")
    assert notice.data["process"] == f"4.{sender().pid}"
    assert (notice.data["name"], notice.data["node"]) == ("images", "n1")
    assert (notice.data["node_hits"], notice.data["coverage"]) == (1, 0.5)


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
    reports.take(measured(0.1))
    reports.take(measured(0.9))
    reports.take(measured(0.3, rank=1, name="loss"))
    reports.flush_metrics()
    daemon.there, daemon.got = True, []
    reports.reconnected()
    assert daemon.got[0] == messages.Mark("j1", 1, 0, "first", 5.0)
    assert daemon.got[1].steps == 1  # the last message before may have been lost
    assert [(m.name, [p.value for p in m.points]) for m in daemon.got[2:]] == [
        ("accuracy", [0.1, 0.9]),
        ("loss", [0.3]),
    ]
    daemon.got = []
    reports.reconnected()
    assert [type(m) for m in daemon.got] == [
        messages.Progress,
        messages.Metric,
        messages.Metric,
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


def test_a_training_is_over_until_its_worker_reports_again(reports, daemon):
    reports.take(progress(9))
    reports.take(local.WorkLeft(sender(), 64.0))
    assert not reports.is_over(1)
    reports.take(local.WorkLeft(sender(), 0.0))
    reports.take(progress(9))  # what was on its way
    assert reports.is_over(1)
    assert not reports.is_over(2)
    reports.take(progress(10))
    assert not reports.is_over(1)
    reports.take(local.WorkLeft(sender(rank=1), 0.0))
    assert reports.is_over(1)
    amounts = [m.data["left"] for m in daemon.got if getattr(m, "kind", "") == "work"]
    assert amounts == [64.0]
