"""Shortens the ends of logs and of test runs for readers who see only the last page. Also a plugin
of pytest.

Decides which lines are left out (the frames of native stacks, of which torch prints dozens), and
what the one line of a failed test says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

_FRAME = re.compile(r"^.*\bframe #\d+: .*(\n|\Z)", re.MULTILINE)
LONGEST = 300
"""Maximum length of the line of a failed test, characters."""


def without_frames(text: str) -> str:
    """Return the text without the frames of native stacks."""
    return _FRAME.sub("", text)


def tail(path: Path, lines: int = 40) -> str:
    """Return the last lines of a log; "(no log)" if there is none."""
    if not path.exists():
        return "(no log)"
    return "\n".join(without_frames(path.read_text(errors="replace")).splitlines()[-lines:])


def _worst(text: str) -> str:
    """Return the lines that pytest has marked as the error; all lines if none is marked."""
    marked = [line[1:] for line in text.splitlines() if line.startswith("E ")]
    return marked[-1] if marked else text


def in_a_line(report: Any) -> str:
    """Return the line of a failed test: its name, the stage if it did not fail in its call, and the
    first error.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else _worst(str(report.longrepr or ""))
    first = next((line.strip() for line in message.splitlines() if line.strip()), "no message")
    when = getattr(report, "when", None)
    place = report.nodeid if when in ("call", None) else f"{report.nodeid} ({when})"
    return f"{place}: {first}"[:LONGEST]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    report.sections = [(name, without_frames(text)) for name, text in report.sections]
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """Print one line for each failed test at the very end of the output."""
    yield
    failed = [r for what in ("failed", "error") for r in terminalreporter.stats.get(what, ())]
    if failed:
        terminalreporter.section("what failed, and why")
        for report in failed:
            terminalreporter.write_line(in_a_line(report))
