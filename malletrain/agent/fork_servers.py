"""The warm fork servers on this node, and the launchers that are forked from them.

Decides when a Python is warmed up (the daemon requests it, no job is on the node, and the node is
not about to leave), when its fork server ends (no job has used it for ``idle_s``, or it is no
longer requested), and which processes belong to no job, so that the cleanup after a job spares
them. The daemon decides which Pythons are requested; :mod:`malletrain.launch.warm_server` is the
fork server.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from malletrain.agent.launch import (
    LauncherEntry,
    base_environment,
    supervised_command,
    warm_arguments,
)
from malletrain.agent.process import JobProcess, reap_orphans
from malletrain.agent.software import describe_environment, enter_command, python_command
from malletrain.launch import entry
from malletrain.launch.supervisor import descendants, kill_descendants
from malletrain.protocol.interpreters import Interpreter, Warm, WarmUp, interpreter_of
from malletrain.protocol.messages import JobSpec

log = logging.getLogger("malletrain.agent")

_READY = ".ready"  # as in malletrain.launch.warm_server, which imports torch
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Launched(Protocol):
    """A launcher and its descendants."""

    def exit_code(self) -> int | None:
        """Return the exit code of the launcher; None while it runs."""

    def terminate(self) -> None:
        """Make the launcher stop its workers and end."""

    def forget(self) -> None:
        """Release the launcher after all its processes were killed."""


class WarmPython:
    """One fork server: a Python that is warm, or is being warmed up.

    Args:
        interpreter: the Python and its environment.
        path: path of its socket.
        log_file: file for its output.
        environment: its environment variables.
        memory: the agent's directory for snapshots, which its supervisor removes with the agent.

    Raises:
        OSError: it cannot be started.
        ValueError: an argument contains a NUL byte.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        path: Path,
        log_file: Path,
        environment: Mapping[str, str],
        memory: Path | None = None,
    ) -> None:
        self.path = path
        self.key = interpreter.key
        self.pid = 0
        """Pid of the server; 0 until it is warm."""
        self.users = 0
        """Number of launchers that were forked from it, or are about to be."""
        self.idle_since = time.monotonic()
        """Time since which no job has used it."""
        spec = JobSpec(
            "", "", "", "/", interpreter.python, env=interpreter.env, software=interpreter.software
        )
        arguments = warm_arguments(LauncherEntry(entry.__file__, describe_environment(spec)), path)
        command = enter_command(spec.software, python_command(spec, arguments))
        argv = supervised_command(command, os.getpid(), "/", log_file, memory)
        self._supervisor = JobProcess(argv, environment)

    @property
    def supervisor_pid(self) -> int:
        """Pid of its supervisor."""
        return self._supervisor.pid

    @property
    def over(self) -> bool:
        """Whether it has ended, or could not be started."""
        return self._supervisor.exit_code() is not None

    def poll(self) -> bool:
        """Return whether it has become warm since the last call."""
        if self.pid or self.over:
            return False
        try:
            self.pid = int(Path(f"{self.path}{_READY}").read_text())
        except (OSError, ValueError):
            return False
        self.idle_since = time.monotonic()
        return True

    def memory_bytes(self) -> int:
        """Return its resident memory, bytes (proc_pid_statm(5)). This includes pages that it
        shares with its forks.
        """
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            return 0

    def end(self) -> None:
        """Kill it and its descendants."""
        self._supervisor.kill()
        self.path.unlink(missing_ok=True)
        Path(f"{self.path}{_READY}").unlink(missing_ok=True)


