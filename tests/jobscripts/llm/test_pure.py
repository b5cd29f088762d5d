"""What decides knows no clock and does no I/O, and uses only the public parts of MalleTrain."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "jobscripts" / "llm" / "llmserve"
SHELLS = {"live_engine.py", "simulated_server.py"}
"""Run on the real clock."""
READERS = {"traces.py"}
"""Read files."""
FORBIDDEN = {"asyncio", "os", "select", "socket", "subprocess", "threading", "time", "uvicorn"}
PUBLIC = {"malletrain", "malletrain.membership"}


def imports(path: Path) -> set[str]:
    """The modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return names


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_a_module_imports_what_it_may(path):
    modules = imports(path)
    if path.name not in SHELLS | READERS:
        assert {name.partition(".")[0] for name in modules} & FORBIDDEN == set()
        assert {name.rpartition(".")[2] + ".py" for name in modules} & SHELLS == set()
    assert {name for name in modules if name.startswith("malletrain")} <= PUBLIC
