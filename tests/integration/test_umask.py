"""The files of a job have the modes that they would have where it was submitted, as with sbatch."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

WRITES = """
import os, pathlib, time
import malletrain
os.mkdir("made")
with open("tmp", "w") as file:
    file.write("done")
os.rename("tmp", "result")
while not pathlib.Path("stop").exists():
    time.sleep(0.02)
"""
MASK = 0o007


def cli(site, *words):
    ran = subprocess.run(
        [sys.executable, "-m", "malletrain", words[0], "--state-dir", str(site.state), *words[1:]],
        cwd=site.work,
        umask=MASK,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("options", [["--no-profile"], ["--service", "--value", "auto"]])
def test_of_a_script(shared, options):
    script = shared.script("writes.py", WRITES)
    cli(shared, "submit", *options, "--nodes", "1", str(script))
    shared.until((shared.work / "result").exists, "the script has written")
    assert (mode(shared.work / "result"), mode(shared.work / "made")) == (0o660, 0o770)
    if options == ["--no-profile"]:  # of a service that has not joined, no process is known
        cli(shared, "exec", "writes", "--", "touch", "by-hand")
        assert mode(shared.work / "by-hand") == 0o660
    (shared.work / "stop").touch()


def test_a_umask_in_the_setup_comes_after_it(shared):
    script = shared.script("writes.py", WRITES)
    setup = f"PATH={Path(sys.executable).parent}:$PATH; umask 002"  # a setup chooses the Python
    cli(shared, "submit", "--setup", setup, "--no-profile", "--nodes", "1", str(script))
    shared.until((shared.work / "result").exists, "the script has written")
    assert (mode(shared.work / "result"), mode(shared.work / "made")) == (0o664, 0o775)
    (shared.work / "stop").touch()


def test_of_the_tasks_of_a_farm(shared):
    cli(shared, "map", "--array", "1", "--", "touch", "one")
    shared.until((shared.work / "one").exists, "the task has run")
    assert mode(shared.work / "one") == 0o660
