"""Finds the proxies of a cache for a client, and sends requests to the proxy of a key.

Keys are assigned to proxies by consistent hashing (:class:`Ring`): if a proxy is added or removed,
only its share of the keys moves. While proxies move, requests are repeated until the time limit; a
commit is sent once. Answers carry the number of the view of the members that their sender knows: a
client that sees a newer one than its own learns the members again.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import math
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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
STAGGER_S = 0.25
"""Time after which the next member is asked beside one that has not answered yet, seconds."""
TOPOLOGY_S = 5.0
"""Maximum time in which a member says who the proxies are, seconds."""
LOOKUP_INTERVAL_S = 5.0
"""Minimum time between two calls of the function that returns the members, seconds."""
MAX_CONTACTS = 64
_RAISES = {"too large": TooLarge, "unavailable": Unavailable}
Lookup = Callable[[], Iterable[Any]]
"""Returns the addresses of the present members, or the members (:class:`malletrain.Member`)."""


class Proxies:
    """The proxies of the cache with members at ``contacts``.

    Args:
        contacts: addresses of members.
        peers: connections to them.
        timeout_s: time limit of a request, seconds.
        lookup: returns the addresses of the present members; called in a thread of its own, if
            none of the known members answers.
    """

    def __init__(
        self,
        contacts: Sequence[str],
        peers: Peers,
        timeout_s: float,
        lookup: Lookup | None = None,
    ) -> None:
        self.addresses: list[str] = []
        """Address of the proxy of each slot; empty until learned."""
        self.number = -1
        """Number of the view of the members from which they were learned."""
        self._newest = -1
        """The highest number of a view that an answer has named."""
        self._refreshed_for = -1
        """The value of ``_newest`` when the last refresh that succeeded began."""
        self._refreshing: asyncio.Task[None] | None = None
        """The refresh that is under way. It goes on if a call that waits for it is cancelled."""
        self.contacts = self._members = list(contacts)
        """Members that are asked, in this order."""
        self._peers = peers
        self._timeout_s = timeout_s
        self._lookup = lookup
        self._looked_up_at = -math.inf
        self._lookup_failure = ""
        self._ring = Ring(1)

    async def learn(self, unhelpful: set[str] | None = None) -> str:
        """Ask the members for the proxies, until one knows the newest view of which an answer has
        spoken. If none does, the newest of their answers counts. Return the address of the member
        that gave it. Another cache may have the address of a member that has left; it refuses the
        key.

        Args:
            unhelpful: members that are asked last: they have named a former proxy, or did not
                answer. Those that do not answer are added; when it has all, it is emptied.
        """
        later = set[str]() if unhelpful is None else unhelpful
        if later.issuperset(self._members):  # any of them may have heard of a change since
            later.clear()
        contacts = dict.fromkeys([*self.contacts, *self.addresses])
        try:
            answer = await self._topology(sorted(contacts, key=later.__contains__), later)
        except CacheError as error:
            addresses = await self._look_up(error)
            if not addresses:
                raise
            answer = await self._topology(addresses, later)
        address, head = answer
        if len(self.addresses) != len(head["proxies"]):
            self._ring = Ring(len(head["proxies"]))
        self.addresses = head["proxies"]
        self.number = _number(head)
        self._members = head["members"]
        self.contacts = list(dict.fromkeys([*self._members, *self.contacts]))[:MAX_CONTACTS]
        return address

    async def _topology(
        self, contacts: Iterable[str], later: set[str]
    ) -> tuple[str, dict[str, Any]]:
        """Ask these members one after another, and the next one already while one is silent.
        Return the address of a member and its answer.
        """
        failures, refusal = [], ""
        best: tuple[str, dict[str, Any]] | None = None
        requests: dict[asyncio.Future[tuple[dict[str, Any], Any]], str] = {}
        waiting = deque(contacts)
        try:
            while waiting or requests:
                if waiting:
                    address = waiting.popleft()
                    limit_s = min(TOPOLOGY_S, self._timeout_s)
                    call = self.call(address, "topology", within_s=limit_s)
                    requests[asyncio.ensure_future(call)] = address
                done, _ = await asyncio.wait(
                    requests,
                    timeout=STAGGER_S if waiting else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    address = requests.pop(task)
                    try:
                        head, _ = task.result()
                    except KeyRefused as error:
                        refusal = (
                            f"{error} Its key is that of its job: malletrain members JOB --key."
                        )
                        later.add(address)
                        continue
                    except (ConnectionLost, CallFailed, Unavailable) as error:
                        failures.append(str(error))
                        later.add(address)
                        continue
                    if not head["proxies"]:
                        continue
                    if best is None or _number(head) > _number(best[1]):
                        best = address, head
                    if _number(head) >= self._newest:
                        return best
            if best is not None:
                return best
        finally:
            for task in requests:
                task.cancel()
            if requests:
                await asyncio.gather(*requests, return_exceptions=True)
        if refusal:
            raise CacheError(refusal)
        raise Unavailable(
            f"No member of the cache answers. {' '.join(dict.fromkeys(failures))[:300]}"
        )

    async def _look_up(self, reason: CacheError) -> list[str]:
        """Return the present members that the caller's function knows; empty if there is none, or
        if it was called a moment ago. Raises Unavailable if it fails.
        """
        if self._lookup is None:
            return []
        now, lookup = time.monotonic(), self._lookup
        if now - self._looked_up_at >= LOOKUP_INTERVAL_S:
            self._looked_up_at, self._lookup_failure = now, ""
            try:
                async with time_limit(self._timeout_s):
                    addresses = await _in_daemon_thread(lambda: _addresses(lookup()))
            except Exception as error:  # whatever the caller's function raises
                text = str(error) or type(error).__name__
                self._lookup_failure = f"Its members cannot be looked up: {text}"
            else:
                self.contacts = list(dict.fromkeys([*addresses, *self.contacts]))[:MAX_CONTACTS]
                return addresses
        if self._lookup_failure:
            raise Unavailable(f"{reason} {self._lookup_failure}")
        return []

    def note(self, head: dict[str, Any], address: str) -> None:
        """Note the number of the view of the member that gave an answer. If it is new, the members
        are learned again at the next request, from this one first.
        """
        if _number(head) > self._newest:
            self._newest = _number(head)
            self.contacts = list(dict.fromkeys([address, *self.contacts]))[:MAX_CONTACTS]

    def _is_outdated(self) -> bool:
        return self.number < self._newest and self._refreshed_for < self._newest

    async def refresh(self, wait: bool = False) -> None:
        """Learn the members again, if an answer has named a newer view since they were. What is
        known stays if nobody answers.

        Args:
            wait: whether to wait for a refresh that another call has begun.
        """
        if not self._is_outdated():
            return
        task = self._refreshing
        if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
            task = self._refreshing = asyncio.ensure_future(self._learn_newest())
        elif not wait:
            return
        await asyncio.shield(task)

    async def _learn_newest(self) -> None:
        with contextlib.suppress(CacheError):
            while self._is_outdated():
                newest = self._newest
                await self.learn()
                self._refreshed_for = newest

    def address_of(self, key: str) -> str:
        """Return the address of the proxy of ``key``; empty if it is not known now."""
        return self.addresses[self._ring.slot(key)] if self.addresses else ""

    async def call(
        self, address: str, op: str, /, within_s: float | None = None, **arguments: Any
    ) -> tuple[dict[str, Any], Any]:
        """Send a request to one member. Raises ConnectionLost, CallFailed."""
        limit_s = self._timeout_s if within_s is None else within_s
        try:
            async with time_limit(limit_s):
                return await self._peers.at(address).call(op, **arguments)
        except asyncio.TimeoutError:
            raise ConnectionLost(f"{address} did not answer within {limit_s:g} s.") from None

    async def ask(
        self, key: str, op: str, /, missed_at: float | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Send a request to the current proxy of ``key``. Return its answer, with its address
        (``proxy``). ``missed_at``: when the client missed the key (time.monotonic); each attempt
        says how long ago that is (``loaded_s``). Raises CacheError.
        """
        deadline = time.monotonic() + self._timeout_s
        attempt = 0
        source, unhelpful = "", set[str]()
        while True:
            try:
                if self.addresses and op != "commit":
                    await self.refresh()
                if not self.addresses:
                    source = await self.learn(unhelpful)
                if missed_at is not None:
                    arguments["loaded_s"] = time.monotonic() - missed_at
                address = self.address_of(key)
                head, _ = await self.call(address, op, **arguments)
                self.note(head, address)
                return {**head, "proxy": address}
            except CallFailed as error:
                if error.code != "unavailable" or op == "commit" or time.monotonic() > deadline:
                    raise _RAISES.get(error.code, CacheError)(str(error)) from None
                last: Exception = error
                # The member that named this proxy may have heard of no change for long.
                unhelpful.add(source)
            except (ConnectionLost, Unavailable) as error:
                self.addresses = []  # for the next request, too
                if op == "commit":
                    raise Unavailable(f"Whether {key!r} was put is not known. {error}") from None
                last = error
            pause_s = doubled_s(FIRST_PAUSE_S, attempt, MAX_PAUSE_S)
            if time.monotonic() + pause_s > deadline:
                raise Unavailable(str(last))
            await asyncio.sleep(pause_s)
            attempt += 1
            self.addresses = []


def _number(head: dict[str, Any]) -> int:
    """Return the number of the view of the member that gave an answer."""
    return int(head.get("number", 0))


def _addresses(members: Iterable[Any]) -> list[str]:
    """Return the addresses of what the caller's function has returned."""
    if isinstance(members, (str, bytes)):
        raise TypeError(f"members= returns {members!r}; return a list of addresses.")
    return [str(getattr(member, "address", member)) for member in members]


async def _in_daemon_thread(work: Callable[[], list[str]]) -> list[str]:
    """Return what ``work`` returns in a thread. The process may end while the thread is blocked,
    which it could not with a thread of an executor.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[list[str]] = loop.create_future()

    def finish(value: list[str] | None, error: BaseException | None) -> None:
        if result.done():  # the caller does not wait any more
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value or [])

    def run() -> None:
        value, failure = None, None
        try:
            value = work()
        except BaseException as error:  # whatever the caller's function raises
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, value, failure)

    context = contextvars.copy_context()
    threading.Thread(
        target=context.run, args=(run,), name="infinicache members", daemon=True
    ).start()
    return await result
