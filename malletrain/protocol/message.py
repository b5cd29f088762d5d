"""The base class of all messages. The messages are in :mod:`malletrain.protocol.messages`."""

from __future__ import annotations

import msgspec


class Message(
    msgspec.Struct,
    frozen=True,
    tag_field="type",
    tag=str.lower,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Base of all messages; the tag is the class name in lower case."""
