"""The channel between the agent and the launcher of a job on the same node: the messages of
:mod:`malletrain.protocol.messages` over a ZeroMQ socket in the agent's run directory (agent ROUTER,
launcher DEALER, ``ipc://``, readable by the owner only).

launcher → agent: ``Phase`` (ready or failed: waits for a round; running: has started one;
succeeded: waits in the lobby; exited: is about to end, and waits for the release) and ``StoreUp``.
agent → launcher: ``Alive`` (acknowledgement), ``Round``, ``Release`` (the job is over) and
``Error`` (a timeout; the text says of what).

Decides addresses, the launcher's end of the socket and which round is valid; does not import torch.
The agent's death closes the socket, which the launcher's end notices at once.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import zmq

from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.messages import JobSpec, Message, Round
from malletrain.protocol.wire import WireError, decode, encode

_MAX_SOCKET_PATH = 107  # sun_path of unix(7) is 108 bytes with its final zero


class TaskSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the tasks of a farm are started on a node."""

    environment: dict[str, str]
    """Environment variables of a task, before its software environment is entered."""
    enter: tuple[str, ...] = ()
    """Command that enters the software environment, and then writes its variables as ``env -0``
    does to the file ``variables_file``; empty if there is none."""
    variables_file: str = ""
    prefix: tuple[str, ...] = ()
    """Words before the command of each task, such as those of a container runtime."""
    variable_prefix: str = ""
    """Prefix with which each variable of a task is set again, for the container runtime."""
    devices: tuple[str, ...] = ()
    """The GPUs of the lease, as in CUDA_VISIBLE_DEVICES."""


class LaunchOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The agent's order to the launcher, written to a file so that no shell interprets it.

    ``endpoint``: the agent's socket. ``log_dir``: directory of the workers' output.
    ``join_timeout_s``: maximum time to reach a round's store. ``stop_grace_s``: time between
    SIGTERM and SIGKILL of a worker. ``tasks``: for a farm.
    """

    job: str
    spec: JobSpec
    endpoint: str
    host: str
    log_dir: str
    stop_grace_s: float
    join_timeout_s: float
    tasks: TaskSetting | None = None


def write_order(path: Path, order: LaunchOrder) -> None:
    """Write ``order`` as JSON. Raises OSError."""
    path.write_bytes(msgspec.json.encode(order))


def read_order(path: str) -> LaunchOrder:
    """Return the order in the file at ``path``. Raises OSError, or ValueError if the file is not a
    valid order.
    """
    with open(path, "rb") as file:
        return msgspec.json.decode(file.read(), type=LaunchOrder)


def socket_directory(run_dir: Path, longest_name: int = 24) -> Path:
    """Return ``run_dir`` if the paths of sockets in it are short enough for the kernel, else a new
    private temporary directory.
    """
    if len(os.fsencode(run_dir)) + 1 + longest_name <= _MAX_SOCKET_PATH:
        return run_dir
    return Path(tempfile.mkdtemp(prefix="malletrain-"))


class RoundInbox:
    """The newest round that this node has received, and the round of its workers. Older rounds are
    dropped.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._newest: Round | None = None

    def add(self, message: Round) -> bool:
        """Keep ``message`` if its generation is new. Only rank 0 gets a round twice, so the first
        message of a generation counts. Return whether it was kept.
        """
        if message.generation <= max(
            self.generation, self._newest.generation if self._newest else 0
        ):
            return False
        self._newest = message
        return True

    def pending(self) -> Round | None:
        """Return the round to start next, None if there is none."""
        return self._newest if self._newest and self._newest.generation > self.generation else None

    def take(self) -> Round:
        """Make the pending round the current one and return it. Call only if there is one."""
        pending = self.pending()
        assert pending is not None
        self.generation = pending.generation
        return pending


class LauncherEnd:
    """The launcher's socket. Synchronous and not thread-safe: used by the main thread only."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.agent_gone = False
        self._socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(endpoint)

    def send(self, message: Message) -> None:
        """Queue ``message`` for the agent; never blocks for long (the queue holds a thousand)."""
        reached(FaultPoint.LAUNCHER_SAYS)
        try:
            self._socket.send_multipart(encode(message), zmq.DONTWAIT)
        except zmq.Again:
            pass  # the agent does not read; messages that it needs are sent again
        reached(FaultPoint.LAUNCHER_SAID)

    def also_wake_on(self, fd: int, wake: bool = True) -> None:
        """Make :meth:`receive` return early when ``fd`` can be read; stop doing so if ``wake`` is
        false."""
        if wake:
            self._poller.register(fd, zmq.POLLIN)
        else:
            self._poller.unregister(fd)

    def receive(self, timeout_s: float = 0.0) -> list[Any]:
        """Return messages from the agent; wait up to ``timeout_s`` for the first. Sets
        ``agent_gone`` if the agent's end was closed.
        """
        ready = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        messages = []
        if self._socket in ready:
            while True:
                try:
                    frames = self._socket.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    break
                try:
                    messages.append(decode(frames))
                except WireError as error:
                    print(
                        f"malletrain launcher: dropped a message from the agent. {error}",
                        flush=True,
                    )
        if self._monitor in ready:
            self._monitor.recv_multipart()
            self.agent_gone = True
        return messages

    def close(self) -> None:
        """Close the socket. A second call does nothing."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
