"""The launcher of a service on one node: its process is started once, told of every change of the
membership, and watched.

    starting ──the process has joined──▶ ready ──first view──▶ running ──▶ …
    it ends ──▶ succeeded (code 0) | failed, and exited

Decides how the process is started, watched and stopped. Who is a member is the daemon's decision
(:mod:`malletrain.rounds.service`); what the process does with the news its own. Works without
torch.

With the process it speaks JSON objects, one a line, on a Unix socket (path in
``MALLETRAIN_SERVICE``). Process: ``{"say": "join", "address"}``, ``{"say": "drained"}``. Launcher:
``{"view": number, "members": [[node, host, address, leaving_in_s or null], …]}`` and, when no
daemon is there to make views, ``{"leave": seconds}``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from malletrain.membership import ENV_SERVICE
from malletrain.protocol.launcher_channel import LauncherEnd, LaunchOrder, read_order
from malletrain.protocol.messages import (
    Assignment,
    Drain,
    Drained,
    Error,
    Failure,
    Phase,
    Release,
    Round,
)

SERVICE_LOG = "service.log"
_TICK_S = 0.5
_LAST_BYTES = 4096
_MOST_UNREAD = 1 << 20


class ServiceLauncher:
    """The process of one service on this node."""

    def __init__(self, order: LaunchOrder) -> None:
        self.order = order
        self._agent = LauncherEnd(order.endpoint)
        self._path = f"{os.path.dirname(order.endpoint.removeprefix('ipc://'))}/s{os.getpid()}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(self._path)
        self._listener.listen(4)
        self._listener.setblocking(False)
        self._agent.also_wake_on(self._listener.fileno())
        self._log = os.path.join(order.log_dir, SERVICE_LOG)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._unread = b""
        self._address: str | None = None
        self._view: Round | None = None
        self._generation = 0
        self._stop = ""

    def run(self) -> int:
        """Until the job leaves the node or its process fails. Returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken)
        self._agent.also_wake_on(wake)
        process = self._process = self._start()
        pidfd = os.pidfd_open(process.pid)
        self._agent.also_wake_on(pidfd)
        code = 0
        try:
            while not self._stop:
                for message in self._agent.receive(_TICK_S):
                    self._from_agent(message)
                if self._agent.agent_gone:
                    self._stop = "The agent on this node is gone."
                self._accept()
                self._listen()
                if self._process is not None and (ended := self._process.poll()) is not None:
                    self._agent.also_wake_on(pidfd, False)
                    self._process = None
                    code = self._ended(ended)
        finally:
            self._stop_process()
            self._agent.close()
        print(f"malletrain launcher: {self._stop}", flush=True)
        return code

    def _signalled(self, number: int, _: object) -> None:
        self._stop = self._stop or f"{signal.Signals(number).name}: the job leaves this node."

    # --- the agent ---

    def _from_agent(self, message: Any) -> None:
        if isinstance(message, Round) and message.job == self.order.job:
            if self._view is None or message.generation > self._view.generation:
                self._view = message
                self._pass_on()
        elif isinstance(message, Drain):
            self._tell({"leave": message.timeout_s})
        elif isinstance(message, Release):
            self._stop = "The job was released from this node."
        elif isinstance(message, Error):
            self._stop = message.sentence

    def _pass_on(self) -> None:
        view = self._view
        if view is None or self._address is None or view.generation <= self._generation:
            return
        self._generation = view.generation
        self._tell(
            {
                "view": view.generation,
                "members": [[p.node, p.host, p.address, p.leaving_in_s] for p in view.members],
            }
        )
        self._say("running")

    def _say(self, phase: str, failures: tuple[Failure, ...] = ()) -> None:
        self._agent.send(
            Phase(
                Assignment(self.order.job, phase, self._generation, failures, self._address or "")
            )
        )

    # --- the process ---

    def _start(self) -> subprocess.Popen[bytes]:
        spec = self.order.spec
        tie = [
            sys.executable,
            "-I",
            "-S",
            str(Path(__file__).with_name("supervisor.py")),
            "--parent",
            str(os.getpid()),
        ]
        command = [
            *tie,
            "--chdir",
            spec.workdir,
            "--log",
            self._log,
            "--",
            sys.executable,
            "-u",
            spec.script,
            *spec.args,
        ]
        return subprocess.Popen(
            command, env={**os.environ, ENV_SERVICE: self._path}, stdin=subprocess.DEVNULL
        )

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        if (
            self._connection is not None
        ):  # one process, one connection: a child that joins again is refused
            connection.close()
            return
        connection.setblocking(False)
        self._connection = connection
        self._agent.also_wake_on(connection.fileno())

    def _listen(self) -> None:
        while self._connection is not None:
            try:
                data = self._connection.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data or len(self._unread) > _MOST_UNREAD:
                self._hang_up()
                return
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._heard(line)

    def _heard(self, line: bytes) -> None:
        try:
            said = json.loads(line)
            what, address = said["say"], str(said.get("address", ""))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            print(
                "malletrain launcher: the process said something that is not understood: "
                f"{line[:80]!r}",
                flush=True,
            )
            return
        if what == "join":
            self._address = address
            self._say("running" if self._generation else "ready")
            self._pass_on()
        elif what == "drained":
            self._agent.send(Drained(self.order.job, self._generation, True))

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._agent.also_wake_on(self._connection.fileno(), False)
            self._connection.close()
            self._connection = None

    def _tell(self, message: dict[str, Any]) -> None:
        if self._connection is not None:
            try:
                self._connection.setblocking(True)
                self._connection.settimeout(5.0)
                self._connection.sendall(json.dumps(message).encode() + b"\n")
                self._connection.setblocking(False)
            except OSError as error:  # gone, which is noticed elsewhere, or deaf
                print(
                    f"malletrain launcher: the process does not take the news: {error}", flush=True
                )
                self._hang_up()

    def _ended(self, code: int) -> int:
        if code == 0:
            self._say("succeeded")
            return 0
        words = _tail(self._log)
        rank = (
            next(
                (
                    i
                    for i, p in enumerate(self._view.members)
                    if p.node == os.environ.get("MALLETRAIN_NODE")
                ),
                0,
            )
            if self._view
            else 0
        )
        self._say("failed", (Failure(rank, code, time.time(), words),))
        how = f"with code {code}" if code > 0 else f"by signal {-code}"
        print(words)
        self._stop = f"The service's process ended {how}."
        return 1

    def _stop_process(self) -> None:
        """SIGTERM, and SIGKILL after the job's grace."""
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(self.order.stop_grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _LAST_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def main() -> int:
    """Read the order and run it."""
    parser = argparse.ArgumentParser(
        prog="malletrain.launch.service", description="Run the process of one service on this node."
    )
    parser.add_argument(
        "--launch",
        required=True,
        metavar="FILE",
        help="the order, a JSON file written by the agent",
    )
    try:
        order = read_order(parser.parse_args().launch)
    except (OSError, ValueError) as error:
        print(f"malletrain launcher: the order cannot be read: {error}", file=sys.stderr)
        return 2
    return ServiceLauncher(order).run()


if __name__ == "__main__":
    sys.exit(main())
