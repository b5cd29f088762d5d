"""What a steady run selects."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests import steady

ROOT = Path(__file__).parents[1]


def test_a_steady_run_selects_what_every_change_is_tested_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So it never needs vLLM, a GPU or a bed of hosts."""
    commands: list[list[str]] = []

    def run(argv: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(argv)
        return subprocess.CompletedProcess(argv, 0, "3 passed in 1.0s", "")

    monkeypatch.setattr(steady.subprocess, "run", run)
    assert steady.one_run(0, [])[0]["passed"] == 3
    [argv] = commands
    selection = argv[argv.index("-m", argv.index("pytest")) + 1]
    match = re.search(r"^EVERY_CHANGE = (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert match is not None
    assert set(selection.split(" and ")) == set(match[1].split(" and "))
    assert {"not vllm", "not gpu", "not sites"} <= set(selection.split(" and "))
