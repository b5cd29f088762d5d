"""The example script, run for real: killed on one worker, resumed on two, started once more when it
is over.
"""

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from malletrain.protocol.worker_channel import ScriptMetric, SnapshotTaken, WorkerProgress
from malletrain.training import snapshot_file
from tests.malletrain.training.worker_side import FakeAgent
from tests.waiting import PATIENCE_S, until

SCRIPT = Path(__file__).parents[2] / "jobscripts" / "examples" / "digits.py"
EPOCHS, TRAIN_SAMPLES = 3, 1437


@contextlib.contextmanager
def started(*command, log, **env):
    """The command running, its output in ``log``; nothing of it is left afterwards."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLETRAIN", "RANK", "WORLD_SIZE"))
    }
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, env=clean | env
        )
    try:
        yield process
    finally:
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.kill()
        process.wait()


def torchrun(workers):
    return (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(workers),
        str(SCRIPT),
    )


def wait_for(condition, log):
    until(condition, "what the log should tell", 0.02, log.read_text)


def accuracy_in(text):
    match = re.search(r"test accuracy (0\.\d+)", text)
    assert match, text
    return float(match.group(1))


def model_in(path):
    return snapshot_file.read(str(path))["objects"]["model"]


def run_here(monkeypatch, capsys, *arguments):
    """The script as ``python digits.py`` runs it, without the seconds that importing torch again
    takes; return what it printed.
    """
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    return capsys.readouterr().out


def epoch_of(snapshot):
    """The epoch that a run would go on with, whose process may be writing the file just now."""
    try:
        return snapshot_file.read(str(snapshot))["objects"]["sampler"]["epoch"]
    except (OSError, snapshot_file.SnapshotError):
        return 0


@pytest.mark.thorough
def test_killed_on_one_worker_and_resumed_on_two_it_ends_as_if_undisturbed(
    tmp_path, monkeypatch, capsys
):
    log = tmp_path / "log"
    snapshot, undisturbed = tmp_path / "digits.pt", tmp_path / "undisturbed.pt"
    arguments = ("--epochs", str(EPOCHS), "--snapshot-every", "0", "--snapshot", str(snapshot))

    with started(*torchrun(1), *arguments, "--step-delay", "1.0", log=log) as run:
        undisturbed_said = run_here(
            monkeypatch, capsys, "--epochs", str(EPOCHS), "--snapshot", str(undisturbed)
        )
        wait_for(lambda: "epoch 1/3" in log.read_text() and epoch_of(snapshot) >= 1, log)
        (worker,) = psutil.Process(run.pid).children()
        worker.send_signal(signal.SIGKILL)
        assert run.wait(PATIENCE_S) != 0
    state = snapshot_file.read(str(snapshot))["objects"]["sampler"]
    assert state["epoch"] >= 1

    agent = FakeAgent()
    try:
        messages = []
        with started(
            *torchrun(2), *arguments, log=log, MALLETRAIN_SOCKET=agent.path, MALLETRAIN_JOB="digits"
        ) as run:
            while run.poll() is None:
                messages.extend(agent.received())
                time.sleep(0.005)
            messages.extend(agent.received())
            assert run.returncode == 0, log.read_text()
    finally:
        agent.close()
    assert f"restored epoch {state['epoch']} sample {state['position']}" in log.read_text()
    assert "training on 2 worker(s)" in log.read_text()
    last = {
        message.sender.rank: message.samples
        for message in messages
        if isinstance(message, WorkerProgress)
    }
    assert sum(last.values()) == EPOCHS * TRAIN_SAMPLES - (
        state["epoch"] * TRAIN_SAMPLES + state["position"]
    )
    assert any(isinstance(message, SnapshotTaken) and message.saved for message in messages)
    (metric,) = [message for message in messages if isinstance(message, ScriptMetric)]
    assert metric.value == pytest.approx(accuracy_in(log.read_text()), abs=1e-4)

    mine, theirs = model_in(snapshot), model_in(undisturbed)
    assert all(torch.allclose(mine[name], theirs[name], atol=1e-4) for name in mine)
    assert accuracy_in(log.read_text()) == pytest.approx(accuracy_in(undisturbed_said), abs=0.01)

    again = run_here(monkeypatch, capsys, *arguments)
    assert accuracy_in(again) == accuracy_in(log.read_text())
    assert "epoch 3/3" not in again


@pytest.mark.thorough
def test_the_live_example_trains_the_same_under_torchrun(tmp_path):
    live = SCRIPT.with_name("digits_live.py")
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(live))
    options = ("--epochs", "3", "--snapshot", str(tmp_path / "live.pt"))
    with started(*command, *options, log=tmp_path / "live.log") as process:
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "live.log").read_text()
    with started(str(SCRIPT), "--epochs", "3", log=tmp_path / "plain.log") as process:
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "plain.log").read_text()
    text = (tmp_path / "live.log").read_text()
    assert "training as rank 0 of 2" in text
    assert accuracy_in(text) == pytest.approx(
        accuracy_in((tmp_path / "plain.log").read_text()), abs=0.01
    )
    assert (tmp_path / "live.pt").exists()
