"""The threat model names the tests that play the attacker: they are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "threat-model.md"


def test_every_attack_that_is_said_to_be_defended_has_its_test():
    rows = [line for line in PAGE.read_text().splitlines() if line.count("|") == 5]
    attacks = [row for row in rows if not re.match(r"\| what is tried|\|-", row)]
    assert len(attacks) > 15
    assert [row for row in attacks if "`tests/" not in row] == []


def test_the_tests_that_the_page_names_are_there():
    named = re.findall(r"`(tests/[\w/]+(?:\.py)?)(?:::(\w+))?`", PAGE.read_text())
    assert len(named) > 25
    for path, name in named:
        assert (ROOT / path).exists(), path
        if name:
            tree = ast.parse((ROOT / path).read_text())
            assert name in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}, name
