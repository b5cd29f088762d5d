"""Finds the proxies of a cache for a client, and sends requests to the proxy of a key.

Keys are assigned to proxies by consistent hashing (:class:`Ring`): if a proxy is added or removed,
only its share of the keys moves. While proxies move, requests are repeated until the time limit; a
commit is sent once.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from infinicache.connection import CallFailed, ConnectionLost, KeyRefused, Peers
from infinicache.objects import CacheError, TooLarge, Unavailable
from malletrain.waits import time_limit
from scavenger.backoff import doubled_s

POINTS_PER_PROXY = 64


class Ring:
    """The assignment of keys to ``slots`` proxies, numbered from 0, with POINTS_PER_PROXY points
    each on a ring of 2**64.
    """

    def __init__(self, slots: int) -> None:
        points = sorted(
            (_hash(f"proxy {slot} point {i}"), slot)
            for slot in range(slots)
            for i in range(POINTS_PER_PROXY)
        )
        self._at = [at for at, _ in points]
        self._slots = [slot for _, slot in points]

    def slot(self, key: str) -> int:
        """Return the proxy of ``key``."""
        return self._slots[bisect_right(self._at, _hash(key)) % len(self._slots)]


def _hash(text: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )


FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
"""Pause before a request is repeated, seconds: the first and the maximum. It doubles each time."""
_RAISES = {"too large": TooLarge, "unavailable": Unavailable}


class Proxies:
    """The proxies of the cache with members at ``known``."""

    def __init__(self, contacts: Sequence[str], peers: Peers, timeout_s: float) -> None:
        self.addresses: list[str] = []
        """Address of the proxy of each slot; empty until learned."""
        self._contacts = self._members = list(contacts)
        self._peers = peers
        self._timeout_s = timeout_s
        self._ring = Ring(1)

    async def learn(self, unhelpful: set[str] | None = None) -> str:
        """Ask the members for the proxies, until one answers. Return its address. Another cache may
        have the address of a member that has left; it refuses the key.

        Args:
            unhelpful: members that are asked last: they have named a former proxy, or did not
                answer. Those that do not answer are added; when it has all, it is emptied.
        """
        failures, refusal = [], ""
        later = set[str]() if unhelpful is None else unhelpful
        if later.issuperset(self._members):  # any of them may have heard of a change since
            later.clear()
        contacts = dict.fromkeys([*self._contacts, *self.addresses])
        for address in sorted(contacts, key=later.__contains__):
            try:
                head, _ = await self.call(address, "topology")
            except KeyRefused as error:
                refusal = f"{error} Its key is that of its job: malletrain members JOB --key."
                later.add(address)
                continue
            except (ConnectionLost, CallFailed, Unavailable) as error:
                failures.append(str(error))
                later.add(address)
                continue
            if head["proxies"]:
                if len(self.addresses) != len(head["proxies"]):
                    self._ring = Ring(len(head["proxies"]))
                self.addresses = head["proxies"]
                self._members = head["members"]
                self._contacts = list(dict.fromkeys([*self._members, *self._contacts]))[:64]
                return address
        if refusal:
            raise CacheError(refusal)
        raise Unavailable(
            f"No member of the cache answers. {' '.join(dict.fromkeys(failures))[:300]}"
        )

    async def call(self, address: str, op: str, /, **arguments: Any) -> tuple[dict[str, Any], Any]:
        """Send a request to one member. Raises ConnectionLost, CallFailed."""
        try:
            async with time_limit(self._timeout_s):
                return await self._peers.at(address).call(op, **arguments)
        except asyncio.TimeoutError:
            raise ConnectionLost(
                f"{address} did not answer within {self._timeout_s:g} s."
            ) from None

    async def ask(
        self, key: str, op: str, /, missed_at: float | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Send a request to the current proxy of ``key``. ``missed_at``: when the client missed the
        key (time.monotonic); each attempt says how long ago that is (``loaded_s``). Raises
        CacheError.
        """
        deadline = time.monotonic() + self._timeout_s
        attempt = 0
        source, unhelpful = "", set[str]()
        while True:
            try:
                if not self.addresses:
                    source = await self.learn(unhelpful)
                if missed_at is not None:
                    arguments["loaded_s"] = time.monotonic() - missed_at
                head, _ = await self.call(self.addresses[self._ring.slot(key)], op, **arguments)
                return head
            except CallFailed as error:
                if error.code != "unavailable" or op == "commit" or time.monotonic() > deadline:
                    raise _RAISES.get(error.code, CacheError)(str(error)) from None
                last: Exception = error
                # The member that named this proxy may have heard of no change for long.
                unhelpful.add(source)
            except (ConnectionLost, Unavailable) as error:
                if op == "commit" or time.monotonic() > deadline:
                    raise Unavailable(str(error)) from None
                last = error
            pause_s = doubled_s(FIRST_PAUSE_S, attempt, MAX_PAUSE_S)
            if time.monotonic() + pause_s > deadline:
                raise Unavailable(str(last))
            await asyncio.sleep(pause_s)
            attempt += 1
            self.addresses = []
