"""The umask and the limits that a setup gives to the tasks of a farm."""

from __future__ import annotations

import os
import subprocess

import pytest

from malletrain.launch.task_limits import is_there, take_over


@pytest.fixture(autouse=True)
def _umask():
    mask = os.umask(0o022)
    yield
    os.umask(mask)


def written(path, setup: str) -> str:
    script = f'{setup}\n{{ umask; ulimit -S -a; }} > "$1"'
    subprocess.run(["bash", "-c", script, "bash", str(path)], check=True)
    return str(path)


def seen(words: tuple[str, ...], command: str) -> str:
    return subprocess.run([*words, "bash", "-c", command], capture_output=True, text=True).stdout


def test_what_a_setup_changes_is_for_tasks(tmp_path):
    before = seen((), "ulimit -n")
    words = take_over(written(tmp_path / "limits", "umask 7; ulimit -n 99; ulimit -S -c 0"))
    assert seen(words, "umask; ulimit -n; ulimit -S -c").split() == ["0007", "99", "0"]
    assert seen((), "umask; ulimit -n") == f"0007\n{before}", "the launcher's own are not lowered"


@pytest.mark.parametrize("setup", [":", "export A=1; cd /"])
def test_a_setup_that_changes_none_costs_tasks_no_shell(tmp_path, setup):
    assert take_over(written(tmp_path / "limits", setup)) == ()
    assert seen((), "umask") == "0022\n"


@pytest.mark.parametrize("text", [None, "", "no umask\n"])
def test_what_an_earlier_agent_does_not_write_changes_nothing(tmp_path, text):
    path = tmp_path / "limits"
    if text is not None:
        path.write_text(text)
    assert take_over(str(path)) == ()


def test_the_owners_access_is_never_masked(tmp_path):
    take_over(written(tmp_path / "limits", "umask 777"))
    assert seen((), "umask") == "0077\n"


@pytest.mark.parametrize(
    ("program", "there"),
    [("sh", True), ("no-such", False), ("/bin/sh", True), ("./run", True), ("./walk", False)],
)
def test_programs_are_found_as_exec_finds_them(tmp_path, program, there):
    (tmp_path / "run").touch()
    assert is_there(program, os.environ["PATH"], str(tmp_path)) == there
