"""The commands that the owner of a job runs on this node (``malletrain exec``).

Decides how a command is connected to its client: by three pipes or a pseudo-terminal, with flow
control in both directions. Output is read from the process only as far as the client has read, so
it is buffered in the pipe, and a process that writes faster waits. The daemon decides who may run a
command. Processes are started under a supervisor, so that none outlives the command or the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from malletrain.agent.jobrun import NodeJob
from malletrain.agent.launch import supervised_command
from malletrain.agent.start import UnusableSoftware
from malletrain.launch import entry
from malletrain.launch.supervisor import descendants
from malletrain.protocol.bounds import Message
from malletrain.protocol.commands import (
    MAX_CHUNK_BYTES,
    OUTPUT_WINDOW,
    CommandCredit,
    CommandEnded,
    CommandInput,
    CommandInputRead,
    CommandOutput,
    EndCommand,
    ResizeTerminal,
    SignalCommand,
    StartCommand,
    Terminal,
)

MAX_COMMANDS = 4
"""Maximum number of commands on a node at once."""
_END_OF_FILE = b"\x04"
"""The character that ends the input of a terminal (VEOF, termios(3))."""

CommandMessage = (
    StartCommand | CommandInput | CommandCredit | ResizeTerminal | SignalCommand | EndCommand
)


@dataclass
class _Streams:
    """The agent's ends of a command's streams. A terminal has one descriptor for all."""

    stdin: int
    """Descriptor to write; -1 if closed."""
    outputs: dict[int, bool]
    """Open descriptors to read → whether it is the standard error."""
    children: tuple[int, int, int]
    """The process's ends: standard input, output and error."""


def _pipes() -> _Streams:
    (stdin_read, stdin), (stdout, stdout_write), (stderr, stderr_write) = (
        os.pipe(),
        os.pipe(),
        os.pipe(),
    )
    return _Streams(stdin, {stdout: False, stderr: True}, (stdin_read, stdout_write, stderr_write))


def _pseudo_terminal(terminal: Terminal) -> _Streams:
    master, slave = pty.openpty()
    resize(master, terminal)
    return _Streams(master, {master: False}, (slave, slave, slave))


def resize(descriptor: int, terminal: Terminal) -> None:
    """Set the size of a pseudo-terminal (ioctl_tty(2), TIOCSWINSZ). Its processes get SIGWINCH."""
    size = struct.pack("HHHH", terminal.rows, terminal.columns, 0, 0)
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, size)


def _take_terminal() -> None:
    """Make the standard input the controlling terminal of this process's new session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class OwnerCommand:
    """One running command. Create it in the main thread only, because its supervisor is tied to
    the thread that starts it.

    Args:
        name: id of the command.
        argv: command line, in the software environment of the job.
        environment: its environment.
        workdir: its working directory.
        terminal: the client's terminal; None if there is none.
        send: sends a message to the daemon.

    Raises:
        OSError: the process cannot be started.
        ValueError: an argument contains a NUL byte.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        workdir: str,
        terminal: Terminal | None,
        send: Callable[[Message], bool],
    ) -> None:
        self._name, self._send = name, send
        self._loop = asyncio.get_running_loop()
        self._limit, self._sent = OUTPUT_WINDOW, 0
        """Bytes of output that may be sent, and that were sent, in total."""
        self._input = bytearray()
        """Input that the process has not read."""
        self._input_read = 0
        """Bytes of input that were written to the process, in total."""
        self._input_ends = False
        """Whether no more input follows."""
        self._is_terminal = terminal is not None
        self._streams = _pseudo_terminal(terminal) if terminal is not None else _pipes()
        stdin, stdout, stderr = self._streams.children
        try:
            self._process = subprocess.Popen(
                supervised_command([*argv], os.getpid(), workdir),
                env=dict(environment),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=_take_terminal if self._is_terminal else None,
                umask=entry.umask_of(environment),
            )
        except BaseException:
            self.close()
            raise
        finally:
            for descriptor in set(self._streams.children):
                os.close(descriptor)
        os.set_blocking(self._streams.stdin, False)
        for descriptor in self._streams.outputs:
            os.set_blocking(descriptor, False)
            self._loop.add_reader(descriptor, self._on_readable, descriptor)

    @property
    def pid(self) -> int:
        """Pid of the supervisor of its processes."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code as of a shell; None while a process of the command is alive or
        some output was not sent.
        """
        code = self._process.poll()
        if code is None or self._streams.outputs:
            return None
        return code if code >= 0 else 128 - code

    def allow(self, limit: int) -> None:
        """Allow output up to ``limit`` bytes in total."""
        if limit > self._limit:
            self._limit = limit
            for descriptor in self._streams.outputs:
                self._loop.add_reader(descriptor, self._on_readable, descriptor)

    def feed(self, data: bytes, end: bool) -> None:
        """Take input for the process. ``end``: whether no more follows."""
        if end and not self._input_ends:
            self._input_ends = True
            data += _END_OF_FILE if self._is_terminal else b""
        self._input += data
        if self._streams.stdin < 0:
            self._drop_input()
        else:
            self._loop.add_writer(self._streams.stdin, self._on_writable)

    def resize(self, terminal: Terminal) -> None:
        """Set the size of its terminal, if it has one."""
        if self._is_terminal and self._streams.stdin >= 0:
            resize(self._streams.stdin, terminal)

    def signal(self, signum: int) -> None:
        """Send a signal to all processes of the command."""
        for pid in descendants(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def hang_up(self) -> None:
        """Kill the processes of the command and close its streams. Reap it with :meth:`reap`."""
        self.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGHUP)  # the supervisor kills them and ends

    def reap(self) -> bool:
        """Return whether the supervisor has ended, and reaps it."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Close the streams."""
        for descriptor in {self._streams.stdin, *self._streams.outputs} - {-1}:
            self._loop.remove_reader(descriptor)
            self._loop.remove_writer(descriptor)
            os.close(descriptor)
        self._streams.stdin = -1
        self._streams.outputs.clear()

    def _on_readable(self, descriptor: int) -> None:
        size = min(MAX_CHUNK_BYTES, self._limit - self._sent)
        if size <= 0:
            self._loop.remove_reader(descriptor)
            return
        try:
            data = os.read(descriptor, size)
        except BlockingIOError:
            return
        except OSError:  # EIO: the last process of a terminal has closed it
            data = b""
        if data:
            self._sent += len(data)
            self._send(CommandOutput(self._name, data, self._streams.outputs[descriptor]))
            return
        self._loop.remove_reader(descriptor)
        del self._streams.outputs[descriptor]
        if descriptor == self._streams.stdin:
            self._loop.remove_writer(descriptor)
            self._streams.stdin = -1
            self._drop_input()
        os.close(descriptor)

    def _on_writable(self) -> None:
        stdin = self._streams.stdin
        try:
            written = os.write(stdin, self._input[:MAX_CHUNK_BYTES]) if self._input else 0
        except BlockingIOError:
            return
        except OSError:  # the process reads no more
            written = len(self._input)
        del self._input[:written]
        if written:
            self._input_read += written
            self._send(CommandInputRead(self._name, self._input_read))
        if self._input:
            return
        self._loop.remove_writer(stdin)
        if self._input_ends and not self._is_terminal:
            self._streams.stdin = -1
            os.close(stdin)

    def _drop_input(self) -> None:
        self._input_read += len(self._input)
        self._input.clear()
        self._send(CommandInputRead(self._name, self._input_read))


