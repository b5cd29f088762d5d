"""TensorBoard's own reader finds every value, where it is installed as the tests have it."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from malletrain.api.series import NODES, JobMetrics, crc32c, write_csv, write_events
from malletrain.protocol.views import JobDetail, SeriesView
from tests.malletrain.cli.fake_daemon import job_view

LOSS = SeriesView(
    "train/loss µ",
    (2.5, -0.5, 1e300),
    (10.0, 11.0, 12.0),
    (8.0, 16.0, 24.0),
    (1, 4, 4),
    (0, 300, 2**40),
    3,
)
ACCURACY = SeriesView("accuracy", (0.25,), (11.0,), (16.0,), (4,), (None,), 1)


@pytest.mark.parametrize(
    ("data", "crc"), [(b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"", 0)]
)
def test_the_checksum_is_that_of_rfc_3720(data, crc):
    assert crc32c(data) == crc


def test_every_value_is_read_back(tmp_path):
    metrics = JobMetrics([LOSS, ACCURACY])
    file = write_events(tmp_path, JobDetail(job_view(submitted=9.0), {}), metrics.values())
    assert file.parent == tmp_path / "train-j1"
    assert write_events(tmp_path, JobDetail(job_view(submitted=9.0), {}), metrics.values()) == file
    read = EventAccumulator(str(file.parent)).Reload()
    assert set(read.Tags()["scalars"]) == {LOSS.name, "accuracy", NODES}
    loss = [(e.wall_time, e.step, e.value) for e in read.Scalars(LOSS.name)]
    assert loss == [(10.0, 0, 2.5), (11.0, 300, -0.5), (12.0, 2**40, float("inf"))]
    assert [(e.step, e.value) for e in read.Scalars("accuracy")] == [(16, 0.25)]
    assert [(e.step, e.value) for e in read.Scalars(NODES)] == [(8, 1.0), (16, 4.0), (24, 4.0)]


def test_the_command_line_writes_them_too(tmp_path, daemon, run):
    daemon.answers["metrics"] = lambda params: [LOSS, ACCURACY]
    done = run(
        "export", "train", "--tensorboard", tmp_path / "runs", "--metrics", tmp_path / "m.csv"
    )
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count("Wrote 4 values of 2 metrics to ") == 2
    (file,) = (tmp_path / "runs" / "train-j1").iterdir()
    assert len(EventAccumulator(str(file)).Reload().Scalars(LOSS.name)) == 3
    lines = (tmp_path / "m.csv").read_text().splitlines()
    assert lines[0] == "metric,time,step,samples,nodes,value"
    assert lines[4] == "accuracy,11.0,,16.0,4,0.25"
    assert write_csv(tmp_path / "again.csv", JobMetrics([LOSS])).exists()
    daemon.answers["metrics"] = lambda params: []
    none = run("export", "train", "--tensorboard", tmp_path / "runs")
    assert (none.exit_code, "has reported no metric" in none.stderr) == (1, True)
