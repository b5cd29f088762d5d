"""Reports the state of the daemon to systemd (sd_notify(3)).

Decides how long systemd is to wait for a start. :mod:`malletrain.daemon.main` decides when the
daemon is up.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

EXTEND_EVERY_S = 20.0
"""Interval at which a start that opens a large database asks systemd for more time, seconds."""
EXTEND_S = 120.0
"""Time from each such request within which the start has to end or ask again, seconds."""


def tell_service_manager(state: str) -> None:
    """Report the state of the service to systemd if it asks for that (sd_notify(3)). Failures are
    ignored.
    """
    if address := os.environ.get("NOTIFY_SOCKET"):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel,
        ):
            channel.sendto(
                state.encode(), f"\0{address[1:]}" if address.startswith("@") else address
            )


@contextlib.contextmanager
def extended_start() -> Iterator[None]:
    """Ask systemd at intervals to wait longer for the start, because the copy and the migration of
    a large database take longer than TimeoutStartSec. A start that is killed begins again with
    both. When the start goes on, the status that systemd shows is empty again.
    """
    done, has_asked = threading.Event(), threading.Event()

    def ask() -> None:
        while not done.wait(EXTEND_EVERY_S):
            has_asked.set()
            tell_service_manager(
                f"EXTEND_TIMEOUT_USEC={round(EXTEND_S * 1e6)}\nSTATUS=Opens the database, which "
                "takes long while it is copied and migrated."
            )

    thread = threading.Thread(target=ask, name="extended start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if has_asked.is_set():
            tell_service_manager("STATUS=")
