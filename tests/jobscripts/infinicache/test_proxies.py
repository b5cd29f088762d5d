"""A request that nobody answers is repeated after pauses that grow. No socket, no clock."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from infinicache import proxies
from infinicache.connection import CallFailed, ConnectionLost
from infinicache.objects import Unavailable
from infinicache.proxies import Proxies

from tests.waiting import PATIENCE_S

TIMEOUT_S = 10.0


class SilentPeers:
    """Peers of which none can be reached."""

    def at(self, address: str) -> SilentPeers:
        return self

    async def call(self, op: str, **arguments: object) -> None:
        raise ConnectionLost("nobody")


class PeersWithoutRoom(SilentPeers):
    """Members that name a proxy, which can never be reached. ``ages``: what it was told."""

    def __init__(self) -> None:
        self.ages: list[float] = []

    async def call(self, op: str, **arguments: float) -> tuple[dict[str, list[str]], bytes]:
        if op == "topology":
            return {"proxies": ["n1:1"], "members": []}, b""
        self.ages.append(arguments["loaded_s"])
        raise ConnectionLost("nobody")


def test_each_attempt_says_how_long_ago_the_key_was_missed(monkeypatch):
    now, moments = 100.0, [100.0]

    async def sleep(pause_s):
        nonlocal now
        now += pause_s
        moments.append(now)

    monkeypatch.setattr(proxies, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(proxies, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    peers = PeersWithoutRoom()
    with pytest.raises(Unavailable):
        asyncio.run(Proxies(["n1:1"], peers, TIMEOUT_S).ask("key", "begin", missed_at=97.0))
    assert len(peers.ages) > 5
    assert peers.ages == pytest.approx([moment - 97.0 for moment in moments])


def test_the_pauses_before_a_request_is_repeated_grow_and_are_bounded(monkeypatch):
    now, pauses = 0.0, []

    async def sleep(pause_s):
        nonlocal now
        now += pause_s
        pauses.append(pause_s)

    monkeypatch.setattr(proxies, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(proxies, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    cache = Proxies(["n1:1"], SilentPeers(), TIMEOUT_S)
    with pytest.raises(Unavailable):
        asyncio.run(cache.ask("key", "get"))
    assert pauses[:6] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0])
    assert set(pauses[5:]) == {1.0}
    assert sum(pauses) <= TIMEOUT_S


class PeersWithOldMembers(SilentPeers):
    """Members of which the first ones name a proxy that is none any more. ``requests``: (address,
    name) of each.
    """

    def __init__(self, *old: str, address: str = "", requests: list[tuple[str, str]]) -> None:
        self._old, self._address, self._requests = old, address, requests

    def at(self, address: str) -> PeersWithOldMembers:
        return PeersWithOldMembers(*self._old, address=address, requests=self._requests)

    async def call(self, op: str, **arguments: object) -> tuple[dict[str, object], bytes]:
        self._requests.append((self._address, op))
        if self._address in ("gone:1", "gone:2"):
            raise ConnectionLost("No answer.")
        if op == "topology":
            earlier = self._requests.count((self._address, op)) - 1
            is_old = self._address in self._old and not earlier
            members = ["a:1", "b:1", "gone:1", "c:1"]
            return {"proxies": ["former:1" if is_old else "proxy:1"], "members": members}, b""
        if self._address == "former:1":
            raise CallFailed("This node is not the proxy.", "unavailable")
        return {"answered": self._address}, b""


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        (["a:1"], ["a:1", "b:1"]),
        (["a:1", "b:1"], ["a:1", "b:1", "gone:1", "c:1"]),
        (["a:1", "b:1", "c:1"], ["a:1", "b:1", "gone:1", "c:1", "a:1"]),
    ],
)
def test_other_members_are_asked_where_the_first_name_a_former_proxy(monkeypatch, old, expected):
    """When all have been asked, they are asked again, and not those that left before."""
    requests: list[tuple[str, str]] = []

    async def sleep(pause_s):
        pass

    monkeypatch.setattr(proxies, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    contacts = ["a:1", "b:1", "gone:2"]
    cache = Proxies(contacts, PeersWithOldMembers(*old, requests=requests), TIMEOUT_S)
    assert asyncio.run(cache.ask("key", "find")) == {
        "answered": "proxy:1",
        "proxy": "proxy:1",
    }
    assert [address for address, op in requests if op == "topology"] == expected


class PeersThatAreSilent(SilentPeers):
    """Members of which the first one accepts a request and does not answer. ``requests``: addresses
    in order; ``ended``: whether the request to the first one has ended when the second one is.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.ended: list[bool] = []
        self._address, self._is_over = "", False

    def at(self, address: str) -> PeersThatAreSilent:
        self._address = address
        return self

    async def call(self, op: str, **arguments: object) -> tuple[dict[str, object], bytes]:
        address = self._address
        self.requests.append(address)
        if address == "a:1":
            try:
                await asyncio.Event().wait()
            finally:
                self._is_over = True
        self.ended.append(self._is_over)
        return {"proxies": [address], "members": ["a:1", "b:1"]}, b""


