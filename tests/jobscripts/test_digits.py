"""The example script, run for real: killed on one worker, resumed on two, started once more when it is over."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from malletrain import snapshot_file
from malletrain.local_channel import Metric, Progress, SnapshotTaken
from tests.malletrain.worker_side import FakeAgent

SCRIPT = Path(__file__).parents[2] / "jobscripts" / "examples" / "digits.py"
EPOCHS, TRAIN_SAMPLES = 3, 1437


@contextlib.contextmanager
def started(*command, log, **env):
    """The command running, its output in ``log``; nothing of it is left afterwards."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLETRAIN", "RANK", "WORLD_SIZE"))}
    with open(log, "wb") as file:
        process = subprocess.Popen([sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, env=clean | env)
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
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers), str(SCRIPT))


def wait_for(condition, log, limit=60):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain; the log so far:\n{log.read_text()}"
        time.sleep(0.02)


def accuracy_in(log):
    found = re.search(r"test accuracy (0\.\d+)", log.read_text())
    assert found, log.read_text()
    return float(found.group(1))


def model_in(path):
    return snapshot_file.read(str(path))["objects"]["model"]


def test_killed_on_one_worker_and_resumed_on_two_it_ends_as_if_undisturbed(tmp_path):
    log, undisturbed_log = tmp_path / "log", tmp_path / "undisturbed.log"
    snapshot, undisturbed = tmp_path / "digits.pt", tmp_path / "undisturbed.pt"
    arguments = ("--epochs", str(EPOCHS), "--snapshot-every", "0", "--snapshot", str(snapshot))

    with (
        started(str(SCRIPT), "--epochs", str(EPOCHS), "--snapshot", str(undisturbed), log=undisturbed_log) as reference,
        started(*torchrun(1), *arguments, "--step-delay", "0.1", log=log) as run,
    ):
        wait_for(lambda: "epoch 1/3" in log.read_text(), log)
        (worker,) = psutil.Process(run.pid).children()
        worker.send_signal(signal.SIGKILL)
        assert run.wait(60) != 0
        assert reference.wait(60) == 0, undisturbed_log.read_text()
    state = snapshot_file.read(str(snapshot))["objects"]["sampler"]
    assert state["epoch"] >= 1

    agent = FakeAgent()
    try:
        messages = []
        with started(*torchrun(2), *arguments, log=log, MALLETRAIN_SOCKET=agent.path, MALLETRAIN_JOB="digits") as run:
            while run.poll() is None:
                messages.extend(agent.received())
                time.sleep(0.005)
            messages.extend(agent.received())
            assert run.returncode == 0, log.read_text()
    finally:
        agent.close()
    assert f"restored epoch {state['epoch']} sample {state['position']}" in log.read_text()
    assert "training on 2 worker(s)" in log.read_text()
    last = {message.sender.rank: message.samples for message in messages if isinstance(message, Progress)}
    assert sum(last.values()) == EPOCHS * TRAIN_SAMPLES - (state["epoch"] * TRAIN_SAMPLES + state["position"])
    assert any(isinstance(message, SnapshotTaken) and message.saved for message in messages)
    (metric,) = [message for message in messages if isinstance(message, Metric)]
    assert metric.value == pytest.approx(accuracy_in(log), abs=1e-4)

    mine, theirs = model_in(snapshot), model_in(undisturbed)
    assert all(torch.allclose(mine[name], theirs[name], atol=1e-4) for name in mine)
    assert accuracy_in(log) == pytest.approx(accuracy_in(undisturbed_log), abs=0.01)

    again = tmp_path / "again.log"
    with started(str(SCRIPT), *arguments, log=again) as run:
        assert run.wait(60) == 0, again.read_text()
    assert accuracy_in(again) == accuracy_in(log)
    assert "epoch 3/3" not in again.read_text()
