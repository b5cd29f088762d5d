"""Finds the environment in which Flower is installed for the tests (``make flower``)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "jobscripts" / "federated"


def flower() -> Path:
    """The folder of Flower's programs: that of MALLETRAIN_FLOWER, else of ``make flower``. Skips
    the test where there is none.
    """
    folder = Path(os.environ.get("MALLETRAIN_FLOWER") or ROOT / ".venv-flower" / "bin")
    if not (folder / "flower-supernode").exists():
        pytest.skip(
            f"Flower is not installed in {folder}: make flower (Python 3.11). Its versions of "
            "protobuf and fastapi are not those of constraints.txt."
        )
    return folder


def environment() -> dict[str, str]:
    """The environment of processes that import fedcase and the tasks of these tests."""
    paths = os.pathsep.join((str(ROOT), str(PACKAGE)))
    return {**os.environ, "PYTHONPATH": paths}
