"""Helpers of the tests of the node side: a small daemon, real agents, and a launcher that needs no
torch.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from malletrain.identity.keys import new_pair
from malletrain.launch.supervisor import process_table
from malletrain.protocol import env, messages, wire
from tests import waiting

eventually = waiting.until
RARELY_S = 60.0
"""Seconds between heartbeats; three of them missing are silence."""
OFTEN_S = 0.2
"""The same, for tests that are about them."""


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    return process_table().get(pid, (0, "Z"))[1] not in "ZX"


def processes_with(mark: str) -> list[int]:
    """Living processes that have ``mark`` in their environment."""
    pids = []
    for pid, (_, state) in process_table().items():
        if state not in "ZX" and pid != os.getpid():
            try:
                if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    pids.append(pid)
            except OSError:
                continue
    return pids


class FakeDaemon:
    """The daemon's end of the wire: answers Hello, Heartbeat and LogChunk by itself and remembers
    all else, by node.
    """

    def __init__(
        self,
        port: int = 0,
        boot: str = "boot-1",
        keys: tuple[bytes, bytes] | None = None,
        heartbeat_s: float = RARELY_S,
    ) -> None:
        self.public, self.secret = keys or zmq.curve_keypair()
        self.boot = boot
        self.heartbeat_s = heartbeat_s
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        waiting.until(lambda: self._binds(port), "the port of a daemon just closed is free")
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self.endpoint.rpartition(":")[2])
        self.nodes: dict[str, bytes] = {}
        self.names: dict[bytes, str] = {}
        self.seen: list[tuple[str, Any]] = []
        self.logs: dict[tuple[str, int, str], bytes] = {}
        self.acknowledges = True
        self.asks = True
        self.beats = 0
        self.warm_bytes: dict[str, int] = {}

    def _binds(self, port: int) -> bool:
        try:
            self.socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        except zmq.ZMQError:
            return False
        return True

    def pump(self, wait_s: float = 0.02) -> None:
        """Take in what has arrived."""
        if not self.socket.poll(int(wait_s * 1000)):
            return
        while self.socket.poll(0):
            identity, *frames = self.socket.recv_multipart()
            self._take(identity, wire.decode(frames))

    def _take(self, identity: bytes, message: Any) -> None:
        if isinstance(message, messages.Hello):
            self.nodes[message.node], self.names[identity] = identity, message.node
            self._reply(identity, messages.Welcome(self.boot, self.heartbeat_s))
        elif identity not in self.names:
            if self.asks:
                self._reply(identity, messages.WhoAreYou(self.boot))
            return
        elif isinstance(message, messages.Heartbeat):
            self.beats += 1
            self.warm_bytes[self.names[identity]] = message.warm_bytes
            self._reply(identity, messages.Alive(self.boot))
            return
        elif isinstance(message, messages.LogChunk):
            if self.acknowledges:
                key = (message.job, message.generation, message.stream)
                have = self.logs.get(key, b"")
                self.logs[key] = have[: message.offset] + message.data
                end = message.offset + len(message.data)
                self._reply(
                    identity,
                    messages.LogAck(
                        message.job, message.generation, message.stream, message.node, end
                    ),
                )
            return
        self.seen.append((self.names[identity], message))

    def _reply(self, identity: bytes, message: messages.Message) -> None:
        self.socket.send_multipart([identity, *wire.encode(message)])

    def send(self, node: str, message: messages.Message) -> None:
        self._reply(self.nodes[node], message)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Pump until ``condition`` holds; its value."""

        def pumped() -> Any:
            self.pump()
            return condition()

        return waiting.until(pumped, what, 0.0, lambda: f"Seen: {self.seen[-8:]}")

    def expect(self, node: str, kind: type, *, since: int = 0, **fields: Any) -> Any:
        """The first message of ``kind`` from ``node`` (from index ``since`` on) with these fields;
        ``phase`` looks into the assignment.
        """

        def find() -> Any:
            for who, message in self.seen[since:]:
                if (
                    who == node
                    and isinstance(message, kind)
                    and all(_field(message, k) == v for k, v in fields.items())
                ):
                    return message
            return None

        return self.until(find, f"{kind.__name__} {fields} from {node}")

    def close(self) -> None:
        self.socket.close(0)


def _field(message: Any, name: str) -> Any:
    if isinstance(message, messages.Phase) and name in ("phase", "generation", "job"):
        return getattr(message.assignment, name)
    return getattr(message, name)


class AgentProcess:
    """A real agent; everything it starts carries ``mark`` in its environment."""

    def __init__(
        self,
        daemon: FakeDaemon,
        node: str,
        directory: Path,
        program: Sequence[str] = ("-m", "malletrain.agent"),
        **options: str,
    ) -> None:
        self.node = node
        self.run_dir = directory / "run"
        # The whole path says which test it is: its last part is cut to 30 characters, and another
        # worker may run one that begins alike.
        which = hashlib.sha256(bytes(directory)).hexdigest()[:16]
        self.mark = f"MALLETRAIN_LEASE=lease-{node}-{which}"
        self.log = directory / f"{node}.log"
        arguments = {
            "endpoint": daemon.endpoint,
            "lease": self.mark.partition("=")[2],
            "node": node,
            "server-key": daemon.public.decode(),
            "run-dir": str(self.run_dir),
            "host": "127.0.0.1",
            **options,
        }
        command = [sys.executable, *program]
        for name, value in arguments.items():
            command += [f"--{name}", value]
        with open(self.log, "ab") as log:
            environment = {**os.environ, env.LEASE_KEY: new_pair().secret}
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=environment
            )

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def job_pids(self) -> list[int]:
        """Processes of this agent's jobs that still live."""
        return [pid for pid in processes_with(self.mark) if pid != self.process.pid]

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


FAKE_LAUNCHER = """
import os, sys, time
sys.path[:0] = {path!r}
order_file = sys.argv[sys.argv.index("--launch") + 1]
from malletrain.protocol.launcher_channel import LauncherEnd, read_order
from malletrain.protocol import messages, wire
from tests import waiting
order = read_order(order_file)
end = LauncherEnd(order.endpoint)
generation = 0
def say(phase, *failures):
    end.send(messages.Phase(messages.Assignment(order.job, phase, generation, tuple(failures))))
def next_message(kind):
    while True:
        for message in end.receive(0.5):
            if isinstance(message, kind):
                return message
            if isinstance(message, messages.Release):
                sys.exit(0)
            if isinstance(message, messages.Error):
                sys.exit(message.sentence)
        if end.agent_gone:
            sys.exit(3)
def join(before=lambda: None):
    global generation
    message = next_message(messages.Round)
    generation = message.generation
    os.environ["MALLETRAIN_GENERATION"] = str(generation)
    before()
    say("running")
    return message
def log_path(rank):
    return os.path.join(order.log_dir, f"g{{generation}}-rank{{rank}}.log")
"""


def fake_python(directory: Path, body: str) -> str:
    """Return a program to be given as a job's ``python``: it acts as the launcher with ``body``,
    which may use the definitions of FAKE_LAUNCHER.
    """
    path = directory / "fake_python"
    path.write_text(
        f"#!{sys.executable}\n" + FAKE_LAUNCHER.format(path=sys.path) + textwrap.dedent(body)
    )
    path.chmod(0o755)
    return str(path)


def spec(workdir: Path, **fields: Any) -> messages.JobSpec:
    """A job for tests."""
    values: dict[str, Any] = {
        "name": "digits",
        "owner": "me",
        "script": "train.py",
        "python": sys.executable,
        "max_nodes": 4,
        **fields,
    }
    return messages.JobSpec(workdir=str(workdir), **values)
