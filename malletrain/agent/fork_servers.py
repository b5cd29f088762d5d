"""The warm fork servers on this node, and the launchers that are forked from them.

Decides when a Python is warmed up (the daemon requests it, no job is on the node, and the node is
not about to leave), when its fork server ends (no job has used it for long, or it is no longer
requested), and which processes belong to no job, so that the cleanup after a job spares them. The
daemon decides which Pythons are requested; :mod:`malletrain.launch.warm_server` is the fork server.
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
from malletrain.agent.software import described, entered, python_command
from malletrain.launch import entry
from malletrain.launch.supervisor import descendants, kill_descendants
from malletrain.protocol.interpreters import Interpreter, Warm, WarmUp, interpreter_of
from malletrain.protocol.messages import JobSpec

log = logging.getLogger("malletrain.agent")

_READY = ".ready"  # as in malletrain.launch.warm_server, which imports torch
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Launched(Protocol):
    """A launcher with everything below it."""

    def exit_code(self) -> int | None:
        """None while the launcher runs."""

    def terminate(self) -> None:
        """Have the launcher stop its workers in order."""

    def forget(self) -> None:
        """Everything of it was killed."""


class WarmPython:
    """One Python that is, or will be, warm."""

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
        """Of the server itself, once it is warm."""
        self.users = 0
        """Launchers that were forked from it, or are about to be."""
        self.idle_since = time.monotonic()
        spec = JobSpec(
            "", "", "", "/", interpreter.python, env=interpreter.env, software=interpreter.software
        )
        words = warm_arguments(LauncherEntry(entry.__file__, described(spec)), path)
        command = entered(spec.software, python_command(spec, words))
        argv = supervised_command(command, os.getpid(), "/", log_file, memory)
        self._keeper = JobProcess(argv, environment)

    @property
    def keeper(self) -> int:
        """The pid of its supervisor."""
        return self._keeper.pid

    @property
    def over(self) -> bool:
        """It has ended, or never came up."""
        return self._keeper.exit_code() is not None

    def look(self) -> bool:
        """Whether it has become warm since the last time."""
        if self.pid or self.over:
            return False
        try:
            self.pid = int(Path(f"{self.path}{_READY}").read_text())
        except (OSError, ValueError):
            return False
        self.idle_since = time.monotonic()
        return True

    def memory_bytes(self) -> int:
        """Resident memory (proc_pid_statm(5)); what its forks have not written to is in it."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            return 0

    def end(self) -> None:
        """Kill it and everything below it."""
        self._keeper.kill()
        self.path.unlink(missing_ok=True)
        Path(f"{self.path}{_READY}").unlink(missing_ok=True)


