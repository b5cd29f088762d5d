"""A job whose processes crash after their script has ended is completed, in every kind of worker.
Plain torchrun reports such a run as failed.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.selection import every_change

PREPARED = """
import atexit, ctypes, os
libc, cpp = ctypes.CDLL(None), ctypes.CDLL("libstdc++.so.6")
# A joinable std::thread that static destructors meet calls std::terminate, as this does.
libc.__cxa_atexit(ctypes.cast(cpp._ZSt9terminatev, ctypes.c_void_p), None, None)
"""
IN_HANDLER = "atexit.register(libc.abort)\n"
RESTART = """
import malletrain
malletrain.report(1)
with open("notes", "a") as file:
    file.write(f"rank {os.environ['RANK']}\\n")
"""
LIVE = """
import torch
from malletrain import elastic
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = elastic.Run(model=model, optimizer=optimizer)
net = run.ddp(model)
for _ in run.steps(3):
    with run.step(samples=1):
        optimizer.zero_grad()
        net(torch.ones(1, 4)).mean().backward()
        optimizer.step()
with open("notes", "a") as file:
    file.write(f"rank {run.rank}\\n")
"""
JOBS = {
    "restart": (PREPARED + RESTART, {}),
    "restart-handler": (PREPARED + IN_HANDLER + RESTART, {}),
    "cold": (PREPARED + RESTART, {"env": {"MALLETRAIN_PRELOAD": "0"}}),
    "cold-handler": (
        PREPARED + IN_HANDLER + RESTART,
        {"env": {"MALLETRAIN_PRELOAD": "0"}},
    ),
    "torchrun-handler": (PREPARED + IN_HANDLER + RESTART, {"launcher": "torchrun"}),
    "live": (PREPARED + LIVE, {"mode": "live"}),
    "live-handler": (PREPARED + IN_HANDLER + LIVE, {"mode": "live"}),
}


@pytest.mark.parametrize("kind", every_change(JOBS, "restart-handler"))
def test_a_job_that_crashes_after_its_end_is_completed(shared, kind):
    text, options = JOBS[kind]
    script = shared.script("train.py", text)
    job = shared.submit(script, nodes=(2, 2), profile=False, **options)
    ended = shared.until_state(job, "completed", "failed")
    assert ended.state == "completed", shared.show(job).failure
    assert sorted((shared.work / "notes").read_text().split("\n")[:-1]) == ["rank 0", "rank 1"]


@pytest.mark.thorough
def test_plain_torchrun_reports_such_a_run_as_failed(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(PREPARED + "print('done', flush=True)\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.count("done") == 2
    assert "terminate called without an active exception" in ran.stderr
    assert ran.returncode != 0
