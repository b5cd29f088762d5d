"""Daemons of tests, as forks of a process that has imported all that a daemon imports.

Those imports are most of what a daemon costs in a test. A fork has its own arguments, environment,
working folder and output, and then runs what ``python -m malletrain daemon`` runs. Tests about the
start itself, and about a daemon's memory, start a new interpreter instead.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from malletrain.protocol import env
from tests.waiting import readable

_PRELOADED = (
    *("malletrain.cli", "malletrain.daemon.main", "malletrain.cli.daemon"),
    *("alembic.command", "alembic.config", "sqlalchemy.dialects.sqlite"),
)
_READ_AT_IMPORT = (env.FAULTS, env.TIMEOUT)
"""Variables that modules of a daemon read when they are imported: the server's are those of all
forks.
"""


class ForkedDaemon:
    """A daemon, with those parts of ``subprocess.Popen`` that tests use."""

    returncode: int | None = None

    def __init__(self, server: _Server, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._server = server
        self._descriptor = descriptor  # of the process, so that no later one is meant
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the daemon runs."""
        with self._lock:
            return self._poll()

    def _poll(self) -> int | None:
        if self.returncode is None and readable(self._descriptor, 0.0):
            self.returncode = self._server.exit_code(self.pid)
            os.close(self._descriptor)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code. Raises subprocess.TimeoutExpired.

        Args:
            timeout: maximum wait, seconds; None: no limit.
        """
        ends_at = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if ends_at is not None and time.monotonic() > ends_at:
                raise subprocess.TimeoutExpired("malletrain daemon", timeout or 0.0)
            time.sleep(0.05)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the daemon has ended."""
        with self._lock:
            if self._poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    """The process from which daemons are forked."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self.variables = {name: os.environ.get(name) for name in _READ_AT_IMPORT}
        argv = [sys.executable, "-m", __name__, str(theirs.fileno())]
        folder = Path(__file__).parents[1]
        self._process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], cwd=folder)
        theirs.close()
        atexit.register(self._close)

    def start(self, arguments: list[str], output: int, environment: dict[str, str]) -> ForkedDaemon:
        request = {"argv": arguments, "cwd": os.getcwd(), "environment": environment}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [output])
            answer, (descriptor,), _, _ = socket.recv_fds(self._socket, 1 << 16, 1)
        return ForkedDaemon(self, json.loads(answer)["pid"], descriptor)

    def exit_code(self, pid: int) -> int:
        """Return the exit code of a daemon that has ended."""
        with self._lock:
            self._socket.send(json.dumps({"ended": pid}).encode())
            return int(json.loads(self._socket.recv(1 << 16))["code"])

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


_servers: list[_Server] = []
"""That of this process, once a daemon was started."""


def start_daemon(
    arguments: list[str], output: int, environment: Mapping[str, str] | None = None
) -> ForkedDaemon | subprocess.Popen[bytes]:
    """Start a daemon.

    Args:
        arguments: those of ``malletrain``, from ``daemon`` on.
        output: descriptor of the file for its standard output and error.
        environment: its environment; None: that of this process. Where the imports of a daemon
            depend on a variable, it is a new interpreter.
    """
    variables = dict(os.environ if environment is None else environment)
    if not _servers:
        _servers.append(_Server())
    if any(variables.get(name) != value for name, value in _servers[0].variables.items()):
        argv = [sys.executable, "-m", "malletrain", *arguments]
        return subprocess.Popen(argv, stdout=output, stderr=output, env=variables)
    return _servers[0].start(arguments, output, variables)


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork a daemon for each request. Return the request in the fork, and None at the end of the
    connection.
    """
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 1)
        if not message:
            return None
        request = json.loads(message)
        if "ended" in request:
            _, status = os.waitpid(request["ended"], 0)
            code = os.waitstatus_to_exitcode(status)
            connection.send(json.dumps({"code": code}).encode())
            continue
        (output,) = descriptors
        pid = os.fork()
        if not pid:
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            return dict(request)
        os.close(output)
        descriptor = os.pidfd_open(pid)
        socket.send_fds(connection, [json.dumps({"pid": pid}).encode()], [descriptor])
        os.close(descriptor)


def _main() -> None:
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        request = _serve(connection)
    if request is None:
        return
    gc.unfreeze()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv = ["malletrain", *request["argv"]]
    from malletrain.__main__ import main

    main()


if __name__ == "__main__":
    _main()
