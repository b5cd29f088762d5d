"""Decodes JSON as PBS prints it, which is not always valid.

``pbsnodes`` and ``qstat -F json`` print one key per line. Depending on the version, they do not
escape quotes in strings, use escapes that JSON does not have (``\'``), and print each string that
strtod(3) accepts as a number: ``005``, ``.5``, ``inf``, ``0x1f`` (openpbs issues 1255 and 2541,
pull requests 830, 2049 and 2603). One user's environment variable is enough. So text that cannot be
decoded is repaired line by line and decoded again. Text in, plain values out. It decides nothing.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from scavenger.batch.commands import shorten
from scavenger.interface import SchedulerError

T = TypeVar("T")

_STRING = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
_NUMBER = r"-?(?:0|[1-9]\d{0,14})(?:\.\d{1,15})?(?:[eE][-+]?\d{1,2})?"
_VALUE = (
    rf"(?:{_STRING}|{_NUMBER}|true|false|null|\{{\s*\}}?|\[(?:\s*(?:{_STRING}|{_NUMBER})\s*,?)*\]?)"
)
_BAD_LINE = re.compile(
    rf'^([ \t]*"[^"\n]*"[ \t]*:)(?![ \t]*{_VALUE},?[ \t]*$)[ \t]*(.*)$', re.MULTILINE
)
_BROKEN_LINE = re.compile(r'\n(?![ \t]*(?:"[^"\n]*"[ \t]*[:,\]]|"[^"\n]*"[ \t]*$|[{}\[\]]|$))')
"""A line break inside a string: the next line does not have the form of this format."""
_POSITION = re.compile(r"\(byte (\d+)\)")
MAX_SINGLE_REPAIRS = 10
"""Maximum number of lines that are repaired one by one, which is fast. If there are more, the whole
text is repaired.
"""
_INSIDE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})|\\|"|[\x00-\x1f]')


def decode(text: str, kind: type[T], command: str) -> T:
    """Decode ``text`` as msgspec's type ``kind``. Raises SchedulerError that names ``command`` if
    it has another form.

    Args:
        text: the output of a command.
        kind: type of the result.
        command: name of the command, for the error message.
    """
    data = text.encode("utf-8", "surrogateescape")
    for _ in range(MAX_SINGLE_REPAIRS):
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            mended = _mend_at(data, str(error))
        if mended is None:
            break
        data = mended
    try:
        return msgspec.json.decode(repair(text).encode("utf-8", "replace"), type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        detail = f" ({shorten(str(error), 100)})" if text.strip() else ""
        raise SchedulerError(
            f'The answer of {command} cannot be understood: "{shorten(text, 120)}"{detail}. '
            "Nothing was changed."
        ) from None


def decode_joined(text: str, kind: type[T], command: str) -> T:
    """Like :func:`decode`, but joins strings under equal keys of one object by commas. PBS prints
    an attribute with several limits as one key per limit.
    """
    for each in (text, repair(text)):
        try:
            value = json.loads(each, object_pairs_hook=_joined, strict=False)
        except (ValueError, RecursionError):
            continue
        return decode(json.dumps(value), kind, command)
    return decode(text, kind, command)  # raises the error that says what is wrong


def _joined(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for key, value in pairs:
        before = joined.get(key)
        if isinstance(before, str) and isinstance(value, str):
            value = f"{before},{value}"
        elif isinstance(before, dict) and isinstance(value, dict):
            value = _joined([*before.items(), *value.items()])
        joined[key] = value
    return joined


def _mend_at(data: bytes, complaint: str) -> bytes | None:
    """Return ``data`` with the line repaired at which the decoder failed; None if that is not
    possible.
    """
    where = _POSITION.search(complaint)
    if where is None:
        return None
    begin = data.rfind(b"\n", 0, int(where[1])) + 1
    end = data.find(b"\n", int(where[1]))
    end = len(data) if end < 0 else end
    line = data[begin:end].decode("utf-8", "replace")
    mended = _BAD_LINE.sub(_mend, line)
    return None if mended == line else data[:begin] + mended.encode("utf-8", "replace") + data[end:]


def repair(text: str) -> str:
    """Return ``text`` with each line made valid JSON that has one key and an invalid value."""
    whole = _BROKEN_LINE.sub("\\\\n", text.replace("\r\n", "\n"))
    return _BAD_LINE.sub(_mend, whole)


def _mend(line: re.Match[str]) -> str:
    value = line[2].rstrip(" \t")
    comma = ""
    if value.endswith(","):
        value, comma = value[:-1].rstrip(" \t"), ","
    if len(value) >= 2 and value[0] == value[-1] == '"':
        return f'{line[1]}"{_INSIDE.sub(_escape, value[1:-1])}"{comma}'
    return line[1] + json.dumps(value) + comma


def _escape(match: re.Match[str]) -> str:
    return match[0] if match[1] else json.dumps(match[0])[1:-1]


def text_of(value: Any) -> str:
    """Return a value as the string that it was in PBS, which prints a job name ``42`` as a
    number.
    """
    if isinstance(value, str):
        return value
    try:
        return "" if value is None else str(value)
    except ValueError:  # a number with thousands of digits
        return ""


def words_of(value: Any) -> tuple[str, ...]:
    """Return the items of a list, which can have the form of a list, ``a, b`` or a single word."""
    if isinstance(value, list):
        return tuple(text_of(item) for item in value)
    return tuple(word for part in text_of(value).split(",") if (word := part.strip()))


def number_of(value: Any, otherwise: float = 0.0) -> float:
    """Return a number, which can have the form of a string."""
    if isinstance(value, (int, float)):
        try:
            return float(value) if math.isfinite(value) else otherwise
        except OverflowError:
            return otherwise
    match = re.match(r"-?\d+(?:\.\d+)?", text_of(value))
    return float(match[0]) if match and len(match[0]) < 300 else otherwise


def truth_of(value: Any, otherwise: bool) -> bool:
    """Return a boolean, which can have the form of a string; ``otherwise`` if there is none."""
    if isinstance(value, bool):
        return value
    return otherwise if value is None else text_of(value).lower() in ("true", "t", "yes", "y", "1")
