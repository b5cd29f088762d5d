"""Daemons that are forked from a process with their imports."""

import os
import signal
import subprocess

import pytest

from malletrain import __version__
from malletrain.protocol import env
from tests.forked_daemon import start_daemon
from tests.forks import Forked
from tests.waiting import until

pytestmark = pytest.mark.slow

CONFIG = """
[daemon]
state_dir = "{folder}/state"
metrics_listen = ""
[scheduler]
kind = "local"
[scheduler.local]
autostart = false
"""


@pytest.fixture
def started(tmp_path):
    """Return a function that starts ``malletrain`` with arguments, and returns the process and
    what reads its output.
    """
    processes = []

    def start(*arguments, **options):
        path = tmp_path / f"{len(processes)}.log"
        with path.open("wb") as file:
            processes.append(start_daemon(list(arguments), file.fileno(), **options))
        return processes[-1], path.read_text

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_exit_codes_and_output(started, tmp_path):
    process, output = started("--version")
    assert process.wait() == 0
    assert process.poll() == process.returncode == 0
    assert __version__ in output()
    process, output = started("daemon", "--config", str(tmp_path / "none.toml"))
    assert process.wait() == 1
    assert "none.toml" in output()
    process.send_signal(signal.SIGTERM)  # it has ended: nothing happens


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_a_daemon_with_its_own_environment_and_folder(started, tmp_path, monkeypatch, number, code):
    config = tmp_path / "site.toml"
    config.write_text(CONFIG.format(folder=tmp_path))
    monkeypatch.chdir(tmp_path)
    process, output = started(
        "daemon", "--config", "site.toml", environment={**os.environ, "COLOUR": "blue"}
    )
    assert isinstance(process, Forked)
    until(lambda: "daemon-started" in output(), "it runs", details=output)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.0)
    process.send_signal(number)
    assert process.wait() == code


def test_an_environment_that_imports_read_needs_an_interpreter(started, tmp_path):
    process, output = started("--version", environment={**os.environ, env.FAULTS: str(tmp_path)})
    assert isinstance(process, subprocess.Popen)
    assert process.wait() == 0
    assert __version__ in output()
