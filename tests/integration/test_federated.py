"""Federated rounds of jobscripts/federated with Flower: nodes as a service job, and a server.
Nodes, SuperLink and server are killed, and each round counts once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest
from fedcase.state import TrainingStateError, load

from malletrain.submission.options import ScriptOptions
from malletrain.submission.spec import build
from tests.integration.embedded import site
from tests.jobscripts.federated.flower_environment import PACKAGE, ROOT, environment, flower
from tests.jobscripts.federated.tasks import CLIENTS
from tests.ports import free_ports

NODE = """
import os, sys
sys.path[:0] = [{package!r}, {root!r}]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
from fedcase.node import main
sys.exit(main())
"""
"""serve.py, which finds the packages without an installation."""


class Rounds:
    """A server of federated rounds, as a process."""

    def __init__(self, folder, port, rounds):
        self.folder, self.port, self.rounds = folder, port, rounds
        self.process = None

    def start(self):
        with (self.folder.parent / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "fedcase.server", str(self.folder)),
                    *("--task", "tests.jobscripts.federated.tasks:Counting"),
                    *("--rounds", str(self.rounds), "--clients", "6", "--port", str(self.port)),
                    *("--flower", str(flower()), "--", "--insecure"),
                ],
                env=environment(),
                stdout=log,
                stderr=log,
            )

    def superlinks(self):
        """The SuperLinks that this server has started."""
        return [
            child
            for child in psutil.Process(self.process.pid).children()
            if "flower-superlink" in " ".join(child.cmdline())
        ]

    def count(self):
        """The number of rounds that count."""
        with contextlib.suppress(TrainingStateError):
            state = load(self.folder)
            return state.round if state else 0
        return 0

    def kill(self):
        """Kill the server; what it has started dies with it."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        psutil.wait_procs(children)


@pytest.mark.slow
@pytest.mark.thorough
def test_each_round_counts_once_whatever_is_killed(tmp_path):
    flower()
    port, reservation = free_ports(1)
    with reservation, site(tmp_path, nodes=3) as s:
        server = Rounds(tmp_path / "training", port, rounds=6)
        server.start()
        try:
            _kill_one_after_another(s, server)
            assert server.process.wait() == 0, (tmp_path / "server.log").read_text()
        finally:
            if server.process.poll() is None:
                server.kill()
    state = load(server.folder)
    assert [one.number for one in state.rounds] == list(range(1, 7))
    # Each round adds one to the model, so one that counted twice would show.
    assert state.arrays["rounds"].tolist() == pytest.approx([6.0, 6.0])
    assert all(len(set(one.clients)) == 6 for one in state.rounds)
    assert all(one.measures["accuracy"] == pytest.approx(one.number) for one in state.rounds)
    assert sum(record.rounds for record in state.records.values()) == 6 * 6
    assert len(state.records) == CLIENTS


def _kill_one_after_another(s, server):
    value = s.root / "value.csv"
    value.write_text("nodes,value\n1,10\n3,30\n")
    spec = build(
        str(s.script("node.py", NODE.format(package=str(PACKAGE), root=str(ROOT)))),
        ("--superlink", f"127.0.0.1:{server.port}", "--flower", str(flower()), "--", "--insecure"),
        ScriptOptions(
            name="federated", nodes="1:3", service=True, value=value, workdir=str(s.work)
        ),
    )
    with s.client() as client:
        job = client.submit(spec).id

    def rounds(count):
        s.until(
            lambda: server.count() >= count or server.process.poll() is not None, f"round {count}"
        )
        assert server.process.poll() is None or server.count() == server.rounds

    rounds(1)
    agents = s.agents()
    first, second = sorted(agents)[:2]
    agents[first].kill()  # a node is lost without notice
    rounds(2)
    s.agents()[second].send_signal(signal.SIGTERM)  # another one with notice
    rounds(3)
    for superlink in server.superlinks():
        os.kill(superlink.pid, signal.SIGKILL)
    rounds(4)
    server.kill()
    before = server.count()
    server.start()
    rounds(before + 1)
    rounds(server.rounds)
    with s.client() as client:
        assert client.job(job).job.tries == 0
        client.cancel([job])
    s.until_state(job, "cancelled")
