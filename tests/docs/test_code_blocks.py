"""The Python of every page is Python, and what it imports is there."""

import ast
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^( *)```(?:python|py)\b[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def blocks():
    """(place, code) of each block of Python."""
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            indent, code = match[1], match[2]
            lines = [row.removeprefix(indent) for row in code.splitlines()]
            yield f"{page.relative_to(DOCS)}:{line}", "\n".join(lines)


BLOCKS = dict(blocks())


def test_there_are_some():
    assert len(BLOCKS) >= 15


@pytest.mark.parametrize("place", BLOCKS)
def test_a_block_can_be_read_and_its_imports_are_there(place):
    for node in ast.walk(ast.parse(BLOCKS[place], place)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), place, "exec"), {})