class NodeCommands:
    """The commands on this node. All belong to the job that is on it.

    Args:
        send: sends a message to the daemon.
    """

    def __init__(self, send: Callable[[Message], bool]) -> None:
        self._send = send
        self._running: dict[str, OwnerCommand] = {}
        self._ending: list[OwnerCommand] = []
        """Commands that were killed and are not reaped yet."""

    def pids(self) -> frozenset[int]:
        """Return the pids of the supervisors, which are reaped here."""
        return frozenset(c.pid for c in (*self._running.values(), *self._ending))

    def handle(self, message: CommandMessage, job: NodeJob | None) -> None:
        """Handle a message of the daemon. ``job``: the job on this node; None if there is none."""
        if isinstance(message, StartCommand):
            self._start(message, job)
            return
        command = self._running.get(message.command)
        if command is None:
            return  # it has ended, and this has been reported
        match message:
            case CommandInput():
                command.feed(message.data, message.end)
            case CommandCredit():
                command.allow(message.limit)
            case ResizeTerminal():
                command.resize(message.terminal)
            case SignalCommand():
                command.signal(message.signum)
            case EndCommand():
                self._kill(message.command)

    def step(self) -> None:
        """Report the commands that have ended; called often."""
        self._ending = [command for command in self._ending if not command.reap()]
        for name, command in list(self._running.items()):
            code = command.exit_code()
            if code is not None:
                command.close()
                del self._running[name]
                self._send(CommandEnded(name, code))

    def end_all(self, reason: str) -> None:
        """Kill all commands and report ``reason``, a sentence."""
        for name in list(self._running):
            self._kill(name)
            self._send(CommandEnded(name, None, reason))

    def _start(self, message: StartCommand, job: NodeJob | None) -> None:
        name, problem = message.command, ""
        if job is None or job.job != message.job or job.releasing:
            problem = f"Job {message.job} has no processes on this node."
        elif len(self._running) >= MAX_COMMANDS:
            problem = (
                f"{MAX_COMMANDS} commands run on this node already; end one of them, or use "
                "another node of the job."
            )
        else:
            try:
                argv, environment, workdir = job.command_of_owner(message.argv, message.terminal)
                self._running[name] = OwnerCommand(
                    name, argv, environment, workdir, message.terminal, self._send
                )
            except UnusableSoftware as error:
                problem = str(error)
            except (OSError, ValueError) as error:
                problem = f"The command cannot be started on this node: {error}."
        if problem:
            self._send(CommandEnded(name, None, problem))

    def _kill(self, name: str) -> None:
        command = self._running.pop(name)
        command.hang_up()
        self._ending.append(command)
