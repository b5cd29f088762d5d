"""The fork server of a leased node: a Python that is warm before a job is assigned to the node.

It imports the modules that the launcher and every training script need, and waits. A job's own fork
server (:mod:`malletrain.launch.fork_server`) is then a fork of it, which takes milliseconds, with
the job's environment, directory and log. It runs nothing itself, and has no state of any job.

    agent → supervisor → this ─ fork server of the job ─┬ launcher
                                                        └ workers

The agent connects to a socket in its private directory, once per job. It sends arguments,
environment, directory and log, and may later request the job's end. When it disconnects, the job is
killed. The agent decides which Python is warm, and for how long.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from malletrain.launch import fork_server
from malletrain.launch.entry import set_umask
from malletrain.launch.supervisor import GUARDING, STOPPING, die_with_parent, set_name
from malletrain.protocol.fault_points import FaultPoint, reached

READY = ".ready"
"""Suffix of the socket's path that gives the path of a file. The file exists when the server is
warm, and contains its pid.
"""
_MAX_PACKET_BYTES = 1 << 20


class _Job:
    """A fork that is the fork server of a job."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._pid = pid

    def serve(self, woken: int) -> None:
        """Wait until the fork has ended, and report its exit code. ``woken``: becomes readable when
        a child ends.
        """
        stopping = False
        sources: list[socket.socket | int] = [self._connection, woken]
        while True:
            ready = select.select(sources, [], [])[0]
            if woken in ready:
                fork_server.drain(woken)
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                if pid:
                    self._report_exit(os.waitstatus_to_exitcode(status))
                    return
            if self._connection in ready:
                if not _packet(self._connection):
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
                    return
                if not stopping:
                    stopping = True
                    set_name(STOPPING)  # tells the fork that the signal is meant for it
                    os.kill(self._pid, signal.SIGTERM)

    def _report_exit(self, code: int) -> None:
        try:
            self._connection.send(json.dumps({"exit": code}).encode())
        except OSError:
            pass  # the agent has ended, and this process is about to end with it


def _packet(connection: socket.socket) -> bytes:
    try:
        return connection.recv(_MAX_PACKET_BYTES)
    except OSError:
        return b""


def _become(request: dict[str, Any], log: int, server: int, note: str) -> NoReturn:
    """Become the fork server of a job, as if the job's Python had been started for it.

    Args:
        request: arguments, environment and directory of the job.
        log: file descriptor of its log.
        server: pid of the server.
        note: sentence to print first; empty for none.
    """
    code = 126
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(server)
        os.setsid()
        set_name(Path(sys.executable).name)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(request["env"])
        set_umask()
        os.chdir(request["cwd"])
        sys.argv = [sys.argv[0], *request["argv"]]
        if note:
            print(f"malletrain launcher: {note}.", file=sys.stderr, flush=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        code = fork_server.main()
    except OSError as error:
        print(f"The process cannot be started: {error!s}.", file=sys.stderr, flush=True)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(listener: socket.socket, note: str) -> NoReturn:
    server = os.getpid()
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        connection, _ = listener.accept()
        with connection:
            data, fds, _, _ = socket.recv_fds(connection, _MAX_PACKET_BYTES, 1)
            if not data or not fds:
                continue  # the job has left the node meanwhile
            set_name(GUARDING)
            # A signal for the fork must wait until the fork has its own handlers.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            pid = os.fork()
            if pid == 0:
                for inherited in (listener, connection):
                    inherited.close()
                for fd in (wake, woken):
                    os.close(fd)
                _become(json.loads(data), fds[0], server, note)
            reached(FaultPoint.FORK_SERVER_FORKED)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            os.close(fds[0])
            _Job(connection, pid).serve(wake)


def main(note: str = "") -> int:
    """Warm up and serve without end (arguments: ``--launch SOCKET``).

    Args:
        note: sentence that every job's launcher prints first; empty for none.
    """
    path = sys.argv[sys.argv.index("--launch") + 1]
    # scancel sends SIGTERM to every process of a lease. This process is ended by SIGKILL.
    signal.signal(signal.SIGTERM, lambda *_: None)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind(path)
    listener.listen(4)
    importlib.import_module("malletrain.launch.restart")
    fork_server.preload()
    reached(FaultPoint.FORK_SERVER_WARM)
    with open(path + READY + "-", "w") as file:
        file.write(str(os.getpid()))
    os.replace(path + READY + "-", path + READY)
    _serve(listener, note)
