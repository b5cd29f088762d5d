"""The list of the tests that cost the most processor time."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processor_time import by_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
TESTS = """
import subprocess, sys
BUSY = "import time\\nwhile time.process_time() < 1: pass"
def test_idle():
    pass
def test_whose_child_computes():
    subprocess.run([sys.executable, "-c", BUSY], check=True)
"""


def test_time_by_folder():
    seconds = {
        "tests/a/test_x.py::test_1[b/c]": 2.0,
        "tests/a/test_y.py::t": 1.0,
        "tests/t.py::t": 1,
    }
    assert by_folder(seconds) == {"tests/a": 3.0, "tests": 1.0}


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1")])
def test_what_a_child_computes_counts_for_its_test(tmp_path, workers):
    (tmp_path / "test_it.py").write_text(TESTS)
    plugins = ("-p", "tests.processor_time", "-p", "no:cacheprovider", *workers)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "--durations", "5"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    report = done.stdout.partition("processor time: ")[2]
    counted_s, whole_s = re.match(r"(\d+) s, (\d+) s of the machine", report).groups()
    assert min(int(counted_s), int(whole_s)) >= 1
    rows = [line.split() for line in report.splitlines()]
    tests = [row for row in rows if row[1:2] == ["s"] and row[2].startswith("test_it.py::")]
    assert [row[2] for row in tests] == [
        "test_it.py::test_whose_child_computes",
        "test_it.py::test_idle",
    ]
    assert float(tests[0][0]) >= 1.0 > float(tests[1][0])
