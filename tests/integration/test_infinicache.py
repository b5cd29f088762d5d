"""The cache of jobscripts/infinicache as a service job: submitted, filled, and read after nodes
were lost with and without notice.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from infinicache import Cache

from tests.integration.embedded import site
from tests.waiting import NEVER_S, PATIENCE_S

HOME = Path(__file__).resolve().parents[2] / "jobscripts" / "infinicache"


PATIENT = """
import sys
sys.path.insert(0, {home!r})
from infinicache import mover, proxy
from malletrain.streams import connection, server
connection.CONNECT_S = server.HANDSHAKE_S = mover.ANSWER_TIMEOUT_S = {never}
proxy.REGISTRATION_WAIT_S = {never}
from infinicache.service import main
sys.exit(main())
"""
"""serve.py, for whose processes a peer that stands still for a while is none that is lost."""


@pytest.mark.thorough
def test_objects_outlive_the_nodes_that_held_them(tmp_path, monkeypatch):
    monkeypatch.setattr("malletrain.streams.connection.CONNECT_S", NEVER_S)
    with site(tmp_path, nodes=5) as s:
        serve = s.script("serve.py", PATIENT.format(home=str(HOME), never=NEVER_S))
        value = tmp_path / "value.toml"
        value.write_text("[value]\n3 = 10\n5 = 20.0\n")
        environment = {
            **os.environ,
            "MALLETRAIN_STATE_DIR": str(s.state),
            "PYTHONPATH": str(HOME),
            "COLUMNS": "200",
        }

        def command(*words):
            run = subprocess.run(
                [sys.executable, "-m", *words],
                env=environment,
                cwd=s.work,
                capture_output=True,
                text=True,
            )
            assert run.returncode == 0, run.stderr
            return run.stdout

        command(
            "malletrain",
            "submit",
            "--service",
            "--value",
            str(value),
            str(serve),
            "--memory",
            "200M",
        )
        job = "serve"

        def addresses():
            with s.client() as client:
                view = client.members(job)
            return {m.node: m.address for m in view.members}, bytes.fromhex(view.key)

        s.until(lambda: len(addresses()[0]) == 5, "five members")
        members, key = addresses()
        assert bytes.fromhex(command("malletrain", "members", job, "--key").strip()) == key
        assert all(address in command("malletrain", "members", job) for address in members.values())
        assert "serve" in command("malletrain", "status")
        assert "3:5" in command("malletrain", "show", job)
        random.seed(1)
        objects = {
            f"object {i}": random.randbytes(size)
            for i, size in enumerate((0, 1000, 100_000, 3_000_000, 5_000_001))
        }
        many = {"code": (3, 2), "timeout_s": PATIENCE_S}
        with Cache(list(members.values()), key, **many) as cache:
            for name, data in objects.items():
                assert cache.put(name, data).protection == 2
            proxy, leaver = list(members)[:2]
            s.agents()[leaver].send_signal(signal.SIGTERM)  # with notice: it drains
            s.until(lambda: members[leaver] not in addresses()[0].values(), "it has left")
            assert {k: cache.get(k) for k in objects} == objects
            s.agents()[proxy].kill()  # without: the proxy too, whose memory another one makes anew
            s.until(lambda: members[proxy] not in addresses()[0].values(), "it is lost")
            assert {k: cache.get(k) for k in objects} == objects
            s.until(lambda: len(addresses()[0]) == 5, "they come back as new members")
            s.until(
                lambda: all(
                    p["degraded"] == 0 and p["objects"] == len(objects) for p in cache.summary()
                ),
                "repaired",
            )
            for address in random.sample(
                sorted(addresses()[0].values()), 2
            ):  # any two may be lost now
                pid = next(
                    p.pid for p in s.workers(serve) if _listens(p, int(address.rpartition(":")[2]))
                )
                os.kill(pid, signal.SIGKILL)
            assert {k: cache.get(k) for k in objects} == objects
        (s.work / "a file").write_bytes(objects["object 4"])
        assert "2 nodes may be lost" in command(
            "infinicache.cli", "--job", job, "put", "from the shell", "a file"
        )
        command("infinicache.cli", "--job", job, "get", "from the shell", "a copy")
        assert (s.work / "a copy").read_bytes() == objects["object 4"]
        with (
            Cache(list(addresses()[0].values()), b"guessed", timeout_s=1.0) as stranger,
            pytest.raises(RuntimeError),
        ):
            stranger.get("object 1")


def _listens(process, port):
    try:
        return any(c.status == "LISTEN" and c.laddr.port == port for c in process.net_connections())
    except psutil.NoSuchProcess:  # a process of the one that was killed before
        return False
