"""Closes the sockets of a ZeroMQ context, and the context, also if their owner forgets to.

A context refers to its sockets weakly, and waits for ever for the open ones when it ends. If the
garbage collector finds both together, the process hangs: in a reference cycle, such as an exception
kept by a frame of its traceback. So whoever has a context of its own notes its sockets here.
"""

from __future__ import annotations

import weakref
from typing import Any

import zmq


class OpenSockets:
    """The open sockets of an object that has a context of its own. They are closed with their
    context by :meth:`close`, or when the object is garbage.

    Args:
        owner: the object. While a thread of it runs it is no garbage.
        context: the context of its sockets.
    """

    def __init__(self, owner: object, context: zmq.Context[Any]) -> None:
        self._sockets: list[zmq.Socket[Any]] = []
        # It refers to the sockets, so that they are no garbage before it has closed them.
        self._finalizer = weakref.finalize(owner, _end, context, self._sockets)
        self._finalizer.atexit = False

    def add(self, socket: zmq.Socket[Any]) -> None:
        """Note a socket that is open from now on."""
        self._sockets.append(socket)

    def disconnect(self) -> None:
        """Close the sockets. The context can open others."""
        _close(self._sockets)

    def close(self) -> None:
        """Close the sockets and their context, once."""
        self._finalizer()


def _close(sockets: list[zmq.Socket[Any]]) -> None:
    while sockets:
        socket = sockets.pop(0)  # each before its monitor
        socket.disable_monitor()
        socket.close(linger=0)


def _end(context: zmq.Context[Any], sockets: list[zmq.Socket[Any]]) -> None:
    _close(sockets)
    context.destroy(linger=0)
