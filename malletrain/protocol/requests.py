"""Requests of clients to the daemon, and the answers."""

from __future__ import annotations

from typing import Any

import msgspec

from malletrain.protocol.bounds import Id
from malletrain.protocol.message import Message


class Request(Message, frozen=True):
    """A client's call: ``op`` with ``params``; answered by Reply with the same ``id``. Created by
    :func:`malletrain.protocol.wire.request`.
    """

    id: Id
    op: Id
    params: msgspec.Raw = msgspec.Raw(b"\x80")
    """Parameters, still encoded as msgpack: requests wait in a queue, and decoded parameters can be
    sixty times as large.
    """

    def parameters(self) -> dict[str, Any]:
        """Returns the decoded parameters by name. Raises ValueError if they are not a map."""
        try:
            return _parameters.decode(self.params)
        except RecursionError as error:
            raise ValueError(str(error)) from None


_parameters = msgspec.msgpack.Decoder(dict[str, Any])


class Reply(Message, frozen=True):
    """Answer to Request: ``data`` when ok, else ``error`` (a sentence) and ``code`` (``refused`` |
    ``usage`` | ``internal`` | ``unauthenticated``: log in first; ``data`` then says whether a
    ``login`` with a MUNGE credential is accepted).
    """

    id: str
    ok: bool
    data: Any = None
    error: str = ""
    code: str = ""
