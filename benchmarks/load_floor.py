"""The minimum time to accept thousands of agents: a bare server of libzmq that accepts everybody,
answers each first message with a Welcome, and stores nothing.

    python -m benchmarks.load_floor ENDPOINT KEY_FILE

It is a process of its own, for :mod:`benchmarks.load`, in the place of a daemon that was killed:
the same agents connect to the same address with the same keys, and share the same cores. Any
additional time of a daemon is its own work.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import zmq

from benchmarks.load_site import Site
from malletrain.daemon.server.transport import BACKLOG, IO_THREADS
from malletrain.identity.keys import SERVER, read_key
from malletrain.protocol import messages, wire


def serve(endpoint: str, key_file: Path) -> None:
    """Serve until killed."""
    keys = read_key(key_file)
    context = zmq.Context(io_threads=IO_THREADS)
    door = context.socket(zmq.REP)
    door.bind("inproc://zeromq.zap.01")
    socket = context.socket(zmq.ROUTER)
    socket.curve_secretkey, socket.curve_server = keys.secret.encode(), True
    socket.curve_publickey = keys.public.encode()
    socket.sndhwm = socket.rcvhwm = 10_000
    socket.backlog = BACKLOG
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    socket.bind(endpoint)
    welcome = wire.encode(messages.Welcome("floor", 10.0, 1024))
    poller = zmq.Poller()
    poller.register(door, zmq.POLLIN)
    poller.register(socket, zmq.POLLIN)
    greeted: set[bytes] = set()
    while True:
        poller.poll()
        with contextlib.suppress(zmq.Again):
            while True:
                request = door.recv_multipart(zmq.DONTWAIT)
                door.send_multipart([request[0], request[1], b"200", b"OK", b"somebody", b""])
        with contextlib.suppress(zmq.Again):
            while True:
                peer = socket.recv_multipart(zmq.DONTWAIT)[0]
                if peer not in greeted:
                    greeted.add(peer)
                    socket.send_multipart([peer, *welcome])


def floor(site: Site) -> tuple[float, float]:
    """Run such a server in the place of a killed daemon. Return the seconds until it has greeted
    all agents, and its processor time. Ends the server.
    """
    leased = sum(bool(node.lease) for node in site.cluster.nodes.values())
    address = "tcp://127.0.0.1:" + (site.state / "port").read_text().strip()
    before = time.monotonic()
    key_file = str(site.state / "keys" / SERVER)
    argv = [sys.executable, "-m", "benchmarks.load_floor", address, key_file]
    with subprocess.Popen(argv) as server:
        try:
            site.until(lambda: sum(site.welcome) >= leased, "it has greeted all agents")
            took = time.monotonic() - before
            times = psutil.Process(server.pid).cpu_times()
        finally:
            server.kill()
    site.until(lambda: sum(site.welcome) == 0, "the agents detect that it is gone")
    return took, float(times.user + times.system)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("endpoint", metavar="ENDPOINT", help="where the daemon listened")
    parser.add_argument("key_file", metavar="KEY_FILE", type=Path, help="the daemon's key pair")
    serve(**vars(parser.parse_args()))
