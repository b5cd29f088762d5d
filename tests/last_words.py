"""The ends of logs and of runs, for a reader who sees only the last page of an output.

A plugin of pytest, too. Decides which lines say nothing (the frames of native stacks, of which
torch prints dozens), and what one line of a failed test is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

_FRAME = re.compile(r"^.*\bframe #\d+: .*(\n|\Z)", re.MULTILINE)
LONGEST = 300
"""Characters of the line of a failed test."""


def without_frames(text: str) -> str:
    """The text without the lines that are frames of native stacks."""
    return _FRAME.sub("", text)


def tail(path: Path, lines: int = 40) -> str:
    """The last lines of a log, "(no log)" where there is none."""
    if not path.exists():
        return "(no log)"
    return "\n".join(without_frames(path.read_text(errors="replace")).splitlines()[-lines:])


def _worst(text: str) -> str:
    """What pytest has marked as the error; all where nothing is."""
    marked = [line[1:] for line in text.splitlines() if line.startswith("E ")]
    return marked[-1] if marked else text


def in_a_line(report: Any) -> str:
    """A failed test: its name, when it failed if not in its call, and what was wrong first."""
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
    """Say at the very end, after all that was printed, what failed: a line for each."""
    yield
    failed = [r for what in ("failed", "error") for r in terminalreporter.stats.get(what, ())]
    if failed:
        terminalreporter.section("what failed, and why")
        for report in failed:
            terminalreporter.write_line(in_a_line(report))
