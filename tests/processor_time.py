"""Lists the tests with the most processor time, including that of the processes that they start and
wait for. A plugin of pytest.

On two cores the duration of a test depends on what else runs; its processor time does not, so this
list shows which tests to shorten. Processes that outlive their parent are not counted: those of a
Slurm's jobs, and those of the fork server (tests.forked). The machine's own count has them, and
whatever else ran meanwhile.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

KEY = "processor_s"
ROWS = 25
"""Number of tests, and of folders, in the lists at the end of a run."""

_began: dict[str, float] = {}
_machine_began_s = 0.0
"""What :func:`machine_s` was when the run began, seconds."""


def used_s() -> float:
    """Return the processor time of this process and of its children that have ended, seconds."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def machine_s() -> float:
    """Return the processor time of all processes of this machine since it started, seconds."""
    first = Path("/proc/stat").read_text().partition("\n")[0]  # proc_stat(5)
    user, nice, system, _idle, _iowait, irq, softirq = map(int, first.split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def pytest_sessionstart() -> None:
    global _machine_began_s
    _machine_began_s = machine_s()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    _began.setdefault(nodeid, used_s())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = yield
    if call.when == "teardown" and item.nodeid in _began:
        report.user_properties.append((KEY, used_s() - _began.pop(item.nodeid)))
    return report


def by_folder(seconds: dict[str, float]) -> Counter[str]:
    """Return the processor time by folder of the tests.

    Args:
        seconds: processor time by the id of a test.
    """
    folders: Counter[str] = Counter()
    for nodeid, used in seconds.items():
        folders[str(Path(nodeid.partition("::")[0]).parent)] += used
    return folders


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [r for of_kind in terminalreporter.stats.values() for r in of_kind]
    seconds = {
        report.nodeid: dict(report.user_properties)[KEY]
        for report in reports
        if getattr(report, "when", "") == "teardown" and KEY in dict(report.user_properties)
    }
    if not terminalreporter.config.getoption("durations") or not seconds:
        return
    whole = f"{machine_s() - _machine_began_s:.0f} s of the machine"
    terminalreporter.section(f"processor time: {sum(seconds.values()):.0f} s, {whole}")
    for table in (Counter(seconds), by_folder(seconds)):
        for name, used in table.most_common(ROWS):
            terminalreporter.write_line(f"{used:8.1f} s  {name}")
        terminalreporter.write_line("")
