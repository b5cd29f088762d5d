"""Of a job only gloo's data sockets listen to everybody: the training does not notice what
strangers send there.
"""

from __future__ import annotations

import os
import random
import socket
from collections import defaultdict

from tests.malletrain.elastic import scripts
from tests.malletrain.elastic.conductor import conducted
from tests.malletrain.elastic.test_run import change_at, records, seen, steps

LISTEN = "0A"
CALLS = 8


def listening(pid: int) -> set[int]:
    """The TCP ports on which a process listens."""
    own = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            own.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    ports = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as lines:
            for fields in map(str.split, lines):
                if fields[3] == LISTEN and f"socket:[{fields[9]}]" in own:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def annoy(port: int, noise: random.Random) -> list[socket.socket]:
    """Calls to a port, each with bytes that mean nothing; all but every other are left open."""
    calls = []
    for number in range(CALLS):
        call = socket.socket()
        try:
            call.connect(("127.0.0.1", port))
            call.settimeout(0.1)
            call.sendall(noise.randbytes(1 << (number * 2)))
        except OSError:
            pass  # it may hang up
        if number % 2:
            call.close()
        else:
            calls.append(call)
    return calls


def test_random_bytes_at_gloos_sockets_change_nothing(tmp_path, any_seed):
    noise = random.Random(any_seed(7))
    options = {"samples": 200000, "sleep": 0.01, "digest": True}
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    with conducted(tmp_path, scripts.train, str(tmp_path), options, environment=environment) as c:
        members = c.start(3)
        c.round(members[:2])
        change_at(c, tmp_path, 5)
        ports = {port for worker in members[:2] for port in listening(worker.process.pid)}
        assert ports, "gloo listens"
        calls = [call for port in ports for call in annoy(port, noise)]
        change_at(c, tmp_path, steps(tmp_path) + 20)
        assert {r["generation"] for r in records(tmp_path)} == {1}, "nobody left the round"
        c.round(members)  # and the group is left and formed anew as usual
        change_at(c, tmp_path, steps(tmp_path) + 10)
        (tmp_path / "stop").touch()
        c.finish()
        for call in calls:
            call.close()
    by_step = defaultdict(set)
    for record in records(tmp_path):
        by_step[record["step"]].add(record["digest"])
    assert all(len(digests) == 1 for digests in by_step.values())
    assert set(seen(tmp_path).values()) == {1}
