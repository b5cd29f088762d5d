"""Processes of tests as forks of a server that has imported what they import.

Importing is most of what a short process costs. A fork has its own arguments, environment, working
folder and streams; everything else is as in a new interpreter, because the server does nothing but
import and fork. :mod:`tests.forked_daemon` has daemons, and
:mod:`tests.malletrain.forked_programs` has programs with torch.
"""

from __future__ import annotations

import atexit
import contextlib
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
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.waiting import readable


class Forked:
    """A process, with those parts of ``subprocess.Popen`` that tests use."""

    returncode: int | None = None

    def __init__(self, server: Server, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._server = server
        self._descriptor = descriptor  # of the process: readable once it has ended
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
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
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.05)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with self._lock:
            if self._poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process from which others are forked.

    Args:
        module: what ``python -m`` runs; it calls :func:`serve`.
    """

    closed = False

    def __init__(self, module: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        argv = [sys.executable, "-m", module, str(theirs.fileno())]
        folder = Path(__file__).parents[1]
        self._process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], cwd=folder)
        theirs.close()
        atexit.register(self.close)

    def start(
        self,
        arguments: list[str],
        streams: tuple[int, int, int],
        environment: dict[str, str],
        folder: str | None = None,
    ) -> Forked:
        """Fork a process.

        Args:
            arguments: its arguments.
            streams: descriptors of its standard input, output and error.
            environment: its environment.
            folder: its working folder; None: that of this process.
        """
        folder = os.getcwd() if folder is None else folder
        request = {"argv": arguments, "cwd": folder, "environment": environment}
        answer, descriptors = self._ask(request, streams)
        return Forked(self, answer["pid"], descriptors[0])

    def exit_code(self, pid: int) -> int:
        """Return the exit code of a fork that has ended."""
        return int(self._ask({"ended": pid}, ())[0]["code"])

    def _ask(self, request: dict[str, Any], descriptors: Iterable[int]) -> tuple[Any, list[int]]:
        """Return the answer to a request, and the descriptors that come with it. After an exception
        the server is closed: the next answer would be that to this request.
        """
        try:
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(request).encode()], list(descriptors))
                answer, received, _, _ = socket.recv_fds(self._socket, 1 << 16, 1)
            assert answer, f"The server {self._process.args!r} has ended."
        except BaseException:
            self.close()
            raise
        return json.loads(answer), received

    def close(self) -> None:
        """End the server; its forks go on."""
        if not self.closed:
            self.closed = True
            # A child of this process may have the socket, too.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._process.wait()


def serve(modules: Iterable[str], run: Callable[[list[str]], None]) -> None:
    """Be the server: import modules, then fork a process for each request. Returns at the end of
    the connection, and in each fork once ``run(arguments)`` has returned.
    """
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the forks
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        request = _fork_each(connection)
    if request is None:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    sys.modules["__main__"] = types.ModuleType("__main__")  # a process that it spawns imports it
    run(request["argv"])


def _fork_each(connection: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request. Return the request in the fork, and None at the end of the
    connection.
    """
    while True:
        message, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            return None
        request: dict[str, Any] = json.loads(message)
        if "ended" in request:
            _, status = os.waitpid(request["ended"], 0)
            code = os.waitstatus_to_exitcode(status)
            connection.send(json.dumps({"code": code}).encode())
            continue
        pid = os.fork()
        if not pid:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return request
        for stream in streams:
            os.close(stream)
        descriptor = os.pidfd_open(pid)
        socket.send_fds(connection, [json.dumps({"pid": pid}).encode()], [descriptor])
        os.close(descriptor)
