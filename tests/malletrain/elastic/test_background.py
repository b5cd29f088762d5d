"""Snapshots in the background: the loop is held for a copy and not for the disk, one is written at
a time, and what is written is whole.
"""

from __future__ import annotations

import math
import threading

import pytest
import torch

from malletrain import SnapshotError
from malletrain.elastic.background import BackgroundSnapshot
from malletrain.elastic.errors import ElasticError
from malletrain.elastic.training import Training
from malletrain.protocol.worker_channel import Capable
from malletrain.training import report, snapshot_file
from tests.malletrain.training.worker_side import as_plain_script, as_worker
from tests.waiting import PATIENCE_S


@pytest.fixture
def slow_disk(monkeypatch):
    """Writing waits until the test lets it go on; yields (release, began, threads that wrote)."""
    release, began, writers = threading.Event(), threading.Event(), []
    write = snapshot_file.write

    def slow(*args, **options):
        writers.append(threading.current_thread())
        began.set()
        assert release.wait(PATIENCE_S)
        return write(*args, **options)

    monkeypatch.setattr(snapshot_file, "write", slow)
    with as_plain_script(monkeypatch):
        yield release, began, writers


def test_training_goes_on_while_a_snapshot_is_written(tmp_path, slow_disk):
    release, began, writers = slow_disk
    model, counts = torch.nn.Linear(4, 4), {"steps": 0}
    snapshot = BackgroundSnapshot(tmp_path / "run.pt", 0.0, model=model, run=counts)
    with torch.no_grad():
        model.weight.fill_(1.0)
    for step in range(1, 6):  # every step is due; none waits for the disk
        counts["steps"] = step
        snapshot.step()
        with torch.no_grad():
            model.weight.add_(1.0)
    assert began.wait(PATIENCE_S)
    assert len(writers) == 1, "one at a time"
    assert writers[0] is not threading.main_thread()
    release.set()
    snapshot.wait()
    saved = snapshot_file.read(str(tmp_path / "run.pt"))["objects"]
    assert saved["run"]["steps"] == 1
    assert torch.equal(saved["model"]["weight"], torch.full((4, 4), 1.0)), (
        "as it was when the copy was made"
    )
    # the next one is due at once: what is on disk is never older than the interval and one write
    snapshot.step()
    snapshot.wait()
    saved = snapshot_file.read(str(tmp_path / "run.pt"))["objects"]
    assert saved["run"]["steps"] == 5
    assert torch.equal(saved["model"]["weight"], torch.full((4, 4), 6.0))


def test_a_snapshot_on_demand_waits_for_the_one_being_written_and_is_newer(tmp_path, slow_disk):
    release, began, writers = slow_disk
    counts = {"steps": 1}
    snapshot = BackgroundSnapshot(tmp_path / "run.pt", 0.0, run=counts)
    snapshot.step()
    assert began.wait(PATIENCE_S)
    counts["steps"] = 2
    release.set()
    assert snapshot.save()
    assert len(writers) == 2
    assert writers[1] is threading.main_thread()
    assert snapshot_file.read(str(tmp_path / "run.pt"))["objects"]["run"]["steps"] == 2


def test_every_round_s_first_rank_says_that_it_saves_on_request(tmp_path, monkeypatch):
    """Else the drain before a suspension is refused, and what was trained since the last snapshot
    is lost.
    """
    with as_worker(monkeypatch, generation=3) as agent:
        cpu, path = torch.device("cpu"), tmp_path / "run.pt"
        training = Training({"model": torch.nn.Linear(1, 1)}, cpu, path, math.inf)
        for generation, rank in ((3, 0), (4, 0), (5, 1), (6, 0)):
            report.entered(generation, rank, 2)
            training.settled()
            training.snapshot_step()
            training.snapshot_step()
        generations = [message.sender.generation for message in agent.received(Capable)]
    assert generations == [3, 4, 6]


def test_a_disk_that_is_full_stops_no_training(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot_file, "write", full)
    with as_plain_script(monkeypatch):
        snapshot = BackgroundSnapshot(tmp_path / "run.pt", 0.0, run={"steps": 1})
        snapshot.step()
        snapshot.wait()
    assert "No space left on device" in capsys.readouterr().err


def test_the_place_taken_by_another_job_ends_the_run(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    with as_plain_script(monkeypatch):
        monkeypatch.setenv("MALLETRAIN_JOB", "j1")
        BackgroundSnapshot(path, 0.0, run={"steps": 1}).save()
        monkeypatch.setenv("MALLETRAIN_JOB", "j2")
        other = BackgroundSnapshot(path, 0.0, run={"steps": 2})
        other.step()
        other.wait()
        for again in (other.step, other.save):
            with pytest.raises(SnapshotError, match="is that of job j1"):
                again()
    assert snapshot_file.read(str(path))["objects"]["run"] == {"steps": 1}


def test_a_run_that_goes_on_without_its_scheduler_is_refused(tmp_path, monkeypatch):
    def updated(path, times):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        snapshot = BackgroundSnapshot(path, math.inf, model=model, optimizer=optimizer)
        snapshot.restore()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for _ in range(times):
            optimizer.step()
            scheduler.step()
        snapshot.save()

    with as_plain_script(monkeypatch):
        updated(tmp_path / "x.pt", 2)
        with pytest.raises(ElasticError, match=r"step 2 .* Make it before elastic\.Run and pass"):
            updated(tmp_path / "x.pt", 1)


def test_what_is_not_saved_is_named_at_the_first_snapshot(tmp_path, monkeypatch, capsys):
    report.sentence_keys.clear()
    model = torch.nn.Linear(2, 2)
    model.outputs = []
    average = torch.optim.swa_utils.AveragedModel(model)
    with as_plain_script(monkeypatch):
        snapshot = BackgroundSnapshot(tmp_path / "run.pt", 0.0, model=model)
        snapshot.restore()
        model.outputs.append(1)
        average.update_parameters(model)
        snapshot.step()
        snapshot.wait()
    log = capsys.readouterr().err
    assert "elastic.Run does not save model.outputs: " in log
    assert "elastic.Run was not given the average of 'model'" in log
