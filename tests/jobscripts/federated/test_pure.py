"""What decides knows no clock and does no I/O, and only two modules need Flower."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobscripts.imports import imports

PACKAGE = Path(__file__).parents[3] / "jobscripts" / "federated" / "fedcase"
PURE = {
    *("clients", "coordinator", "hot_samples", "ratio", "rounds", "selection"),
    "training_state",
}
ALLOWED = {
    "__future__",
    "collections",
    "dataclasses",
    "enum",
    "numpy",
    "random",
    "sklearn",
    "typing",
}
WITH_FLOWER = {"apps", "strategy"}


@pytest.mark.parametrize("name", sorted(PURE))
def test_a_decision_imports_decisions_only(name):
    modules = imports(PACKAGE / f"{name}.py")
    own = {module.partition(".")[2] for module in modules if module.startswith("fedcase.")}
    assert own <= PURE
    assert {m.partition(".")[0] for m in modules if not m.startswith("fedcase.")} <= ALLOWED


def test_two_modules_need_flower():
    paths = sorted(PACKAGE.glob("*.py"))
    flower = {p.stem for p in paths if any(m.startswith("flwr") for m in imports(p))}
    assert flower == WITH_FLOWER
    own = {p.stem: imports(p) for p in paths if p.stem not in WITH_FLOWER}
    assert not {n for n, m in own.items() if m & {f"fedcase.{one}" for one in WITH_FLOWER}}
