"""What a client asks the daemon, and the answer."""

from __future__ import annotations

from typing import Any

import msgspec

from malletrain.protocol.bounds import Id
from malletrain.protocol.message import Message


class Request(Message, frozen=True):
    """A client's call: ``op`` with ``params``; answered by Reply with the same ``id``."""

    id: Id
    op: Id
    params: dict[str, Any] = msgspec.field(default_factory=dict)


class Reply(Message, frozen=True):
    """Answer to Request: ``data`` when ok, else ``error`` (a sentence) and ``code`` (``refused`` |
    ``usage`` | ``internal`` | ``stranger``: say who you are first; ``data`` then tells whether
    ``login`` with a credential of MUNGE will do).
    """

    id: str
    ok: bool
    data: Any = None
    error: str = ""
    code: str = ""
