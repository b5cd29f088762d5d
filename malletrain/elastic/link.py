"""The worker's end of the news: which round it belongs to, and when a peer is lost.

Three sources of rounds, one interface: the launcher of a live job (a Unix socket, path in
``MALLETRAIN_LIVE``), torchrun's environment (one round that never changes), or nothing at all (a
round of one). A thread listens; the training thread asks :attr:`pending` and :meth:`wait_round`. It
decides nothing about groups (:mod:`malletrain.elastic.group`).

On the socket both ends send JSON objects, one a line. Worker: ``{"say": "hello", "local_rank",
"pid"}``, ``ready``, ``running`` (with ``generation``), ``lost`` (a peer of ``generation`` is gone).
Launcher: ``{"round": g, "rank", "size", "port", "network"}``, ``{"abort": g}``.
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
from malletrain.training.steadfast import bear_one_sigterm


@dataclass(frozen=True)
class Place:
    """This process in a round: ``rank`` of ``size`` processes, the round's store at ``port`` of the
    loopback (0: torchrun's, or none). ``network``: variables that say by which network it goes;
    those without a value are not to be set.
    """

    generation: int
    rank: int
    size: int
    port: int = 0
    network: tuple[tuple[str, str], ...] = ()

    def go_by_network(self) -> None:
        """Have the groups that are formed from now on go by the round's network."""
        for name, value in self.network:
            if value:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)


class Link:
    """Rounds as they come. ``on_round`` and ``on_abort`` are called in the listening thread."""

    live = False

    def __init__(self) -> None:
        self.on_round: Callable[[Place], None] = lambda place: None
        self.on_abort: Callable[[int], None] = lambda generation: None
        self._newest: Place | None = None
        self._news = threading.Condition()

    def start(self) -> None:
        """Begin to listen."""

    def newest(self) -> Place | None:
        """The newest round this process belongs to."""
        return self._newest

    def wait_round(self, after: int) -> Place:
        """Wait for a round newer than ``after``, for ever if need be: the launcher ends this
        process when there will be none.
        """
        with self._news:
            while self._newest is None or self._newest.generation <= after:
                self._news.wait(1.0)
            return self._newest

    def say(self, what: str, generation: int = 0) -> None:
        """Tell the launcher."""

    def _take(self, place: Place) -> None:
        if self._newest is not None and place.generation <= self._newest.generation:
            return
        self.on_round(place)  # before anybody can see that there is a newer round
        with self._news:
            self._newest = place
            self._news.notify_all()


class FixedLink(Link):
    """Under torchrun or plain python: the one round there is."""

    def __init__(self) -> None:
        super().__init__()
        generation = int(os.environ.get(env.GENERATION, "1") or 1)
        size = int(os.environ.get("WORLD_SIZE", "1"))
        self._newest = Place(max(1, generation), int(os.environ.get("RANK", "0")), size)


class LiveLink(Link):
    """Under the launcher of a live job. Its end is the end of this process."""

    live = True

    def __init__(self, path: str) -> None:
        super().__init__()
        bear_one_sigterm()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._sending = threading.Lock()
        self._send(
            {
                "say": "hello",
                "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
                "pid": os.getpid(),
            }
        )

    def start(self) -> None:
        threading.Thread(target=self._listen, name="malletrain-link", daemon=True).start()

    def say(self, what: str, generation: int = 0) -> None:
        self._send({"say": what, "generation": generation})

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            except (
                OSError
            ):  # the launcher is gone, and the kernel is about to end this process with it
                pass

    def _listen(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                try:
                    self._heard(json.loads(line))
                except Exception:  # who hears nothing any more would hang
                    traceback.print_exc()

    def _heard(self, message: dict[str, Any]) -> None:
        if "round" in message:
            network = tuple(message.get("network", {}).items())
            self._take(
                Place(message["round"], message["rank"], message["size"], message["port"], network)
            )
        elif "abort" in message:
            self.say("heard", message["abort"])
            self.on_abort(message["abort"])


def connect() -> Link:
    """The link this process has by its environment."""
    path = os.environ.get(env.LIVE)
    return LiveLink(path) if path else FixedLink()
