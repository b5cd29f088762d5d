"""Membership of a service: the library that a service's process uses. Standard library only.

::

    from malletrain import membership

    # Bind the port before you join: the others can connect as soon as you have joined.
    group = membership.join(address=f"{membership.host()}:{port}")
    group.members                          # the present members
    for change in group.changes():         # or: async for change in group.watch()
        if change.kind == "leaving" and change.member == group.me:
            hand_over(change.member.seconds_left)
            group.report_drained()                # the node may be given back

Decides nothing: the daemon decides who is a member. Every iterator yields all changes, in order.
One new view can bring several changes. Outside MalleTrain a process is the only member of its
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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from malletrain.protocol import env
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.gpus import count_gpus

Listener = Callable[["Change | None"], object]
"""Receives every change, and None at the end."""

JOINED, READY, LEAVING, STAYING, LEFT = "joined", "ready", "leaving", "staying", "left"


MAX_EXPIRES_S = 366 * 86400.0
"""Maximum time after which values lapse, seconds."""


class MembershipError(RuntimeError):
    """This process cannot take part; the message says why."""


@dataclass(frozen=True)
class Member:
    """One process of the service. ``node`` identifies it among the members of a view; ``address``
    is the address that it passed to :func:`join`.

    ``leaves_at``: ``time.monotonic()`` on this machine by which it leaves, None if no end is known.
    """

    node: str
    host: str
    address: str
    leaves_at: float | None = field(default=None, compare=False)
    expected_remaining_s: float | None = field(default=None, compare=False)
    """Expected remaining time of its node when the newest view was made, seconds; None if the site
    has no forecast.
    """
    loading: bool = field(default=False, compare=False)
    """Whether it has joined and is not ready to serve yet."""

    @property
    def leaving(self) -> bool:
        """Whether the member is known to leave."""
        return self.leaves_at is not None

    @property
    def seconds_left(self) -> float:
        """Seconds until the member leaves, infinite if no end is known."""
        return (
            float("inf") if self.leaves_at is None else max(0.0, self.leaves_at - time.monotonic())
        )


@dataclass(frozen=True)
class Change:
    """One change of the membership. ``kind``: ``joined``; ``ready`` (a member that was loading);
    ``leaving`` (with notice: ``member.seconds_left``); ``staying`` (the notice was withdrawn);
    ``left``.
    """

    kind: str
    member: Member


def host() -> str:
    """Return the name or address under which the other members reach this node."""
    return os.environ.get(env.HOST, "127.0.0.1")


def gpu_count() -> int:
    """Return the number of GPUs that this process may use: those of the lease, which may be some
    of the host's.
    """
    return count_gpus()


def job_key() -> bytes:
    """Return the secret that all processes of this job share, 32 bytes, to authenticate
    connections. Empty outside MalleTrain.
    """
    return bytes.fromhex(os.environ.get(env.JOB_KEY, ""))


def differences(old: tuple[Member, ...], new: tuple[Member, ...]) -> list[Change]:
    """Return the changes between two views, members that left first. A process that restarted at
    another address counts as one that left and one that joined.
    """
    before, after = {(m.node, m.address): m for m in old}, {(m.node, m.address): m for m in new}
    changes = [Change(LEFT, m) for k, m in before.items() if k not in after]
    for k, m in after.items():
        previous = before.get(k)
        if previous is None:
            changes.append(Change(JOINED, m))
        elif previous.loading and not m.loading:
            changes.append(Change(READY, m))
        if m.leaving and (previous is None or not previous.leaving):
            changes.append(Change(LEAVING, m))
        elif previous is not None and previous.leaving and not m.leaving:
            changes.append(Change(STAYING, m))
    return changes


class Membership:
    """This process's membership in the service. Created by :func:`join`; its methods may be called
    from any thread.
    """

    def __init__(self, me: Member, connection: socket.socket | None) -> None:
        self._me = me
        self._view: tuple[Member, ...] = (me,)
        self.view_number = 0
        """The number of the newest view; increases."""
        # Both locks are reentrant, because a signal handler or the end of an iterator by garbage
        # collection can interrupt the thread that holds one.
        self._lock = threading.RLock()
        self._send_lock = threading.RLock()
        self._listeners: list[Listener] = []
        self._is_closed = False
        """Whether the iterators have ended; new ones end at once."""
        self._connection = connection
        self._has_view = connection is None
        self._changed = threading.Condition(self._lock)
        """Notified of every change and of the end."""
        self._notices = 0
        """Number of notices to leave without a view, from the launcher."""
        self._first_view_or_end = threading.Event()
        if connection is None:
            self._first_view_or_end.set()
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
        """Wait for the first view. Return whether it has arrived; False also if the launcher ends
        before.
        """
        self._first_view_or_end.wait(timeout_s)
        return self._has_view

    def wait_for_change(self, since: int, timeout_s: float | None = None) -> int:
        """Wait until there is a newer view than the one with number ``since``: a member joins,
        becomes ready, gets notice to leave or leaves. Return at once if there is one, and at the
        end of the launcher or of the iterators.

        Args:
            since: number of a view, such as the last result of this method.
            timeout_s: maximum time to wait, seconds; None: no limit.

        Returns:
            The number of the newest view.
        """
        with self._changed:
            notices = self._notices
            self._changed.wait_for(
                lambda: self.view_number > since or self._notices > notices or self._is_closed,
                timeout_s,
            )
            return self.view_number

    def changes(self) -> Iterator[Change]:
        """Yield the present members as ``joined``, then every change. Ends when the launcher ends
        or :meth:`close` is called; after that it yields the present members only.
        """
        inbox: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._subscribe(inbox.put)
        try:
            while (change := inbox.get()) is not None:
                yield change
        finally:
            self._unsubscribe(inbox.put)

    async def watch(self) -> AsyncIterator[Change]:
        """Same as :meth:`changes`, for asyncio."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Change | None] = asyncio.Queue()

        def put(change: Change | None) -> None:
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, change)
            except RuntimeError:  # the loop is closed
                self._unsubscribe(put)

        self._subscribe(put)
        try:
            while (change := await arrived.get()) is not None:
                yield change
        finally:
            self._unsubscribe(put)

    def report_ready(self) -> None:
        """Report that this process can serve now, if it joined with ``ready=False``: the other
        members get ``ready``. The time since the start of the process is the start cost that
        ``malletrain submit --start-cost auto`` measures. No effect if it is ready already.
        """
        self._send({"say": "ready"})
        if self._connection is None:
            self._set_view(self.view_number, tuple(replace(m, loading=False) for m in self._view))

    def report_drained(self) -> None:
        """Report that this process holds no state that would be lost, so that its node can be given
        back now. No effect if the process is to stay.
        """
        reached(FaultPoint.SERVICE_DRAINS)
        self._send({"say": "drained"})

    def set_values(
        self, value_by_nodes: Mapping[int, float], *, expires_s: float | None = None
    ) -> None:
        """Set what each number of nodes is worth to the service, as a throughput in samples/s. It
        replaces the values submitted or set before. Values between the given sizes are interpolated
        linearly. If all are 0 the service gives all its nodes back.

        Any process may call this; let one do so for all, and only when the values have changed.

        Args:
            value_by_nodes: number of nodes → value.
            expires_s: time after which the values lapse unless they are set again, seconds; then
                the last values without such a limit apply. None: they do not lapse.

        Raises:
            ValueError: no sizes or more than 64, a size below 1, a value that is below 0 or not
                finite, or a time that is not above 0.
        """
        if not 1 <= len(value_by_nodes) <= 64 or any(
            size < 1 or not 0 <= value < math.inf for size, value in value_by_nodes.items()
        ):
            raise ValueError(
                "set_values() takes 1 to 64 sizes of 1 node or more, each with a finite value of 0 "
                f"or more; got {dict(list(value_by_nodes.items())[:5])}."
            )
        if expires_s is not None and not 0 < expires_s <= MAX_EXPIRES_S:
            raise ValueError(
                f"Values expire after a time above 0, a year at most; got {expires_s} s."
            )
        nodes = {str(size): value for size, value in value_by_nodes.items()}
        message: dict[str, Any] = {"say": "worth", "nodes": nodes}
        if expires_s is not None:
            message["expires_s"] = expires_s
        self._send(message)

    def close(self) -> None:
        """End the iterators. The process stays a member until it ends."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
            self._notify_listeners(None)
            self._listeners.clear()

    # --- inside ---

    def _subscribe(self, listener: Listener) -> None:
        with self._lock:
            for change in differences((), self._view):
                listener(change)
            if self._is_closed:
                listener(None)
            else:
                self._listeners.append(listener)

    def _unsubscribe(self, listener: Listener) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def _notify_listeners(self, change: Change | None) -> None:
        for listener in tuple(self._listeners):
            listener(change)

    def _send(self, message: dict[str, Any]) -> None:
        if self._connection is None:
            return
        try:
            with self._send_lock:  # a long message may be sent in several parts
                self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            # The launcher has exited; the kernel ends this process, too (PR_SET_PDEATHSIG).
            pass

    def _listen(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as lines:
                for line in lines:
                    self._handle(json.loads(line))
        except OSError:
            # The launcher has exited; the kernel ends this process, too (PR_SET_PDEATHSIG).
            pass
        finally:
            self._first_view_or_end.set()
            self.close()

    def _handle(self, message: dict[str, Any]) -> None:
        if "view" in message:
            self._set_view(int(message["view"]), _members(message["members"]))
        elif "leave" in message:
            # Sent by the launcher when it has no daemon. Only this process learns that it leaves.
            at = time.monotonic() + float(message["leave"])
            self._notices += 1
            self._set_view(
                self.view_number,
                tuple(_with_end(m, at) if m == self._me else m for m in self._view),
            )

    def _set_view(self, number: int, view: tuple[Member, ...]) -> None:
        with self._lock:
            changes = differences(self._view, view)
            self.view_number, self._view = number, view
            self._changed.notify_all()
            for change in changes:
                self._notify_listeners(change)
        self._has_view = True
        self._first_view_or_end.set()


def _members(rows: list[list[Any]]) -> tuple[Member, ...]:
    now = time.monotonic()
    return tuple(
        Member(
            str(node),
            str(host),
            str(address),
            None if leaves_in_s is None else now + float(leaves_in_s),
            # absent in the views of older launchers
            float(optional[0]) if optional and optional[0] is not None else None,
            bool(optional[1]) if len(optional) > 1 else False,
        )
        for node, host, address, leaves_in_s, *optional in rows
    )


def _with_end(member: Member, at: float) -> Member:
    return replace(member, leaves_at=at)


def join(address: str = "", *, ready: bool = True) -> Membership:
    """Become a member.

    Call it once, when the process can be reached.

    Args:
        address: address at which it serves; any text of at most 1000 characters that the others
            understand.
        ready: whether it can serve already. If not, call :meth:`Membership.report_ready` later.

    Raises:
        MembershipError: the launcher cannot be reached, or the address is too long.
    """
    if len(address) > 1000:
        raise MembershipError(
            f"The address has {len(address)} characters; the maximum is 1000. Pass an endpoint at "
            "which the other members can request the rest."
        )
    me = Member(os.environ.get(env.NODE, "localhost"), host(), address, loading=not ready)
    path = os.environ.get(env.SERVICE)
    if not path:
        return Membership(me, None)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        reached(FaultPoint.SERVICE_JOINS)
        hello: dict[str, Any] = {"say": "join", "address": address}
        if not ready:
            hello["loading"] = True
        connection.sendall(json.dumps(hello).encode() + b"\n")
        reached(FaultPoint.SERVICE_JOINED)
    except OSError as error:
        connection.close()
        raise MembershipError(
            f"MalleTrain's launcher on this node does not answer at {path}: {error.strerror}."
        ) from None
    return Membership(me, connection)
