"""A request that nobody answers is repeated after pauses that grow. No socket, no clock."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from infinicache import proxies
from infinicache.connection import ConnectionLost
from infinicache.objects import Unavailable
from infinicache.proxies import Proxies

TIMEOUT_S = 10.0


class SilentPeers:
    """Peers of which none can be reached."""

    def at(self, address: str) -> SilentPeers:
        return self

    async def call(self, op: str, **arguments: object) -> None:
        raise ConnectionLost("nobody")


def test_the_pauses_before_a_request_is_repeated_grow_and_are_bounded(monkeypatch):
    now, pauses = 0.0, []

    async def sleep(pause_s):
        nonlocal now
        now += pause_s
        pauses.append(pause_s)

    monkeypatch.setattr(proxies, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(
        proxies,
        "asyncio",
        SimpleNamespace(sleep=sleep, TimeoutError=asyncio.TimeoutError),
    )
    cache = Proxies(["n1:1"], SilentPeers(), TIMEOUT_S)
    with pytest.raises(Unavailable):
        asyncio.run(cache.ask("key", "get"))
    assert pauses[:6] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0])
    assert set(pauses[5:]) == {1.0}
    assert sum(pauses) <= TIMEOUT_S
