"""The port of the metrics where another daemon of the host uses it: two people follow the
quickstart on one login node.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys

import pytest

from malletrain.client import ClientError, Connection
from malletrain.config.sections import DaemonSection
from tests.waiting import until

DEFAULT = DaemonSection.model_fields["metrics_listen"].default
CONFIG = """
[daemon]
state_dir = "state"
{setting}
[scheduler]
kind = "local"
[scheduler.local]
autostart = false
"""


@pytest.fixture
def taken():
    """The default port is in use: by this fixture, once a daemon of another test leaves it."""
    host, _, port = DEFAULT.rpartition(":")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def bound():
            with contextlib.suppress(OSError):
                other.bind((host, int(port)))
                return True
            return False

        until(bound, "the port is free")
        other.listen()
        yield


def command(folder, setting, word):
    config = folder / "site.toml"
    config.write_text(CONFIG.format(setting=setting))
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    argv = [sys.executable, "-m", "malletrain", word, "--config", str(config)]
    return argv, environment


def answers(state, daemon):
    assert daemon.poll() is None
    with contextlib.suppress(ClientError), Connection.of(state) as client:
        return client.status().pid == daemon.pid
    return False


@pytest.mark.thorough
@pytest.mark.usefixtures("taken")
def test_a_daemon_whose_file_names_no_port_does_without_metrics(tmp_path):
    argv, environment = command(tmp_path, "", "check")
    checked = subprocess.run([*argv, "--json"], env=environment, capture_output=True, text=True)
    look = [f["sentence"] for f in json.loads(checked.stdout)["findings"] if f["look"]]
    assert any("so that there are no metrics" in sentence for sentence in look)
    argv, environment = command(tmp_path, "", "daemon")
    with (tmp_path / "log").open("wb") as log:
        daemon = subprocess.Popen(argv, env=environment, stderr=log)
    try:
        until(lambda: answers(tmp_path / "state", daemon), "the daemon answers")
        assert f"cannot be served at {DEFAULT}" in (tmp_path / "log").read_text()
    finally:
        daemon.kill()
        daemon.wait()


@pytest.mark.usefixtures("taken")
def test_a_port_that_was_asked_for_must_be_had(tmp_path):
    argv, environment = command(tmp_path, f'metrics_listen = "{DEFAULT}"', "daemon")
    refused = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert refused.returncode == 1
    assert refused.stderr.strip().endswith(
        'set another address, or "" for no metrics, in [daemon].'
    )
