"""What systemd is told while the daemon starts."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from malletrain.config.model import parse_config
from malletrain.daemon import main
from malletrain.daemon.site import process
from malletrain.store.store import Store, StoreError
from tests.waiting import PATIENCE_S


@pytest.fixture
def manager(tmp_path, monkeypatch):
    """The socket of a service manager that is asked at once."""
    monkeypatch.setattr(process, "EXTEND_EVERY_S", 0.0)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.settimeout(PATIENCE_S)
        yield channel


def test_systemd_waits_while_a_database_is_migrated(manager, tmp_path, monkeypatch):
    migrated = threading.Event()

    def migrate(url, verify):
        assert migrated.wait(PATIENCE_S)
        raise StoreError("The migration is over.")

    monkeypatch.setattr(Store, "open", migrate)
    text = f'''
        [daemon]
        state_dir = "{tmp_path / "state"}"
        [scheduler]
        kind = "local"
    '''
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(main.run, parse_config(text))
        for _ in range(3):
            assert manager.recv(1000).startswith(b"EXTEND_TIMEOUT_USEC=120000000\nSTATUS=")
        migrated.set()
        while manager.recv(1000) != b"STATUS=":  # until the last request is read
            pass
        assert ended.result() == 1


def test_a_start_that_is_quick_asks_for_nothing(manager, monkeypatch):
    monkeypatch.setattr(process, "EXTEND_EVERY_S", PATIENCE_S)
    with process.extended_start():
        pass
    process.tell_service_manager("READY=1")
    assert manager.recv(1000) == b"READY=1"
