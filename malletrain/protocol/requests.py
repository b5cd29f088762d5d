"""What a client asks the daemon, and the answer."""

from __future__ import annotations

from typing import Any

import msgspec

from malletrain.protocol.bounds import Id
from malletrain.protocol.message import Message


class Request(Message, frozen=True):
    """A client's call: ``op`` with ``params``; answered by Reply with the same ``id``. Made by
    :func:`malletrain.protocol.wire.request`.
    """

    id: Id
    op: Id
    params: msgspec.Raw = msgspec.Raw(b"\x80")
    """Still in msgpack: requests wait for their turn, and what is small there may be sixty times as
    large here.
    """

    def parameters(self) -> dict[str, Any]:
        """The parameters by their names. Raises ValueError for what is none."""
        try:
            return _parameters.decode(self.params)
        except RecursionError as error:
            raise ValueError(str(error)) from None


_parameters = msgspec.msgpack.Decoder(dict[str, Any])


class Reply(Message, frozen=True):
    """Answer to Request: ``data`` when ok, else ``error`` (a sentence) and ``code`` (``refused`` |
    ``usage`` | ``internal`` | ``unauthenticated``: say who you are first; ``data`` then tells
    whether ``login`` with a credential of MUNGE will do).
    """

    id: str
    ok: bool
    data: Any = None
    error: str = ""
    code: str = ""
