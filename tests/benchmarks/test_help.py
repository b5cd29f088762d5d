"""Every benchmark can be imported, and says what it does when asked."""

from __future__ import annotations

import importlib
import pkgutil
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmarks
from tests.selection import every_change

MODULES = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__))
NOT_FOR_PEOPLE = {"stub_launcher", "farm_task", "hyperqueue_farm", "train_batching"}
"""Started by the agent or by other benchmarks, with arguments of their own."""
SLOW_TO_IMPORT = {"train_requeue_lightning"}
"""With Lightning, which takes five seconds."""


def is_command(name: str) -> bool:
    """Whether ``python -m benchmarks.NAME`` runs something for people."""
    source = (Path(benchmarks.__path__[0]) / f"{name}.py").read_text()
    return 'if __name__ == "__main__":' in source and name not in NOT_FOR_PEOPLE


COMMANDS = [name for name in MODULES if is_command(name)]


@pytest.fixture(autouse=True)
def undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a benchmark changes in its process."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("name", every_change(COMMANDS, *(set(COMMANDS) - SLOW_TO_IMPORT)))
def test_a_benchmark_says_what_it_does(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in MODULES if not is_command(name)])
def test_a_part_of_a_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