class ForkedLauncher:
    """A launcher that is forked from a fork server as soon as that is warm.

    Args:
        server: the fork server.
        request: arguments, environment and directory.
        log_file: file for its output.
        start_cold: starts the launcher in a new Python instead, if the server fails.
        sweep: kills the processes that the launcher has left behind.
    """

    def __init__(
        self,
        server: WarmPython,
        request: Mapping[str, object],
        log_file: Path,
        start_cold: Callable[[], Launched],
        sweep: Callable[[], object],
    ) -> None:
        self._server = server
        self._request = request
        self._log_file = log_file
        self._start_cold = start_cold
        self._sweep = sweep
        self._connection: socket.socket | None = None
        self._cold_launcher: Launched | None = None
        """The launcher in a new Python; None if this one is a fork."""
        self._code: int | None = None
        self._stopped = False
        server.users += 1
        self.exit_code()

    def exit_code(self) -> int | None:
        """Return the exit code; None while it runs or waits for its Python to be warm."""
        if self._code is None and self._cold_launcher is not None:
            self._code = self._cold_launcher.exit_code()
        elif self._code is None and self._connection is not None:
            self._receive(self._connection)
        elif self._code is None:
            self._start()
        return self._code

    def _start(self) -> None:
        if self._stopped:
            self._on_end(0)
        elif not self._server.over:
            self._server.poll()
            if not self._server.pid:
                return
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(str(self._server.path))
                with open(self._log_file, "ab") as log_file:
                    packet = json.dumps(self._request).encode()
                    socket.send_fds(connection, [packet], [log_file.fileno()])
                connection.setblocking(False)
                self._connection = connection
            except OSError as error:  # for example, the environment is too large for a packet
                connection.close()
                self._fall_back(f"it does not accept the job: {error}")
        else:
            self._fall_back("it ended")

    def _fall_back(self, reason: str) -> None:
        log.warning("the fork server on this node cannot start the job (%s)", reason)
        self._leave()
        self._cold_launcher = self._start_cold()

    def _receive(self, connection: socket.socket) -> None:
        try:
            packet = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        code = int(json.loads(packet)["exit"]) if packet else -9  # it died with its server
        self._on_end(code if code >= 0 else 128 - code)

    def _on_end(self, code: int) -> None:
        self._sweep()
        self._leave()
        self._code = code

    def _leave(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._server.users -= 1
        self._server.idle_since = time.monotonic()

    def terminate(self) -> None:
        """Make the launcher stop its workers and end."""
        self._stopped = True
        if self._cold_launcher is not None:
            self._cold_launcher.terminate()
        elif self._connection is not None:
            try:
                self._connection.send(b"stop")
            except OSError:
                pass  # it has ended

    def forget(self) -> None:
        """Release the launcher after all its processes were killed."""
        if self._code is None and self._cold_launcher is None:
            self._leave()
            self._code = 128 + 9


class NodeForkServers:
    """The fork servers of one node.

    Args:
        directory: private directory for their sockets and logs.
        environment: the agent's environment.
        marks: variables that identify the processes of this agent.
        send: sends a message to the daemon.
        memory: the agent's directory for snapshots, which is removed with the agent; None if there
            is none.
        others: returns the pids of other children of the agent, which are reaped elsewhere.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        marks: Mapping[str, str],
        send: Callable[[Warm], object],
        memory: Path | None = None,
        others: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        self._others = others
        self._memory = memory
        self._directory = directory
        self._environment = environment
        self._marks = marks
        self._send = send
        self._servers: dict[str, WarmPython] = {}
        self._interpreters: tuple[Interpreter, ...] = ()
        self._idle_s = 0.0
        self._failed: set[str] = set()
        self._count = 0
        self._leaving = False

    # --- requests of the daemon ---

    def warm_up(self, message: WarmUp) -> None:
        """Set the Pythons that are requested."""
        self._interpreters, self._idle_s = message.interpreters, message.idle_s
        for server in self._servers.values():
            server.idle_since = time.monotonic()
        self._report()

    def settled(self) -> tuple[str, ...]:
        """Return the keys of the Pythons that are warm, or cannot be warmed up."""
        return (*(s.key for s in self._servers.values() if s.pid), *sorted(self._failed))

    def memory_bytes(self) -> int:
        """Return the resident memory of the warm fork servers, bytes."""
        return sum(server.memory_bytes() for server in self._servers.values())

    def leave(self) -> None:
        """End the fork servers that no job uses, and warm up no others: the node will leave."""
        self._leaving = True
        for server in [s for s in self._servers.values() if not s.users]:
            self._end(server)

    def step(self, busy: bool) -> None:
        """Start and end fork servers; called often. ``busy``: whether a job is on the node. If so,
        no Python is warmed up.
        """
        now, before = time.monotonic(), self.settled()
        for server in list(self._servers.values()):
            if server.poll():
                log.info("a Python is warm (%d MB)", server.memory_bytes() >> 20)
            elif server.over:
                if not server.pid:
                    self._failed.add(server.key)
                self._end(server)
            elif not server.users and self._is_unneeded(server, now):
                self._end(server)
        if self.settled() != before:
            self._report()
        if busy or self._leaving or not all(s.pid for s in self._servers.values()):
            return
        for interpreter in self._interpreters:
            if interpreter.key not in self._servers and interpreter.key not in self._failed:
                self._start(interpreter)
                return

    def _is_unneeded(self, server: WarmPython, now: float) -> bool:
        if server.pid and now - server.idle_since > self._idle_s:
            self._interpreters = tuple(i for i in self._interpreters if i.key != server.key)
            return True
        return server.key not in {i.key for i in self._interpreters}

    def _report(self) -> None:
        self._send(Warm(self.settled()))

    def _start(self, interpreter: Interpreter) -> None:
        self._count += 1
        path = self._directory / f"w{self._count}"
        environment = {**base_environment(self._environment, interpreter.env), **self._marks}
        try:
            server = WarmPython(
                *(interpreter, path, self._directory / f"warm-{self._count}.log", environment),
                self._memory,
            )
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in an argument
            log.warning("no fork server can be started: %s", error)
            self._failed.add(interpreter.key)
            self._report()
            return
        self._servers[server.key] = server

    def _end(self, server: WarmPython) -> None:
        server.end()
        del self._servers[server.key]

    # --- jobs ---

    def server_for(self, spec: JobSpec) -> WarmPython | None:
        """Return the fork server for a job; None if there is none."""
        interpreter = interpreter_of(spec)
        server = self._servers.get(interpreter.key) if interpreter is not None else None
        return None if server is None or server.over else server

    def launch(
        self,
        spec: JobSpec,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log_file: Path,
        start_cold: Callable[[], Launched],
    ) -> Launched:
        """Start a launcher: as a fork of the job's fork server if there is one, else in a new
        Python.

        Args:
            spec: specification of the job.
            arguments: arguments of the launcher.
            environment: its environment.
            log_file: file for its output.
            start_cold: starts the launcher in a new Python.
        """
        server = self.server_for(spec)
        if server is None:
            return start_cold()
        request = {"argv": [*arguments], "env": dict(environment), "cwd": spec.workdir}
        return ForkedLauncher(server, request, log_file, start_cold, lambda: self.sweep(1.0))

    # --- cleanup after a job ---

    def _spared_pids(self) -> frozenset[int]:
        """Return the processes that belong to no job."""
        pids: set[int] = set()
        for server in self._servers.values():
            pids.add(server.supervisor_pid)
            # Descendants of a warm server belong to a job.
            pids.update([server.pid] if server.pid else descendants(server.supervisor_pid))
        return frozenset(pids)

    def sweep(self, limit_s: float) -> None:
        """Kill every descendant of the agent that belongs to a job. ``limit_s``: time limit,
        seconds.
        """
        kill_descendants(limit_s, self._spared_pids)
        self.reap()

    def reap(self) -> None:
        """Reap orphans."""
        servers = frozenset(s.supervisor_pid for s in self._servers.values())
        reap_orphans(keep=servers | self._others())

    def has_job_processes(self) -> bool:
        """Return whether a process of a job is alive."""
        return not self._spared_pids().issuperset(descendants(os.getpid()))
