"""``python -m tests.words``: finds names that this project does not use, and docstrings that do not
begin with the imperative; part of ``make lint``.

Names of data are nouns for what a value is, not participles such as found, told or kept. The
field's terms replace metaphors (docs/glossary.md).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("allocator", "benchmarks", "jobscripts", "jpa", "malletrain", "scavenger", "tests")
GONE = frozenset(
    (
        *("Ear", "Hearing", "LeaseDesk", "Inbox", "Switchboard", "Doorkeeper", "Intake", "InTurn"),
        *("Mishap", "Mishaps", "FailedParts", "Manner", "Manners", "Levers", "Promises", "Heap"),
        *("ApartPlanner", "Lasting", "Bound", "GapMoment", "StepRunner", "FrontDoor", "BackDoor"),
        *("Foretold", "JobWeighed", "CurveLearned", "RescaleCosted", "LeaseNotYet"),
        *("PbsChecked", "SlurmChecked", "StepStart"),
        *("give_back_after", "recall_every", "settle_s", "Door", "HeldObject", "HeldPixels"),
    )
)
"""Names that have a successor."""
GONE_MODULES = frozenset(
    (
        *("hearing", "inbox", "switchboard", "doorkeeper", "intake", "in_turn", "mishaps"),
        *("failed_parts", "promises", "promise", "manners", "manner", "heap", "levers", "apart"),
        "unheard",
        *("homes", "lasting", "said_times", "verdict", "bound", "doors", "recall", "held"),
    )
)
THIRD_PERSON = frozenset(
    (
        *("Adds", "Checks", "Completes", "Makes", "Opens", "Parses", "Plots", "Polls", "Raises"),
        *("Returns", "Sends", "Simulates", "Starts", "Submits", "Writes", "Yields"),
    )
)
"""First words of docstrings of functions that are not imperative: "Return", not "Returns"."""
PARTICIPLES = frozenset(
    ("asked", "found", "given", "held", "kept", "known", "left", "said", "told", "wanted")
)


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Return the names that a module defines, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno


def indicative_docstrings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Return the first words of docstrings of functions that are not imperative, with their
    lines.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            word = (ast.get_docstring(node) or "").partition(" ")[0]
            if word in THIRD_PERSON:
                yield word, node.body[0].lineno


def problems(path: Path) -> Iterator[str]:
    """Return the problems of one file, as sentences."""
    place, tree = path.relative_to(ROOT), ast.parse(path.read_text("utf-8"))
    if path.stem in GONE_MODULES:
        yield f"{place}: the name of this module has a successor, see docs/glossary.md."
    for word, line in indicative_docstrings(tree):
        yield f"{place}:{line}: {word}: begin with the imperative (PEP 257)."
    for name, line in names(tree):
        bare = name.strip("_")
        if bare in GONE:
            yield f"{place}:{line}: {name} has a successor, see docs/glossary.md."
        elif bare in PARTICIPLES:
            yield f"{place}:{line}: {name} is a participle; name what the value is."


def main() -> int:
    """Print all problems. Return 1 if there are any."""
    sentences = [
        problem
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "shipped" not in path.parts
        for problem in problems(path)
    ]
    print("\n".join(sentences), end="\n" if sentences else "")
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
