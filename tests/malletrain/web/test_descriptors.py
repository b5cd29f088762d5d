"""A page that is watched for long: viewers come and go, the daemon too, and no descriptor stays."""

import os
import socket
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi")

from tests.integration.web_page import TOKEN, page
from tests.malletrain.cli.fake_daemon import FakeDaemon, default_answers
from tests.waiting import until


def watch_and_leave(web):
    """Follow the stream, and go away in the middle of it."""
    at = urlsplit(web.base)
    with socket.create_connection((at.hostname, at.port)) as viewer:
        head = (
            "GET /api/v1/stream HTTP/1.1",
            f"Host: {at.netloc}",
            f"Authorization: Bearer {TOKEN}",
        )
        viewer.sendall("\r\n".join([*head, "", ""]).encode())
        assert b" 200 " in viewer.recv(1000)


def test_viewers_and_daemons_come_and_go(tmp_path):
    state = tmp_path / "state"
    daemon = FakeDaemon(
        state, {**default_answers(), "forecast": lambda _: [], "usage": lambda _: []}
    )
    try:
        with page(state) as web:

            def used():
                for path in ("machine", "nodes", "jobs/j1", "forecast", "sweeps"):
                    web.get(path)
                for _ in range(5):
                    watch_and_leave(web)

            def open_ones():
                return len(os.listdir(f"/proc/{web.pid}/fd"))

            until(lambda: web.ask("nodes").status == 200, "the page has looked")
            used()
            before = open_ones()
            daemon.stop()
            until(lambda: web.get("machine")["away"], "the page misses the daemon")
            until(lambda: web.ask("jobs/j1").status == 503, "and says so")
            daemon = FakeDaemon(state, daemon.answers)
            until(lambda: not web.get("machine")["away"], "it found the next one")
            for _ in range(4):
                used()
            # Connections that the pool of calls keeps are few, whoever asks.
            until(
                lambda: open_ones() <= before,
                f"no more than {before}",
                details=lambda: str(open_ones()),
            )
    finally:
        daemon.stop()
