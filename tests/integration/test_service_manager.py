"""The daemon under systemd: it says when it is up, and the unit that ships with it is a valid
one.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from malletrain.client import Connection
from tests.waiting import PATIENCE_S

UNIT = Path(__file__).parents[2] / "site-configs" / "malletrain.service"


def test_the_daemon_says_that_it_is_up_once_clients_are_answered(tmp_path):
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(PATIENCE_S)
    config = tmp_path / "site.toml"
    daemon, scheduler = (
        'state_dir = "state"\nmetrics_listen = ""',
        'kind = "local"\n[scheduler.local]\nautostart = false',
    )
    config.write_text(f"[daemon]\n{daemon}\n[scheduler]\n{scheduler}\n")
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
    }
    daemon = subprocess.Popen(
        [sys.executable, "-m", "malletrain", "daemon", "--config", str(config)], env=environment
    )
    try:
        assert manager.recv(100) == b"READY=1"
        with Connection.of(tmp_path / "state") as client:
            assert client.status().pid == daemon.pid
        daemon.terminate()
        assert manager.recv(100) == b"STOPPING=1"
        assert daemon.wait(PATIENCE_S) == 0
    finally:
        daemon.kill()
        manager.close()


IMPLY_NO_NEW_PRIVILEGES = {
    *("LockPersonality", "MemoryDenyWriteExecute", "NoNewPrivileges", "PrivateDevices"),
    *("ProtectClock", "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules"),
    *("ProtectKernelTunables", "RestrictAddressFamilies", "RestrictNamespaces"),
    *("RestrictRealtime", "RestrictSUIDSGID", "SystemCallArchitectures", "SystemCallFilter"),
    *("SystemCallLog", "DynamicUser", "RestrictFileSystems"),
}
"""For a service with User=, by systemd.exec(5)."""


def directives(path):
    lines = path.read_text().splitlines()
    return {line.partition("=")[0] for line in lines if "=" in line and not line.startswith("#")}


def test_under_the_unit_the_daemon_can_call_sudo_and_under_that_for_one_user_it_cannot():
    assert directives(UNIT) & IMPLY_NO_NEW_PRIVILEGES == set()
    assert "NoNewPrivileges" in directives(UNIT.with_name("one-user.conf"))


def test_the_unit_is_one_that_systemd_understands(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for name in ("malletraind", "malletrain"):
        command = tmp_path / name
        command.write_text("#!/bin/sh\n")
        command.chmod(0o755)
    unit = tmp_path / "malletrain.service"
    unit.write_text(UNIT.read_text().replace("/opt/malletrain/bin", str(tmp_path)))
    more = tmp_path / "malletrain.service.d"
    more.mkdir()
    shutil.copy(UNIT.with_name("one-user.conf"), more)
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert "malletrain.service" not in done.stderr, done.stderr


@pytest.mark.parametrize(("alone", "most"), [(True, 2.0), (False, 9.0)])
def test_how_much_of_the_host_the_unit_leaves_open(tmp_path, alone, most):
    """By systemd's own measure from 0 to 10. Without sudo everything is closed that a daemon can do
    without; with it nothing may be closed that implies NoNewPrivileges.
    """
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "malletrain.service"
    shutil.copy(UNIT, unit)
    if alone:
        (tmp_path / "malletrain.service.d").mkdir()
        shutil.copy(UNIT.with_name("one-user.conf"), tmp_path / "malletrain.service.d")
    threshold = f"--threshold={round(10 * most)}"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", threshold, str(unit)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-500:]
