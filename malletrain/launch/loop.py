"""The event loop of a launcher that starts its processes itself. It wakes on messages of the agent
and of the processes, when a process ends, and on signals. The launcher decides what each of these
means.

:class:`LineEndpoint` is the launcher's end of the socket to the processes: JSON objects, one per
line. It never blocks, and accepts any input: an invalid line is reported and dropped, and a process
that sends an endless line or reads nothing is disconnected.
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
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Protocol

import msgspec

from malletrain.launch.supervisor import is_meant
from malletrain.protocol import env
from malletrain.protocol.bounds import MAX_WORTH_SIZES, Amount, Count, Duration
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.launcher_channel import LauncherEnd, LaunchOrder, read_order
from malletrain.protocol.messages import Error, Message, Phase, Release

MAX_BUFFERED_BYTES = 1 << 20
"""Maximum size of an incomplete line, and of the output that a process has not read yet, bytes."""
MAX_CONNECTIONS = 256
_READ_BYTES = 65536
_READS_PER_TURN = 16
TICK_S = 0.5
_LAST_BYTES = 4096
_FIRST_BYTES = 256 * 1024


class ProcessLine(msgspec.Struct, frozen=True):
    """One line from a process. Other fields are ignored."""

    say: str
    """Kind of line: ``hello``, ``ready``, ``running``, ``lost``, ``heard``, ``restart`` (live
    mode); ``join``, ``ready``, ``drained``, ``worth`` (a service).
    """
    local_rank: int = -1
    """With ``hello``: local rank of the worker."""
    generation: int = 0
    """Number of the round that the line is about."""
    address: str = ""
    """With ``join``: address at which the process can be reached."""
    nodes: Annotated[dict[Count, Amount], msgspec.Meta(max_length=MAX_WORTH_SIZES)] = {}
    """With ``worth``: value of each number of nodes, samples/s."""
    expires_s: Duration | None = None
    """With ``worth``: time after which the values lapse, seconds; None: they do not."""
    loading: bool = False
    """With ``join``: whether ``ready`` follows later."""


class LineConnection:
    """The connection of one process."""

    def __init__(self, own: socket.socket) -> None:
        self._socket = own
        self._socket.setblocking(False)
        self._unread = b""
        self._unsent = b""
        self.open = True
        """Whether neither end has closed the connection."""

    def fileno(self) -> int:
        """Return the file descriptor to wait on."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Queue ``message``. The end of a process is noticed elsewhere."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send as much of the queue as possible without blocking."""
        try:
            while self._unsent and self.open:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > MAX_BUFFERED_BYTES:
                _tell("closed the connection of a process that does not read its messages")
                self.open = False
        except OSError:
            self.open = False

    def receive(self) -> list[ProcessLine]:
        """Return the lines received since the last call, up to a maximum per turn."""
        received: list[ProcessLine] = []
        for _ in range(_READS_PER_TURN):
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.open = False
                break
            *lines, self._unread = (self._unread + data).split(b"\n")
            received += [message for line in lines if (message := _parse(line)) is not None]
            if len(self._unread) > MAX_BUFFERED_BYTES:
                _tell(
                    "closed the connection of a process that sent an endless line: "
                    f"{self._unread[:80]!r}"
                )
                self.open = False
                break
        return received

    def close(self) -> None:
        """Close the connection."""
        self.open = False
        self._socket.close()


class LineEndpoint:
    """A socket to which the processes of a job connect."""

    def __init__(self, path: str, watch: Callable[[int, bool], None]) -> None:
        """Listen.

        Args:
            path: path of the Unix socket, in a directory that no other user can enter.
            watch: called with each file descriptor and True to wake on it, and with False to stop.

        Raises:
            OSError: the socket cannot be created.
        """
        self.path = path
        self._watch = watch
        self._connections: list[LineConnection] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(path)
        self._listener.listen(64)
        self._listener.setblocking(False)
        watch(self._listener.fileno(), True)

    def receive(self) -> list[tuple[LineConnection, ProcessLine]]:
        """Return the lines of all processes since the last call. Removes the connections that are
        closed.
        """
        self._accept()
        received = []
        for connection in self._connections:
            received += [(connection, message) for message in connection.receive()]
            connection.flush()
        for closed in [c for c in self._connections if not c.open]:
            self.hang_up(closed)
        return received

    def hang_up(self, connection: LineConnection) -> None:
        """Close ``connection``. A second call does nothing."""
        if connection in self._connections:
            self._connections.remove(connection)
            self._watch(connection.fileno(), False)
            connection.close()

    def close(self) -> None:
        """Close all connections and remove the socket."""
        for connection in list(self._connections):
            self.hang_up(connection)
        self._watch(self._listener.fileno(), False)
        self._listener.close()
        os.unlink(self.path)

    def _accept(self) -> None:
        while True:
            try:
                own, _ = self._listener.accept()
            except OSError:  # no connection, or too many open files; the next call tries again
                return
            if len(self._connections) >= MAX_CONNECTIONS:
                own.close()
                continue
            connection = LineConnection(own)
            self._connections.append(connection)
            self._watch(connection.fileno(), True)


def _parse(line: bytes) -> ProcessLine | None:
    try:
        return msgspec.json.decode(line, type=ProcessLine)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        _tell(f"a process sent an invalid line: {line[:80]!r}")
        return None


def _tell(sentence: str) -> None:
    print(f"malletrain launcher: {sentence}", flush=True)


_OWN_GROUP: Mapping[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)


class Launcher(Protocol):
    """The methods of a launcher that the loop calls."""

    def on_message(self, message: Message) -> None:
        """Handle a message of the agent, except those that end the loop."""

    def on_line(self, connection: LineConnection, message: ProcessLine) -> None:
        """Handle a line of one of the processes."""

    def check_processes(self) -> None:
        """Handle the end of processes."""

    def stop(self) -> None:
        """Stop the processes, and wait until all have ended."""


class Child:
    """A process that wakes the loop when it ends.

    Args:
        loop: the loop.
        command: its command.
        environment: its environment variables.
        workdir: its working directory; None for that of this process.
        output: file descriptor for its output; None for that of this process.
        own_group: whether it leads a process group of its own. Where sessions share the
            processors equally (sched(7), autogroups), a node of many processes with sessions of
            their own would leave little to the daemon of an embedded cluster, so it stays in the
            launcher's session. Python 3.10 can only start a new one.

    Raises:
        OSError: it cannot be started.
        ValueError: an argument contains a NUL byte.
    """

    def __init__(
        self,
        loop: LaunchLoop,
        command: list[str],
        environment: dict[str, str],
        *,
        workdir: str | None = None,
        output: int | None = None,
        own_group: bool = False,
    ) -> None:
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=workdir,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            **(_OWN_GROUP if own_group else {}),
        )
        reached(FaultPoint.LAUNCHER_FORKED)
        self._loop = loop
        self._pidfd = os.pidfd_open(self.process.pid)
        loop.agent.also_wake_on(self._pidfd)

    def ended(self) -> int | None:
        """Return the exit code of the process (negative: a signal); None while it runs."""
        code = self.process.poll()
        if code is not None and self._pidfd >= 0:
            self._loop.agent.also_wake_on(self._pidfd, False)
            os.close(self._pidfd)
            self._pidfd = -1
        return code


class LaunchLoop:
    """The agent's channel and the processes' socket of one job on this node."""

    def __init__(self, order: LaunchOrder) -> None:
        """Connect to the agent and listen for processes.

        Args:
            order: the agent's order. The socket for processes is next to the agent's own.
        """
        self.agent = LauncherEnd(order.endpoint)
        directory = os.path.dirname(order.endpoint.removeprefix("ipc://"))
        self.lines = LineEndpoint(f"{directory}/l{os.getpid()}", self.agent.also_wake_on)
        self._end_sentence = ""
        self._exit_sentence = ""
        self._code = 0
        self._wait_s = TICK_S
        self.lease_terminated = False
        """Whether all processes of the lease have received a SIGTERM: the node leaves."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken)
        self.agent.also_wake_on(self._wake)

    @property
    def ending(self) -> bool:
        """Whether the loop ends, or is about to."""
        return bool(self._end_sentence or self._exit_sentence)

    def wake_in(self, seconds: float) -> None:
        """Call the launcher again after this time at the latest; once."""
        self._wait_s = min(TICK_S, max(0.0, seconds))

    def end(self, sentence: str) -> None:
        """Leave the loop. ``sentence``: the reason; the first one counts."""
        self._end_sentence = self._end_sentence or sentence

    def leave(self, last: Phase, sentence: str) -> None:
        """Leave the loop with exit code 1 when the agent has received the reason. Without this
        wait, the agent could notice the end of this process before it receives the message.

        Args:
            last: message with the phase EXITED, which the agent answers with a release.
            sentence: the reason, for the log.
        """
        self.agent.send(last)
        self._exit_sentence, self._code = sentence, 1

    def run(self, launcher: Launcher) -> int:
        """Run until the job leaves the node or the launcher ends it. Return the exit code."""
        try:
            while not self._end_sentence:
                wait_s, self._wait_s = self._wait_s, TICK_S
                for message in self.agent.receive(wait_s):
                    self._on_agent_message(launcher, message)
                if self.agent.agent_gone:
                    self.end("The agent on this node is gone.")
                for connection, line in self.lines.receive():
                    launcher.on_line(connection, line)
                if not self._exit_sentence:
                    launcher.check_processes()
        finally:
            launcher.stop()
            self.lines.close()
            self.agent.close()
        print(f"malletrain launcher: {self._exit_sentence or self._end_sentence}", flush=True)
        return self._code

    def _on_agent_message(self, launcher: Launcher, message: Any) -> None:
        if isinstance(message, Release):
            self.end("The job was released from this node.")
        elif isinstance(message, Error):
            self.end(message.sentence)
        elif not self._exit_sentence:
            launcher.on_message(message)

    def _on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGTERM and not is_meant(os.getppid()):
            self.lease_terminated = True
            return  # scancel sends it to every process of the lease
        self.end(f"{signal.Signals(number).name}: the job leaves this node.")


