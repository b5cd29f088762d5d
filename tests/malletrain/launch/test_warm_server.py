"""A warm Python with torch: a job's fork server is a fork of it and imports nothing again."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from malletrain.launch import warm_server
from malletrain.launch.supervisor import process_table
from malletrain.protocol import env
from tests.waiting import PATIENCE_S, until

# torch._dynamo, which a site's server imports too, takes as long as all the rest.
WARM = """
import sys
from malletrain.launch import fork_server, warm_server
fork_server.PRELOADED = ("torch",)
warm_server.main("a note of the environment")
"""
# A module that a job has imported beforehand: the first that its fork server does.
ASKED_FOR = """
import json, os, sys
report = {"pid": os.getpid(), "parent": os.getppid(), "cwd": os.getcwd(), "modules": [*sys.modules]}
with open(os.environ["SAID"] + "-", "w") as file:
    json.dump(report, file)
os.replace(os.environ["SAID"] + "-", os.environ["SAID"])
"""


@pytest.fixture
def server(tmp_path):
    """(its pid, its socket)."""
    (tmp_path / "asked_for.py").write_text(ASKED_FOR)
    path, log = tmp_path / "w1", tmp_path / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", WARM, "--launch", str(path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
            stdout=file,
            stderr=file,
        )
    ready = Path(f"{path}{warm_server.READY}")
    try:
        until(
            lambda: ready.exists() or process.poll() is not None, "it is warm", 0.05, log.read_text
        )
        assert int(ready.read_text()) == process.pid
        yield process.pid, path
    finally:
        process.kill()
        process.wait()


def test_a_jobs_fork_server_is_a_fork_of_it_and_has_everything_already(server, tmp_path):
    pid, path = server
    for job in ("j1", "j2"):
        report_path, log = tmp_path / f"said-{job}", tmp_path / f"{job}.log"
        variables = {
            "PATH": os.environ["PATH"],
            "SAID": str(report_path),
            env.PRELOAD: "asked_for",
            env.AGENT: f"ipc://{tmp_path}/agent",
        }
        argv = ["--launch", str(tmp_path / "no-order")]
        request = {"argv": argv, "env": variables, "cwd": str(tmp_path)}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent, open(log, "w") as file:
            agent.settimeout(PATIENCE_S)
            agent.connect(str(path))
            socket.send_fds(agent, [json.dumps(request).encode()], [file.fileno()])
            ended = json.loads(agent.recv(4096))
        assert ended["exit"] > 0, "there is no order for the launcher"
        report = json.loads(report_path.read_text())
        assert {"torch", "malletrain.launch.restart"} <= set(report["modules"])
        assert report["cwd"] == str(tmp_path)
        assert report["parent"] == pid != report["pid"]
        assert "no-order" in log.read_text()
        assert log.read_text().startswith("malletrain launcher: a note of the environment.")
    assert pid in process_table(), "it is there for the next job"