def test_the_next_member_is_asked_while_one_is_silent(monkeypatch):
    """Such as one whose processes are stopped."""
    limit_s = 60.0
    monkeypatch.setattr(proxies, "TOPOLOGY_S", limit_s)
    peers = PeersThatAreSilent()
    cache = Proxies(["a:1", "b:1"], peers, limit_s)
    assert asyncio.run(cache.learn()) == "b:1"
    assert peers.requests == ["a:1", "b:1"]
    assert peers.ended == [False]
    assert cache.addresses == ["b:1"]


class PeersThatJoined(SilentPeers):
    """Members of which only those at ``new:…`` can be reached."""

    def __init__(self) -> None:
        self._address = ""

    def at(self, address: str) -> PeersThatJoined:
        self._address = address
        return self

    async def call(self, op: str, **arguments: object) -> tuple[dict[str, object], bytes]:
        if not self._address.startswith("new:"):
            raise ConnectionLost("nobody")
        return {"proxies": [self._address], "members": [self._address]}, b""


@pytest.mark.parametrize(
    "members",
    [["new:1"], ("new:1",), [SimpleNamespace(address="new:1")], iter(["new:1"])],
    ids=["list", "tuple", "members", "iterator"],
)
def test_the_members_are_looked_up_as_addresses_or_as_members(members):
    cache = Proxies(["old:1"], PeersThatJoined(), TIMEOUT_S, lambda: members)
    assert asyncio.run(cache.learn()) == "new:1"
    assert cache.contacts == ["new:1", "old:1"]


def test_a_text_is_no_list_of_members():
    cache = Proxies(["old:1"], PeersThatJoined(), TIMEOUT_S, lambda: "new:1")
    with pytest.raises(Unavailable, match="members= returns 'new:1'; return a list of addresses"):
        asyncio.run(cache.learn())
    assert cache.contacts == ["old:1"]


class PeersOfAView(SilentPeers):
    """Members that know the view ``number``. ``requests``: address of each question for it."""

    def __init__(self, number: int, address: str = "") -> None:
        self.number, self._address = number, address
        self.requests: list[str] = []

    def at(self, address: str) -> PeersOfAView:
        self._address = address
        return self

    async def call(self, op: str, **arguments: object) -> tuple[dict[str, object], bytes]:
        if op == "topology":
            self.requests.append(self._address)
        members = ["a:1", "b:1", "c:1"]
        return {"proxies": ["a:1"], "members": members, "number": self.number}, b""


def test_a_view_that_no_member_knows_is_looked_for_once():
    """A member has named it in an answer and does not answer now."""

    async def work():
        peers = PeersOfAView(5)
        cache = Proxies(["a:1", "b:1", "c:1"], peers, TIMEOUT_S)
        await cache.ask("key", "find")
        for _ in range(3):
            cache.note({"number": 7}, "d:1")
            await cache.refresh()
        assert peers.requests[1:] == ["d:1", "a:1", "b:1", "c:1"]

    asyncio.run(work())


BLOCKED = """
import asyncio, threading
from infinicache import AsyncCache, CacheError
async def main():
    async with AsyncCache(["127.0.0.1:1"], timeout_s=0.2, members=threading.Event().wait) as cache:
        try:
            await cache.get("key")
        except CacheError as error:
            print(error)
asyncio.run(main())
"""


def test_a_process_ends_while_its_lookup_of_members_is_blocked():
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "cannot be looked up: TimeoutError" in ended.stdout
    assert (ended.returncode, ended.stderr) == (0, "")
