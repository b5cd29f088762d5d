"""``python -m tests.everything``: runs everything that can be checked on this machine, one part
after another.

``make test-all`` runs it. It takes hours: the suite with the tests marked ``thorough``, ``sites``
and ``vllm``, an upgrade from an older commit, random days of a simulated site, every boundary of
the zoo's scripts, random faults, the torch matrix. At the end it prints a table with a row for each
part, and the reasons of skipped tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
WORKERS = 4 * (os.cpu_count() or 1)
"""Number of workers, as in ``make test``."""
PYTEST = ("pytest", "-q")
SPREAD = ("-n", str(WORKERS), "--dist", "worksteal")

TOGETHER = "not sites and not gpu and not vllm"
"""Marks of the tests that run in parallel."""

PARTS: dict[str, tuple[str, ...]] = {
    "lint": ("make", "lint"),
    "suite": (*PYTEST, *SPREAD, "--hypothesis-profile=all", "-m", TOGETHER),
    "sites": (*PYTEST, "-m", "sites"),
    "upgrade": (*PYTEST, "tests/integration/test_upgrade.py"),
    "vllm": (*PYTEST, "-m", "vllm"),
    "days": ("tests.dst", "--seeds", "10000"),
    "zoo": ("tests.zoo", "--jobs", "2"),
    "chaos": ("benchmarks.chaos", "--faults", "1000"),
    "matrix": ("make", "torch-matrix"),
}
"""Name of each part → its command: a target of make, or a Python module with its arguments."""

ENVIRONMENT: dict[str, dict[str, str]] = {
    "upgrade": {"MALLETRAIN_BEFORE": "b0c642877791b51361224d4b2b606c2af7dd8013"},
}
"""Name of a part → additional environment variables. The suite tests an upgrade from this version
under another number; the part for upgrades tests one from the oldest commit with all modes, whose
messages differ.
"""


@dataclass(frozen=True)
class Outcome:
    """The result of one part."""

    part: str
    ok: bool
    minutes: float
    counts: dict[str, int] = field(default_factory=dict)
    """Number of tests by outcome: passed, failed, skipped. Empty for a part without pytest."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Reason → number of tests skipped for it."""


def tests_of(report: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Read a JUnit report of pytest.

    Args:
        report: the XML file.

    Returns:
        The number of tests by outcome, and of skipped tests by reason. Both are empty if there is
        no report, for example because pytest was killed.
    """
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    if not report.is_file():
        return {}, {}
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        elif skipped is not None:
            counts["skipped"] += 1
            reasons[skipped.get("message", "")] += 1
        else:
            counts["passed"] += 1
    return dict(counts), dict(reasons)


def run(part: str, folder: Path) -> Outcome:
    """Run one part, with its output in ``folder/PART.log``."""
    report, log = folder / f"{part}.xml", folder / f"{part}.log"
    command = PARTS[part]
    if command[0] != "make":
        command = (sys.executable, "-m", *command)
    if "pytest" in command:
        command = (*command, f"--junitxml={report}")
    begin = time.monotonic()
    with log.open("w") as output:
        code = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT.get(part, {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    counts, reasons = tests_of(report)
    return Outcome(part, code == 0, (time.monotonic() - begin) / 60, counts, reasons)


def table(outcomes: list[Outcome]) -> str:
    """Return the results as text: a row for each part, then the reasons of skipped tests."""
    lines = [f"{'part':8} {'result':8} {'minutes':>8} {'passed':>8} {'failed':>8} {'skipped':>8}"]
    for each in outcomes:
        cells = (each.counts.get(name, "-") for name in ("passed", "failed", "skipped"))
        result = "passed" if each.ok else "FAILED"
        lines.append(
            f"{each.part:8} {result:8} {each.minutes:8.1f}"
            + "".join(f" {cell!s:>8}" for cell in cells)
        )
    for each in outcomes:
        lines += [
            f"{each.part}: {count} skipped: {reason}"
            for reason, count in sorted(each.reasons.items())
        ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the parts. Return 1 if any failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    options = parser.parse_args(arguments)
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"There is no part {', '.join(unknown)}; there are {', '.join(PARTS)}.")
    folder = Path(tempfile.mkdtemp(prefix="test-all-"))
    print(f"The output of each part is in {folder}.", flush=True)
    outcomes = []
    for part in options.parts or PARTS:
        print(f"{part} …", flush=True)
        outcomes.append(run(part, folder))
    print(table(outcomes))
    return 0 if all(each.ok for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
