"""Encoding of messages on a socket: two frames, the protocol tag ``b"MT1"`` and one msgpack map
whose ``type`` names the message.

Decoding checks size, version, type and every field. An invalid message raises :class:`WireError`,
whose text is sent back to the sender. Only an agent accepts fields that it does not know
(:func:`known_fields`): the daemon may be of a newer version than an agent that has a job (see the
FAQ, "How do I upgrade"). The daemon refuses messages with unknown fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import msgspec.inspect

from malletrain.protocol.messages import AnyMessage, Message, Request

PROTOCOL = b"MT1"
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_REQUEST_BYTES = 512 * 1024
"""Maximum size of a client's request to the daemon. One byte on the wire (an empty list) can become
sixty bytes in memory: decoding 512 KiB of them takes 20 ms.
"""
MAX_LOGIN_BYTES = 16 * 1024
"""Maximum size of a request before the client has logged in."""


class WireError(ValueError):
    """A message that is not of this protocol; the text says why, for the sender."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message, max_bytes: int = MAX_MESSAGE_BYTES) -> list[bytes]:
    """Return the frames of ``message``. Raises WireError if it is larger than ``max_bytes``, or
    holds values that msgpack cannot encode.
    """
    payload = _packed(message, type(message).__name__)
    if len(payload) > max_bytes:
        raise WireError(
            f"A {type(message).__name__} message of {len(payload)} bytes is over the limit of "
            f"{max_bytes}; send less at once."
        )
    return [PROTOCOL, payload]


def request(request_id: str, op: str, params: Mapping[str, Any]) -> Request:
    """Return the request ``request_id`` for ``op``. Raises WireError for parameters that msgpack
    cannot encode.
    """
    return Request(request_id, op, msgspec.Raw(_packed(dict(params), Request.__name__)))


def _packed(data: Any, what: str) -> bytes:
    try:
        return _encoder.encode(data)
    except UnicodeEncodeError as e:
        shown = e.object.encode("utf-8", "backslashreplace").decode()
        raise WireError(
            f"'{shown[:200]}' is not UTF-8 text. Rename it, or set a UTF-8 locale, such as "
            "LC_ALL=C.UTF-8."
        ) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise WireError(f"A {what} message cannot be encoded in msgpack: {e}.") from None


def decode(
    frames: Sequence[bytes],
    frame_count: int | None = None,
    max_bytes: int = MAX_MESSAGE_BYTES,
    newer: bool = False,
) -> Any:
    """Return the message in ``frames`` (identity frames removed).

    Args:
        frames: the received frames, or the first of them.
        frame_count: number of frames received, if not all were kept.
        max_bytes: maximum size of the message.
        newer: whether the sender may be of a newer version: fields that this version does not know
            are left out.

    Raises:
        WireError: the message is invalid; the text is for the sender.
    """
    frame_count = len(frames) if frame_count is None else frame_count
    if frame_count != 2:
        raise WireError(f"A message has 2 frames (protocol tag, body); this one has {frame_count}.")
    tag, payload = frames
    if tag != PROTOCOL:
        shown = tag[:16].decode("ascii", "replace")
        raise WireError(
            f"Protocol tag '{shown}' is not '{PROTOCOL.decode()}'; use the malletrain version "
            "that the daemon runs."
        )
    if len(payload) > max_bytes:
        raise WireError(
            f"The message has {len(payload)} bytes; the limit is {max_bytes}. Send less at once."
        )
    try:
        try:
            return _decoder.decode(payload)
        except msgspec.ValidationError:
            if not newer:
                raise
            data = known_fields(msgspec.msgpack.decode(payload), _message_types())
            return _decoder.decode(_encoder.encode(data))
    except msgspec.ValidationError as e:
        raise WireError(f"The message does not fit the protocol: {_short(e)}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise WireError(f"The message body is not valid msgpack: {_short(e)}.") from None


@lru_cache(maxsize=1)
def _message_types() -> msgspec.inspect.Type:
    return msgspec.inspect.type_info(AnyMessage)


def known_fields(data: Any, kind: msgspec.inspect.Type) -> Any:
    """Return ``data`` without the fields of structs that ``kind`` does not have. Fixed-length
    tuples, keys and types with metadata are not searched: no message has a struct in one.

    Args:
        data: a message, or a part of one, as msgpack decodes it without a type.
        kind: its type. Where ``data`` does not have this type, it is returned unchanged.
    """
    if isinstance(kind, msgspec.inspect.UnionType):
        kind = _of_union(data, kind)
    if isinstance(kind, msgspec.inspect.StructType) and isinstance(data, dict):
        types = {field.encode_name: field.type for field in kind.fields}
        return {
            name: known_fields(value, types[name]) if name in types else value
            for name, value in data.items()
            if name in types or name == kind.tag_field
        }
    if isinstance(kind, msgspec.inspect.StructType) and isinstance(data, list):
        fields = zip(data, kind.fields, strict=False)  # array_like: fields are in order
        return [known_fields(value, field.type) for value, field in fields]
    if isinstance(kind, msgspec.inspect.DictType) and isinstance(data, dict):
        return {name: known_fields(value, kind.value_type) for name, value in data.items()}
    if isinstance(kind, msgspec.inspect.ListType | msgspec.inspect.VarTupleType) and isinstance(
        data, list
    ):
        return [known_fields(value, kind.item_type) for value in data]
    return data


def _of_union(data: Any, union: msgspec.inspect.UnionType) -> msgspec.inspect.Type:
    """Return the member of a union to which ``data`` belongs; the union itself if it belongs to
    none that has fields.
    """
    for kind in union.types:
        if isinstance(kind, msgspec.inspect.StructType) and kind.tag is not None:
            fits = isinstance(data, dict) and data.get(kind.tag_field or "") == kind.tag
        elif isinstance(kind, msgspec.inspect.StructType):
            fits = isinstance(data, list if kind.array_like else dict)
        elif isinstance(kind, msgspec.inspect.DictType):
            fits = isinstance(data, dict)
        else:
            fits = isinstance(
                kind, msgspec.inspect.ListType | msgspec.inspect.VarTupleType
            ) and isinstance(data, list)
        if fits:
            return kind
    return union


def _short(error: Exception) -> str:
    """Return the text of an error, shortened because it may quote a long message."""
    return str(error) if len(str(error)) <= 300 else f"{str(error)[:299]}…"
