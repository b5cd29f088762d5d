"""The worker's connection to its launcher: receives rounds and aborts, and reports lost peers.

A worker gets its rounds from the launcher of a live job (a Unix socket, path in
``MALLETRAIN_LIVE``), from torchrun's environment (one round that never changes), or from neither (a
round of one process). All three have one interface. A thread receives messages; the training thread
calls :meth:`Link.newest` and :meth:`Link.wait_round`. Decides nothing about groups
(:mod:`malletrain.elastic.group`).

On the socket both ends send JSON objects, one per line. Worker: ``{"say": "hello", "local_rank",
"pid"}``, ``ready``, ``running`` (with ``generation``), ``lost`` (a peer of ``generation`` is lost),
``heard`` (the abort of ``generation`` has arrived), ``restart`` (it is about to end with
RESTART_CODE, to be started again). Launcher: ``{"round": g, "rank", "size",
"port", "network"}``, ``{"abort": g}``.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from malletrain.protocol import env
from malletrain.training.first_sigterm import ignore_first_sigterm


@dataclass(frozen=True)
class Place:
    """The membership of this process in one round."""

    generation: int
    """Number of the round."""
    rank: int
    """Rank of this process."""
    size: int
    """Number of processes in the round."""
    port: int = 0
    """Loopback port of the round's store; 0 if torchrun provides the store or there is none."""
    network: tuple[tuple[str, str], ...] = ()
    """Environment variables that select the network. One with an empty value is unset."""

    def set_network_variables(self) -> None:
        """Set the round's network variables, which apply to groups created from now on."""
        for name, value in self.network:
            if value:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)


class Link:
    """Source of rounds. The receiving thread calls ``on_round`` and ``on_abort``."""

    live = False

    def __init__(self) -> None:
        self.on_round: Callable[[Place], None] = lambda place: None
        self.on_abort: Callable[[int], None] = lambda generation: None
        self._newest: Place | None = None
        self._round_changed = threading.Condition()

    def start(self) -> None:
        """Start to receive messages."""

    def newest(self) -> Place | None:
        """Return the newest round of this process; None before the first."""
        return self._newest

    def wait_round(self, after: int) -> Place:
        """Wait, without a timeout, for a round newer than ``after``. If there will be none, the
        launcher ends this process.
        """
        with self._round_changed:
            while self._newest is None or self._newest.generation <= after:
                self._round_changed.wait(1.0)
            return self._newest

    def say(self, kind: str, generation: int = 0) -> None:
        """Send a message to the launcher.

        Args:
            kind: kind of message, such as ``"ready"``; see the module's docstring.
            generation: number of the round that the message is about.
        """

    def _accept_round(self, place: Place) -> None:
        if self._newest is not None and place.generation <= self._newest.generation:
            return
        self.on_round(place)  # before the training thread can see the newer round
        with self._round_changed:
            self._newest = place
            self._round_changed.notify_all()


class FixedLink(Link):
    """The single round of a process under torchrun or plain Python."""

    def __init__(self) -> None:
        super().__init__()
        generation = int(os.environ.get(env.GENERATION, "1") or 1)
        size = int(os.environ.get("WORLD_SIZE", "1"))
        self._newest = Place(max(1, generation), int(os.environ.get("RANK", "0")), size)


class LiveLink(Link):
    """Receives rounds from the launcher of a live job. When the launcher ends, so does this
    process.
    """

    live = True

    def __init__(self, path: str) -> None:
        super().__init__()
        ignore_first_sigterm()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._send_lock = threading.Lock()
        self._send(
            {
                "say": "hello",
                "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
                "pid": os.getpid(),
            }
        )

    def start(self) -> None:
        threading.Thread(target=self._receive, name="malletrain-link", daemon=True).start()

    def say(self, kind: str, generation: int = 0) -> None:
        self._send({"say": kind, "generation": generation})

    def _send(self, message: dict[str, Any]) -> None:
        with self._send_lock:
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                # The launcher has ended, and the kernel is about to end this process with it.
                pass

    def _receive(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                try:
                    self._handle_message(json.loads(line))
                except Exception:  # a worker that stops receiving messages would hang
                    traceback.print_exc()

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "round" in message:
            network = tuple(message.get("network", {}).items())
            self._accept_round(
                Place(message["round"], message["rank"], message["size"], message["port"], network)
            )
        elif "abort" in message:
            self.say("heard", message["abort"])
            self.on_abort(message["abort"])


def connect() -> Link:
    """Return the source of rounds that the environment of this process names."""
    path = os.environ.get(env.LIVE)
    return LiveLink(path) if path else FixedLink()
