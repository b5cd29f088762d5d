"""The jobs of a sweep at a daemon: what is asked of it, and what not again."""

from __future__ import annotations

import pytest

from malletrain.client import Connection
from malletrain.protocol import messages
from malletrain.sweep.daemon_jobs import DaemonJobs
from malletrain.sweep.engine import JobRefused, JobsAway, TooManyJobs
from tests.malletrain.cli.fake_daemon import FakeDaemon, Refuse, default_answers
from tests.malletrain.daemon.test_forged_reports import World
from tests.waiting import NEVER_S

pytestmark = pytest.mark.slow


class RecordingJobs(DaemonJobs):
    """Remembers what it has asked."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(None)
        self._connection = connection
        self.operations: list[str] = []

    def _do(self, operation):
        self.operations.append(operation.op)
        return super()._do(operation)


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.close()


def measured(job, *values):
    samples = tuple(messages.MetricSample(float(s), v, float(s), s) for s, v in values)
    return messages.Metric(job, 0, "loss", values[-1][1], 1, samples)


def test_a_job_without_news_is_not_asked_again(world):
    job = world.job["ann"]
    world.say(measured(job, (1, 0.5), (2, 0.4)))
    with RecordingJobs(world.daemon.client("ann")) as jobs:
        jobs.wait([job], NEVER_S)  # nothing was heard before, so that there may be news
        assert jobs.points(job, "loss", -1) == [(1, 0.5), (2, 0.4)]
        count = len(jobs.operations)
        assert jobs.points(job, "loss", 2) == []
        assert jobs.points(job, "loss", 2) == []
        assert len(jobs.operations) == count
        assert jobs.points(job, "loss", -1) == [(1, 0.5), (2, 0.4)], "all of them are asked for"
        assert jobs.points(job, "loss", 1) == [(2, 0.4)], "it was not taken in"
        assert jobs.points(job, "accuracy", 2) == []
        assert len(jobs.operations) > count
        world.say(measured(job, (3, 0.3)))
        jobs.wait([job], NEVER_S)
        assert jobs.points(job, "loss", 2) == [(3, 0.3)]


def test_of_a_job_that_has_ended_since_the_last_news_all_is_asked_for(world):
    """It may report its last steps and end between the wait for news and the look at the jobs."""
    job = world.job["ann"]
    world.say(measured(job, (1, 0.5)))
    with RecordingJobs(world.daemon.client("ann")) as jobs:
        jobs.wait([job], NEVER_S)
        jobs.states([job])
        assert jobs.points(job, "loss", -1) == [(1, 0.5)]
        world.say(measured(job, (2, 0.4), (3, 0.3)))
        world.daemon.client("ann").cancel(job)
        assert jobs.states([job])[job].ended
        assert jobs.points(job, "loss", 1) == [(2, 0.4), (3, 0.3)]


def test_steps_are_numbered_before_values_are_thinned_out(world):
    job, many = world.job["ann"], 1500
    for first in range(0, many, 100):
        samples = tuple(
            messages.MetricSample(float(n + 1), float(n), 0.0, None)
            for n in range(first, first + 100)
        )
        world.say(messages.Metric(job, 0, "loss", 0.0, 1, samples))
    with RecordingJobs(world.daemon.client("ann")) as jobs:
        points = jobs.points(job, "loss", -1)
        assert len(points) < many / 2
        assert all(value == step for step, value in points)
        assert points[-1] == (many - 1, many - 1.0)


def test_an_end_is_news_and_what_it_was_is_known(world):
    job, other = world.job["ann"], world.daemon.submit("ann")
    with RecordingJobs(world.daemon.client("ann")) as jobs:
        jobs.wait([job, other], NEVER_S)
        jobs.cancel(other, "its trial was pruned")
        jobs.wait([job, other], NEVER_S)
        views = jobs.states([job, other, "j99"])
    assert {name: seen.state for name, seen in views.items()} == {
        job: "running",
        other: "cancelled",
        "j99": "lost",
    }
    assert world.daemon.job(other).reason == "cancelled by its owner: its trial was pruned"


def test_with_a_daemon_that_knows_no_news_every_job_is_asked_each_time(world, monkeypatch):
    job = world.job["ann"]
    world.say(measured(job, (1, 0.5)))
    operations = world.daemon.components.api.operations
    world.daemon.call(lambda: operations.pop("news"))
    with RecordingJobs(world.daemon.client("ann")) as jobs:
        jobs.points(job, "loss", -1)
        jobs.wait([job], 0.0)
        world.say(measured(job, (2, 0.4)))
        assert jobs.points(job, "loss", 1) == [(2, 0.4)]


@pytest.mark.parametrize("code", ["busy", "internal", "unauthenticated"])
def test_a_daemon_that_cannot_answer_now_has_not_lost_the_trials(tmp_path, code):
    """Otherwise a trial that runs would count as lost, and one to cancel would go on."""

    def refuse(params):
        raise Refuse("Not now.", code)

    fake = FakeDaemon(tmp_path / "state", {**default_answers(), "jobs": lambda params: []})
    try:
        fake.answers["job"] = fake.answers["cancel"] = refuse
        with DaemonJobs(fake.state_dir) as jobs:
            with pytest.raises(JobsAway):
                jobs.states(["j1"])
            with pytest.raises(JobsAway):
                jobs.cancel("j1", "pruned")
    finally:
        fake.stop()


@pytest.mark.parametrize(
    ("code", "error"), [("quota", TooManyJobs), ("refused", JobRefused), ("usage", JobRefused)]
)
def test_a_quota_is_told_from_a_job_that_is_refused(tmp_path, code, error):
    def refuse(params):
        raise Refuse("Not so.", code)

    fake = FakeDaemon(tmp_path / "state", {**default_answers(), "submit": refuse})
    try:
        with DaemonJobs(fake.state_dir) as jobs, pytest.raises(error, match="Not so"):
            jobs.submit(messages.JobSpec("a", "ada", "/train.py", "/", "python"))
    finally:
        fake.stop()
