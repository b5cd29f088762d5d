"""The event loop of a launcher that starts its processes itself. It wakes on messages of the agent
and of the processes, when a process ends, and on signals. The launcher decides what each of these
means.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from malletrain.launch.lines import LineConnection, LineEndpoint, ProcessLine
from malletrain.launch.supervisor import is_meant
from malletrain.protocol import env
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.launcher_channel import LauncherEnd, LaunchOrder, read_order
from malletrain.protocol.messages import Error, Message, Phase, Release

TICK_S = 0.5
_LAST_BYTES = 4096
_FIRST_BYTES = 256 * 1024

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