def stop_signal() -> signal.Signals:
    """Return the signal that stops a process of this launcher. A fork client sends SIGTERM to its
    worker when it gets SIGINT.
    """
    return signal.SIGINT if env.FORK_SERVER in os.environ else signal.SIGTERM


def stop_all(children: Iterable[Child], grace_s: float) -> None:
    """Stop processes, and wait for them. ``grace_s``: time after which those that still run are
    killed, seconds.
    """
    alive = [c.process for c in children if c.ended() is None]
    reached(FaultPoint.LAUNCHER_STOPS)
    for process in alive:
        process.send_signal(stop_signal())
    deadline = time.monotonic() + grace_s
    for process in alive:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for child in children:
        child.ended()
    reached(FaultPoint.LAUNCHER_STOPPED)


def first_words(path: str) -> str:
    """Return the beginning of a log; empty if there is none."""
    try:
        with open(path, "rb") as file:
            return file.read(_FIRST_BYTES).decode(errors="replace").rstrip()
    except OSError:
        return ""


def last_words(path: str) -> str:
    """Return the end of a log; empty if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _LAST_BYTES))
            return file.read().decode(errors="replace").rstrip()
    except OSError:
        return ""


def order_from_arguments(program: str, purpose: str) -> LaunchOrder | None:
    """Return the order that the command line names. If it cannot be read, prints the reason and
    returns None.
    """
    parser = argparse.ArgumentParser(prog=program, description=purpose)
    usage = "the order, a JSON file written by the agent"
    parser.add_argument("--launch", required=True, metavar="FILE", help=usage)
    try:
        order = read_order(parser.parse_args().launch)
    except (OSError, ValueError) as error:
        print(f"malletrain launcher: the order cannot be read: {error}", file=sys.stderr)
        return None
    reached(FaultPoint.LAUNCHER_STARTED)
    return order
