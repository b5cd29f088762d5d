"""The house: small files, few of them at the top, one meaning for a name, rooms that say where
they run.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("malletrain", "scavenger", "jpa", "allocator")
MOST_LINES = 600
SHARED_NAMES = {
    # Each is the callback of its library, which is where users look for it.
    "MalleTrainCallback": {
        "malletrain/integrations/lightning.py",
        "malletrain/integrations/transformers.py",
    },
}
"""Classes that may share a name, and the files that have them."""


def sources(*folders: str) -> list[Path]:
    """The Python files of ``folders``; links into the source tree count once."""
    paths = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    return sorted(p for p in paths if "shipped/" not in str(p.relative_to(ROOT)))


def test_no_file_is_long():
    paths = sources(*PRODUCT, "jobscripts", "tests")
    assert len(paths) > 300
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in paths}
    assert {p: n for p, n in lines.items() if n > MOST_LINES} == {}


def test_the_top_level_is_small():
    assert len(list((ROOT / "malletrain").glob("*.py"))) <= 6


def test_a_class_is_found_by_its_name():
    homes: dict[str, set[str]] = defaultdict(set)
    for path in sources(*PRODUCT, "jobscripts"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(str(path.relative_to(ROOT)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == SHARED_NAMES


def test_every_room_says_where_it_runs():
    for package in PRODUCT:
        for path in sorted((ROOT / package).glob("**/__init__.py")):
            if "shipped" in path.parts or path.parent.name in ("versions", "migrations"):
                continue
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert re.search(r"\b(runs?|pure)\b", docstring, re.IGNORECASE), (
                f"{path.relative_to(ROOT)} does not say where it runs"
            )
