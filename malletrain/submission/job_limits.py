"""Parsers of a job's ``--time-limit`` and ``--notify``. Pure."""

from __future__ import annotations

import re

from malletrain.config.units import UnitError, parse_duration
from malletrain.protocol.messages import Notification
from malletrain.submission.error import SpecError

NOTIFY_EVENTS = ("start", "end", "failure", "at-risk")
NOTIFY_HELP = (
    "a mail address, an address such as https://example.org/hook, or command:CMD, with "
    "start,end,failure,at-risk or some of these and = before it"
)
MAX_TIME_LIMIT_S = 366 * 86400.0
_MAIL = re.compile(r"[A-Za-z0-9._%+'-]+@[A-Za-z0-9.-]+")
_EVENT = f"(?:{'|'.join(NOTIFY_EVENTS)})"
_ON = re.compile(rf"({_EVENT}(?:,{_EVENT})*)=(.*)", re.DOTALL)


def time_limit_of(text: str | None) -> float:
    """Returns the seconds of ``--time-limit``; 0 if there is no limit.

    Raises:
        SpecError: the text is not a valid duration.
    """
    if text is None:
        return 0.0
    try:
        seconds = parse_duration(text)
    except UnitError as error:
        raise SpecError(f"--time-limit: {error}") from None
    if not 0 < seconds <= MAX_TIME_LIMIT_S:
        raise SpecError('--time-limit is a time above 0, a year at most, such as "90 min".')
    return seconds


def notification(text: str) -> Notification:
    """Returns the notification of one ``--notify``.

    Raises:
        SpecError: the text names neither an address nor a command.
    """
    match = _ON.fullmatch(text)
    on, to = (tuple(match[1].split(",")), match[2]) if match else (NOTIFY_EVENTS, text)
    if to.startswith("command:") and to.removeprefix("command:").strip():
        return Notification(to.removeprefix("command:").strip(), "command", on)
    if re.fullmatch(r"https?://[!-~]+", to):
        return Notification(to, "webhook", on)
    if _MAIL.fullmatch(to):
        return Notification(to, "mail", on)
    raise SpecError(f'--notify: "{text}" is nobody who could be told; accepted is {NOTIFY_HELP}.')