class ForkedLauncher:
    """A launcher that is a fork of a warm Python, as soon as that is warm.

    Args:
        server: of which it is a fork.
        request: arguments, environment and directory.
        log_file: where its output goes.
        cold: starts a Python for it instead, where the server comes to nothing.
        swept: kills what a launcher that ended has left behind.
    """

    def __init__(
        self,
        server: WarmPython,
        request: Mapping[str, object],
        log_file: Path,
        cold: Callable[[], Launched],
        swept: Callable[[], object],
    ) -> None:
        self._server = server
        self._request = request
        self._log_file = log_file
        self._cold = cold
        self._swept = swept
        self._connection: socket.socket | None = None
        self._instead: Launched | None = None
        self._code: int | None = None
        self._stopped = False
        server.users += 1
        self.exit_code()

    def exit_code(self) -> int | None:
        """None while it runs or waits for its Python to be warm."""
        if self._code is None and self._instead is not None:
            self._code = self._instead.exit_code()
        elif self._code is None and self._connection is not None:
            self._hear(self._connection)
        elif self._code is None:
            self._begin()
        return self._code

    def _begin(self) -> None:
        if self._stopped:
            self._over(0)
        elif not self._server.over:
            self._server.look()
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
            except OSError as error:  # an environment too large for a packet, say
                connection.close()
                self._start_cold(f"it does not take the job: {error}")
        else:
            self._start_cold("it ended")

    def _start_cold(self, why: str) -> None:
        log.warning("the fork server on this node is of no use for the job (%s)", why)
        self._leave()
        self._instead = self._cold()

    def _hear(self, connection: socket.socket) -> None:
        try:
            packet = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        code = int(json.loads(packet)["exit"]) if packet else -9  # it died with its server
        self._over(code if code >= 0 else 128 - code)

    def _over(self, code: int) -> None:
        self._swept()
        self._leave()
        self._code = code

    def _leave(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._server.users -= 1
        self._server.idle_since = time.monotonic()

    def terminate(self) -> None:
        """Have the launcher stop its workers in order."""
        self._stopped = True
        if self._instead is not None:
            self._instead.terminate()
        elif self._connection is not None:
            try:
                self._connection.send(b"stop")
            except OSError:
                pass  # it has ended

    def forget(self) -> None:
        """Everything of it was killed."""
        if self._code is None and self._instead is None:
            self._leave()
            self._code = 128 + 9


class NodeForkServers:
    """Those of one node.

    Args:
        directory: for their sockets and logs, private.
        environment: the agent's own.
        marks: variables by which its processes are known.
        send: reaches the daemon.
        memory: the agent's folder for snapshots, which goes with it.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        marks: Mapping[str, str],
        send: Callable[[Warm], object],
        memory: Path | None = None,
    ) -> None:
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

    # --- what the daemon wants ---

    def warm_up(self, message: WarmUp) -> None:
        """Have these warm."""
        self._interpreters, self._idle_s = message.interpreters, message.idle_s
        for server in self._servers.values():
            server.idle_since = time.monotonic()
        self._say()

    def settled(self) -> tuple[str, ...]:
        """Keys of those that are warm, or cannot be."""
        return (*(s.key for s in self._servers.values() if s.pid), *sorted(self._failed))

    def memory_bytes(self) -> int:
        """Of those that are warm."""
        return sum(server.memory_bytes() for server in self._servers.values())

    def leave(self) -> None:
        """The node is about to go: what no job uses ends at once, and nothing is warmed up."""
        self._leaving = True
        for server in [s for s in self._servers.values() if not s.users]:
            self._end(server)

    def step(self, busy: bool) -> None:
        """Look after them; called often. ``busy``: a job is on the node, beside which nothing is
        imported.
        """
        now, before = time.monotonic(), self.settled()
        for server in list(self._servers.values()):
            if server.look():
                log.info("a Python is warm (%d MB)", server.memory_bytes() >> 20)
            elif server.over:
                if not server.pid:
                    self._failed.add(server.key)
                self._end(server)
            elif not server.users and self._of_no_use(server, now):
                self._end(server)
        if self.settled() != before:
            self._say()
        if busy or self._leaving or not all(s.pid for s in self._servers.values()):
            return
        for interpreter in self._interpreters:
            if interpreter.key not in self._servers and interpreter.key not in self._failed:
                self._start(interpreter)
                return

    def _of_no_use(self, server: WarmPython, now: float) -> bool:
        if server.pid and now - server.idle_since > self._idle_s:
            self._interpreters = tuple(i for i in self._interpreters if i.key != server.key)
            return True
        return server.key not in {i.key for i in self._interpreters}

    def _say(self) -> None:
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
        except (OSError, ValueError) as error:  # ValueError: a zero byte in an argument
            log.warning("no fork server can be started: %s", error)
            self._failed.add(interpreter.key)
            self._say()
            return
        self._servers[server.key] = server

    def _end(self, server: WarmPython) -> None:
        server.end()
        del self._servers[server.key]

    # --- jobs ---

    def of(self, spec: JobSpec) -> WarmPython | None:
        """The fork server for a job, if there is one."""
        interpreter = interpreter_of(spec)
        server = self._servers.get(interpreter.key) if interpreter is not None else None
        return None if server is None or server.over else server

    def launch(
        self,
        spec: JobSpec,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log_file: Path,
        cold: Callable[[], Launched],
    ) -> Launched:
        """Start a launcher: a fork of the warm Python that the job wants, where there is one; else
        ``cold``.
        """
        server = self.of(spec)
        if server is None:
            return cold()
        request = {"argv": [*arguments], "env": dict(environment), "cwd": spec.workdir}
        return ForkedLauncher(server, request, log_file, cold, lambda: self.sweep(1.0))

    # --- what is left of a job ---

    def _spared(self) -> frozenset[int]:
        """Processes that belong to no job."""
        spared: set[int] = set()
        for server in self._servers.values():
            spared.add(server.keeper)
            # What is below a warm one is, or was, a job.
            spared.update([server.pid] if server.pid else descendants(server.keeper))
        return frozenset(spared)

    def sweep(self, limit_s: float) -> None:
        """Kill every descendant of the agent that belongs to a job."""
        kill_descendants(limit_s, self._spared)
        self.reap()

    def reap(self) -> None:
        """Take the exit codes of orphans."""
        reap_orphans(keep=frozenset(s.keeper for s in self._servers.values()))

    def anything_left(self) -> bool:
        """Whether anything of a job lives."""
        return not self._spared().issuperset(descendants(os.getpid()))
