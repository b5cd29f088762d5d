"""Who else is in this service: the library of a service's process. Standard library only.

::

    from malletrain import membership

    group = membership.join(address=f"{membership.host()}:{port}")   # after the port is bound: the
    others are told of it group.members                                                    # who is
    there now
    for change in group.changes():                                   # or: async for change in
        group.watch() if change.kind == "leaving" and change.member == group.me:
            hand_over(change.member.seconds_left)
            group.drained()                                          # the node may be given back

Decides nothing: who is a member is the daemon's decision. News come in order and none is skipped
for a listener, but several may come at once. Outside MalleTrain a process is the only member of its
service, and nothing ever changes.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from malletrain.protocol import env
from malletrain.protocol.fault_points import FaultPoint, reached

JOINED, LEAVING, STAYING, LEFT = "joined", "leaving", "staying", "left"


class MembershipError(RuntimeError):
    """This process cannot take part; the message says why."""


@dataclass(frozen=True)
class Member:
    """One process of the service. ``node`` names it among the members of a view; ``address`` is
    what it said when it joined.

    ``leaves_at``: ``time.monotonic()`` on this machine by which it is gone, None while nothing is
    known of an end.
    """

    node: str
    host: str
    address: str
    leaves_at: float | None = field(default=None, compare=False)
    lasts_s: float | None = field(default=None, compare=False)
    """Seconds that its node was expected to last yet when the newest view was made; None where the
    site foretells nothing.
    """

    @property
    def leaving(self) -> bool:
        """Whether it is known to leave."""
        return self.leaves_at is not None

    @property
    def seconds_left(self) -> float:
        """Seconds until it is gone, infinite while nothing is known of an end."""
        return (
            float("inf") if self.leaves_at is None else max(0.0, self.leaves_at - time.monotonic())
        )


@dataclass(frozen=True)
class Change:
    """``kind``: ``joined``; ``leaving`` (with notice: ``member.seconds_left``); ``staying`` (the
    notice was taken back); ``left``.
    """

    kind: str
    member: Member


def host() -> str:
    """The name or address of this node that the others reach."""
    return os.environ.get(env.HOST, "127.0.0.1")


def key() -> bytes:
    """The secret that all processes of this job share, 32 bytes, for checking who knocks. Empty
    outside MalleTrain.
    """
    return bytes.fromhex(os.environ.get(env.JOB_KEY, ""))


def differences(old: tuple[Member, ...], new: tuple[Member, ...]) -> list[Change]:
    """What changed between two views, those that left first. A process that was started again at
    another address left and joined.
    """
    before, after = {(m.node, m.address): m for m in old}, {(m.node, m.address): m for m in new}
    changes = [Change(LEFT, m) for k, m in before.items() if k not in after]
    for k, m in after.items():
        previous = before.get(k)
        if previous is None:
            changes.append(Change(JOINED, m))
        if m.leaving and (previous is None or not previous.leaving):
            changes.append(Change(LEAVING, m))
        elif previous is not None and previous.leaving and not m.leaving:
            changes.append(Change(STAYING, m))
    return changes


class Membership:
    """This process's place in the service. Made by :func:`join`; its methods may be called from any
    thread.
    """

    def __init__(self, me: Member, connection: socket.socket | None) -> None:
        self._me = me
        self._view: tuple[Member, ...] = (me,)
        self.number = 0
        """The number of the newest view; grows."""
        self._lock = threading.Lock()
        self._listeners: list[queue.SimpleQueue[Change | None]] = []
        self._connection = connection
        self._first = threading.Event()
        if connection is None:
            self._first.set()
        else:
            threading.Thread(
                target=self._listen, args=(connection,), name="malletrain-membership", daemon=True
            ).start()

    @property
    def me(self) -> Member:
        """This process."""
        return next((m for m in self._view if m == self._me), self._me)

    @property
    def members(self) -> tuple[Member, ...]:
        """All members of the newest view in rank order, this one included, leavers included."""
        return self._view

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the first view. Returns whether it has come."""
        return self._first.wait(timeout_s)

    def changes(self) -> Iterator[Change]:
        """Every change from now on, after the members there are as ``joined``. Ends with the
        launcher, or by :meth:`close`.
        """
        inbox = self._subscribe()
        while (change := inbox.get()) is not None:
            yield change

    async def watch(self) -> AsyncIterator[Change]:
        """As :meth:`changes`, for asyncio."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Change | None] = asyncio.Queue()
        inbox = self._subscribe()

        def pump() -> None:
            while True:
                change = inbox.get()
                try:
                    loop.call_soon_threadsafe(arrived.put_nowait, change)
                except RuntimeError:  # the loop is closed
                    return
                if change is None:
                    return

        threading.Thread(target=pump, name="malletrain-watch", daemon=True).start()
        try:
            while (change := await arrived.get()) is not None:
                yield change
        finally:
            inbox.put(None)

    def drained(self) -> None:
        """This process holds nothing any more that would be lost: its node may be given back now.
        Does nothing when it is to stay.
        """
        reached(FaultPoint.SERVICE_DRAINS)
        self._send({"say": "drained"})

    def worth(self, nodes: Mapping[int, float]) -> None:
        """Say what so many nodes are worth to the service from now on, in samples/s, in place of
        what was said before or submitted; between sizes it is read off linearly.

        Any process may say it; let one do so for all, and only when it has changed. Raises
        ValueError for sizes below 1, values below 0 and more than 64 sizes.
        """
        if not 1 <= len(nodes) <= 64 or any(
            size < 1 or not 0 <= value < math.inf for size, value in nodes.items()
        ):
            raise ValueError(
                "A service says what nodes are worth by 1 to 64 sizes of 1 node or more, each of a "
                f"finite value from 0 on; these are {dict(list(nodes.items())[:5])}."
            )
        self._send({"say": "worth", "nodes": {str(size): value for size, value in nodes.items()}})

    def close(self) -> None:
        """End the iterators. The process stays a member until it ends."""
        self._tell(None)

    # --- inside ---

    def _subscribe(self) -> queue.SimpleQueue[Change | None]:
        inbox: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        with self._lock:
            for change in differences((), self._view):
                inbox.put(change)
            self._listeners.append(inbox)
        return inbox

    def _tell(self, change: Change | None) -> None:
        for inbox in self._listeners:
            inbox.put(change)

    def _send(self, message: dict[str, Any]) -> None:
        if self._connection is not None:
            try:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
            except (
                OSError
            ):  # the launcher is gone, and the kernel is about to end this process with it
                pass

    def _listen(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as lines:
                for line in lines:
                    self._handle(json.loads(line))
        except OSError:  # the launcher is gone, and the kernel is about to end this process with it
            pass
        self._tell(None)

    def _handle(self, message: dict[str, Any]) -> None:
        if "view" in message:
            self._take(int(message["view"]), _members(message["members"]))
        elif "leave" in message:  # no daemon to make a view: the others do not know
            at = time.monotonic() + float(message["leave"])
            self._take(
                self.number, tuple(_leaves(m, at) if m == self._me else m for m in self._view)
            )

    def _take(self, number: int, view: tuple[Member, ...]) -> None:
        with self._lock:
            changes = differences(self._view, view)
            self.number, self._view = number, view
            for change in changes:
                self._tell(change)
        self._first.set()


def _members(listed: list[list[Any]]) -> tuple[Member, ...]:
    now = time.monotonic()
    return tuple(
        Member(
            str(node),
            str(host),
            str(address),
            None if leaves_in_s is None else now + float(leaves_in_s),
            *(None if lasts is None else float(lasts) for lasts in more[:1]),
        )
        for node, host, address, leaves_in_s, *more in listed
    )


def _leaves(member: Member, at: float) -> Member:
    return replace(member, leaves_at=at)


def join(address: str = "") -> Membership:
    """Say that this process serves at ``address`` (any text of at most 1000 characters that the
    others understand) and become a member.

    Call it once, when the process can be reached. Raises MembershipError when the launcher cannot
    be reached or the address is too long.
    """
    if len(address) > 1000:
        raise MembershipError(
            f"The address has {len(address)} characters; 1000 are the most. Say where to ask "
            "for the rest."
        )
    me = Member(os.environ.get(env.NODE, "localhost"), host(), address)
    path = os.environ.get(env.SERVICE)
    if not path:
        return Membership(me, None)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        reached(FaultPoint.SERVICE_JOINS)
        connection.sendall(json.dumps({"say": "join", "address": address}).encode() + b"\n")
        reached(FaultPoint.SERVICE_JOINED)
    except OSError as error:
        connection.close()
        raise MembershipError(
            f"MalleTrain's launcher on this node does not answer at {path}: {error.strerror}."
        ) from None
    return Membership(me, connection)
