"""A fork client stops its worker. The test is the fork server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from malletrain.launch import fork_client
from malletrain.protocol import env
from tests.waiting import until

WORKER = """
import time
from malletrain.training.first_sigterm import ignore_first_sigterm
ignore_first_sigterm()
open("there", "x").close()
while True:
    time.sleep(600)
"""
LOOKED = 60
"""Looks, after which a client that is out of patience would have given up."""


class Served:
    """A client, its worker, and the connection between them."""

    def __init__(self, directory):
        script = directory / "train.py"
        script.write_text(WORKER)
        where = str(directory / "fork-server")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(where)
            listener.listen()
            options = ["--parent", os.getpid(), "--fork-server", where, "--chdir", directory]
            command = [sys.executable, "-I", "-S", fork_client.__file__, *options]
            command += [
                "--per-rank-log",
                directory,
                "--",
                sys.executable,
                "-u",
                "script.py",
                script,
            ]
            self.client = subprocess.Popen([str(word) for word in command])
            self.connection, _ = listener.accept()
        _, fds, _, _ = socket.recv_fds(self.connection, 1 << 20, 1)
        os.close(fds[0])
        self.worker = subprocess.Popen(
            [sys.executable, script], cwd=directory, env={**os.environ, env.FORK_SERVER: where}
        )
        self.tell("pid", self.worker.pid)
        until((directory / "there").exists, "the worker is there")

    def tell(self, what, value):
        self.connection.send(json.dumps({what: value}).encode())

    def status(self, process, field):
        text = Path(f"/proc/{process.pid}/status").read_text()
        return next(
            line.split(":")[1].strip() for line in text.splitlines() if line.startswith(field)
        )

    def looks(self):
        """How often the client has waited for something."""
        return int(self.status(self.client, "voluntary_ctxt_switches"))

    def worker_ends(self):
        """How the worker ends, and the client with it."""
        until(lambda: self.worker.poll() is not None, "the worker has ended")
        self.tell("exit", self.worker.returncode)
        until(lambda: self.client.poll() is not None, "the client has ended")
        return self.worker.returncode, self.client.returncode

    def close(self):
        for process in (self.worker, self.client):
            process.kill()
            process.wait()
        self.connection.close()


@pytest.fixture
def serve(tmp_path):
    made = []

    def start():
        made.append(Served(tmp_path))
        return made[-1]

    yield start
    for served in made:
        served.close()


def test_a_worker_that_lets_one_sigterm_pass_is_stopped_all_the_same(serve):
    served = serve()
    served.client.send_signal(signal.SIGINT)
    assert served.worker_ends() == (-signal.SIGTERM, -signal.SIGTERM)


def test_a_worker_that_takes_its_signals_late_is_stopped_too(serve):
    """As one whose threads all wait for a disk."""
    served = serve()
    served.worker.send_signal(signal.SIGSTOP)
    until(lambda: served.status(served.worker, "State").startswith("T"), "the worker stands still")
    began = served.looks()
    served.client.send_signal(signal.SIGINT)
    until(lambda: served.looks() > began + LOOKED, "the client goes on looking")
    served.worker.send_signal(signal.SIGCONT)
    assert served.worker_ends() == (-signal.SIGTERM, -signal.SIGTERM)
