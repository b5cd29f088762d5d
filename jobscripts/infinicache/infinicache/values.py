"""Decides which keys and values a cache takes, and which bytes of a value it stores."""

from __future__ import annotations

import re

from infinicache.isal import Buffer

_PICKLE = "cache.put(key, pickle.dumps(value)), and pickle.loads of what get returns"


def as_bytes(value: Buffer) -> memoryview:
    """Return the bytes of ``value``, which has the buffer protocol, such as bytes or a NumPy array.
    The bytes are copied only if they are not in the order of C. An array of Python objects is
    refused, because its memory is a list of addresses; a masked array, if anything in it is masked.

    Raises:
        TypeError: ``value`` has no bytes of its own.
    """
    name = type(value).__name__
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError) as error:
        if isinstance(value, str):
            advice = "encode it: value.encode()"
        elif hasattr(value, "detach") and hasattr(value, "numpy"):
            advice = "give cache.put(key, value.detach().cpu().numpy())"
        elif hasattr(value, "__array_interface__"):
            advice = f"its type {getattr(value, 'dtype', '')} has none; give value.view('i8')"
        else:
            advice = f"pickle it: {_PICKLE}"
        raise TypeError(
            f"A {name} has no bytes that could be stored ({error}); {advice}."
        ) from None
    if hasattr(value, "filled") and hasattr(value, "mask") and b"\1" in value.mask.tobytes():
        raise TypeError(
            f"The mask of this {name} would be lost; give cache.put(key, value.filled()), or "
            f"pickle it: {_PICKLE}."
        )
    if "O" in re.sub(":[^:]*:", "", view.format):  # without the names of fields
        raise TypeError(
            f"This {name} holds Python objects, so that its memory is a list of addresses. Pickle "
            f"it: {_PICKLE}."
        )
    if not view.nbytes:
        return memoryview(b"")
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def checked_key(key: str) -> str:
    """Return ``key`` if it is valid.

    Raises:
        TypeError: it is no text.
        ValueError: it cannot be encoded.
    """
    if not isinstance(key, str):
        raise TypeError(
            f"A key is text, and {key!r:.80} is of type {type(key).__name__}; give "
            f"{'key.decode()' if isinstance(key, bytes) else 'str(key)'}."
        )
    try:
        key.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"The key {key!r:.80} has half of a character (a surrogate) in it, as file names that "
            "are not UTF-8 have; use another."
        ) from None
    return key
