"""Tests that need a machine with a GPU. Part of ``make test-gpu``, not of ``make test``. Every test
reports its measurements (``figure``); the run ends with a table of them to copy.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

FILE = "GPU_REPORT"
"""Names the file of the report; ``FILE.json`` has the same."""
_results: list[dict[str, Any]] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.nodeid.startswith("tests/gpu/")]
    if not here:
        return
    import torch

    count = torch.cuda.device_count()
    for item in here:
        item.add_marker(pytest.mark.gpu)
        needed = item.get_closest_marker("gpus")
        least = needed.args[0] if needed else 1
        if count < least:
            reason = f"needs {least} GPU{'s' * (least > 1)}; torch sees {count} here"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def figure(record_property: Any) -> Any:
    """``figure(name, value)`` puts a number with its unit into the report."""

    def add(name: str, value: Any) -> None:
        record_property(name, value if isinstance(value, str) else f"{value:.4g}")

    return add


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "tests/gpu/" not in report.nodeid:
        return
    if report.when == "call" or report.outcome != "passed":
        last = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
        if report.failed:
            last = report.longreprtext.strip().splitlines()[-1][:300]
        figures = ", ".join(f"{name} {value}" for name, value in report.user_properties)
        _results.append(
            {
                "check": report.nodeid.partition("tests/gpu/")[2],
                "result": report.outcome,
                "figures": figures,
                "why": last,
                "seconds": round(report.duration, 1),
            }
        )


def machine() -> dict[str, str]:
    """Return the hardware and software of the measurements."""
    import torch

    facts = {"python": platform.python_version(), "kernel": platform.release()}
    facts["torch"] = f"{torch.__version__}, CUDA {torch.version.cuda}"
    facts["cores"] = str(os.cpu_count())
    if torch.cuda.is_available():
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        facts["GPU"] = "; ".join(answer.splitlines()[1:])
    return facts


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get(FILE)
    if not path or not _results or hasattr(session.config, "workerinput"):
        return
    about, rows = machine(), sorted(_results, key=lambda row: str(row["check"]))
    lines = [f"* {name}: {value}" for name, value in about.items()]
    lines += ["", "| check | result | figures | s |", "| --- | --- | --- | --- |"]
    for row in rows:
        cells = (row["check"], row["result"], row["figures"] or row["why"], row["seconds"])
        lines.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |")
    Path(path).write_text("\n".join(lines) + "\n")
    Path(f"{path}.json").write_text(json.dumps({"machine": about, "checks": rows}, indent=1))
