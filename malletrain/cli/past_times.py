"""Parses a time on the command line: a duration before now, or a date."""

from __future__ import annotations

import datetime
import time

import click

FORMS = ("%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S")


def past_time(text: str) -> float:
    """Return the seconds since the epoch of ``"2 d"`` (ago), ``2026-01-31`` or
    ``2026-01-31T08:00``, local time.

    Raises:
        click.BadParameter: the text is neither.
    """
    from malletrain.config.units import UnitError, parse_duration

    for form in FORMS:
        try:
            return datetime.datetime.strptime(text.strip(), form).astimezone().timestamp()
        except ValueError:
            continue
    try:
        return time.time() - parse_duration(text)
    except UnitError:
        raise click.BadParameter(
            f'\'{text}\' is no time; write how long ago it was, such as "2 d" or "90 min", or a '
            "date, such as 2026-01-31 or 2026-01-31T08:00."
        ) from None
