"""Checks in to a round while this process still trains in the previous one: connects to the store
of the round, and waits until all its members have checked in.

Decides when a process may leave the previous group: not before all ranks of the next one have
checked in with the same model. :mod:`malletrain.elastic.group` then forms the group.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from malletrain.elastic import sockets, step_exchange
from malletrain.elastic.errors import Interrupted, UnfitModel
from malletrain.elastic.link import Place

_POLL_S = 0.002
_ABSENT = b"\0no such key"
"""Result of a compare_set for a key that is missing."""
_KEY_TIMEOUT = timedelta(seconds=300)
_REHEARSAL_POLL_S = 0.5
"""Interval in which it is checked whether the round of a rehearsal is void, seconds."""


class RoundStore(dist.Store):
    """The store of one round. A wait has no timeout, and raises Interrupted as soon as
    ``interrupted`` returns True.
    """

    def __init__(self, inner: Any, interrupted: Callable[[], bool]) -> None:
        super().__init__()
        self._inner = inner
        self.interrupted = interrupted
        self._awaited: dict[str, bytes] = {}
        """Values of the keys that were waited for. The caller gets such a key next; the cache saves
        a second request to the store, which is on another node.
        """

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._awaited[key] = self._await(key)

    def _pause(self) -> None:
        if self.interrupted():
            raise Interrupted("This round is void; a newer one follows.")
        time.sleep(_POLL_S)

    def get(self, key: str) -> bytes:
        value = self._awaited.pop(key, None)
        return self._await(key) if value is None else value

    def _await(self, key: str) -> bytes:
        # One round trip; a wait and a get of TCPStore are three.
        while (value := bytes(self._inner.compare_set(key, _ABSENT, _ABSENT))) == _ABSENT:
            self._pause()
        return value

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._inner.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def num_keys(self) -> int:
        return int(self._inner.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        """Does nothing, because waits are interrupted and have no timeout."""


def _wait_for_key(store: Any, key: str) -> bool:
    """Wait up to _KEY_TIMEOUT for a key, without polling. Return whether it exists."""
    try:
        store.wait([key], _KEY_TIMEOUT)
    except dist.DistStoreError:
        return False
    return True


class RoomMaker(Protocol):
    """The part of :class:`malletrain.elastic.training.Training` that prepares memory."""

    def for_joiners(self) -> str:
        """Return the tensors for which joiners need memory."""

    def make_room(self, data: str) -> None:
        """Allocate that memory, if there is no state yet."""


class CheckIn:
    """Checks in to a round, in a thread, while this process still trains.

    The thread connects to the store, prepares memory for the state of the peers, and then checks
    in. ``everyone`` is true when all ranks have checked in. Only then may a rank leave the previous
    group.

    Args:
        place: membership of this process in the round.
        signature: hash of the model's tensors, which must be equal on all ranks.
        rooms: allocates the memory.
        failed: called in the thread when the store cannot be reached. The check-in then ends.
        holding: description of the state of this process. If given, the members exchange theirs.
        arrange: returns the rank of each member from the holdings of all, in the order of their
            places. The last member to publish its holding calls it.
        rehearses: returns whether this process is a joiner that rehearses. If the holdings differ,
            it then checks in only after :meth:`rehearse`.
    """

    def __init__(
        self,
        place: Place,
        signature: str,
        rooms: RoomMaker,
        failed: Callable[[], None],
        holding: str | None = None,
        arrange: Callable[[list[str]], list[int]] | None = None,
        rehearses: Callable[[], bool] = lambda: False,
    ) -> None:
        self.place = place
        self._rooms = rooms
        self.ranked = place
        """Membership with the rank from ``arrange``, when all members have published holdings."""
        self._holding = holding
        self._arrange = arrange
        self._failed = failed
        self._signature = signature
        self.everyone = False
        self.void = False
        self._lost = False
        """The store is unreachable, or another process has checked in for this place. The check-in
        cannot complete.
        """
        self.exchange = 0
        """Version of :data:`malletrain.elastic.step_exchange.EXCHANGES` that the members use, when
        all have checked in.
        """
        self.unfit = False
        """The model here has other tensors than the model of rank 0."""
        self._store: Any = None
        self._rehearses = rehearses
        self._holdings_differ = False
        """The members' holdings differ."""
        self._ranked, self._rehearsed = threading.Event(), threading.Event()
        sockets.spare(place.port)
        threading.Thread(
            target=self._run, name=f"malletrain-round-{place.generation}", daemon=True
        ).start()

    def _run(self) -> None:
        try:
            store = dist.TCPStore(
                "127.0.0.1",
                self.place.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=60),
            )
            if self.place.rank == 0:
                store.set("rooms", self._rooms.for_joiners())
                store.set("signature", self._signature)
            elif store.get("signature").decode() != self._signature:
                self.unfit = True
                return
            else:
                self._make_room(store.get("rooms").decode() if store.check(["rooms"]) else "[]")
            if store.add(f"here/{self.place.rank}", 1) > 1:
                # Another process had this place and died, so this round cannot be formed.
                self._lost = True
                return
            for version in range(1, len(step_exchange.EXCHANGES)):
                store.add(f"exchange/{version}", 1)
            if self._holding is not None and not self._exchange_holdings(store):
                return
            if store.add("here", 1) == self.place.size:
                store.set("all", "")
            self._store = store
            while not self.void and not _wait_for_key(store, "all"):
                pass
            if not self.void:
                self.exchange = self._common_exchange(store)
            self.everyone = not self.void
        except Exception:
            # For every error of the store: this check-in has failed, and the daemon forms another
            # round.
            self._lost = True
            if not self.void:
                self._failed()

    def _common_exchange(self, store: Any) -> int:
        """Return the version that the members use. Members count themselves before they check in,
        so that all get the same result.
        """
        versions = range(1, len(step_exchange.EXCHANGES))
        counts = [store.add(f"exchange/{version}", 0) for version in versions]
        return step_exchange.common_exchange(counts, self.place.size)

    def _make_room(self, data: str) -> None:
        try:
            self._rooms.make_room(data)
        except (ValueError, TypeError, AttributeError, MemoryError, RuntimeError):
            pass  # the memory is allocated when it is needed, and a failure is reported there

    def _exchange_holdings(self, store: Any) -> bool:
        """Exchange holdings and get the rank. Return False if the round is void."""
        size = self.place.size
        store.set(f"holding/{self.place.rank}", self._holding)
        if store.add("holding", 1) == size:
            holdings = [store.get(f"holding/{rank}").decode() for rank in range(size)]
            order = self._arrange(holdings) if self._arrange is not None else list(range(size))
            store.set("order", json.dumps([order, len(set(holdings)) > 1]))
        while not self.void and not _wait_for_key(store, "order"):
            pass
        if self.void:
            return False
        order, differ = json.loads(store.get("order"))
        self.ranked = replace(self.place, rank=order[self.place.rank])
        self._holdings_differ = differ
        self._ranked.set()
        # A process that had no state may have it by now. Then it trains, and does not rehearse.
        while differ and self._rehearses() and not self.void:
            if self._rehearsed.wait(_REHEARSAL_POLL_S):
                break
        return not self.void

    def rehearse(self, call: Callable[[Place], None], interrupted: Callable[[], bool]) -> None:
        """Call ``call`` with the future membership, while the other ranks train. Called in the
        training thread of a joiner that rehearses. If no rank trains, ``call`` is not called.

        Args:
            call: the rehearsal.
            interrupted: returns whether the round is void.
        """
        while not self._ranked.wait(_POLL_S):
            if interrupted() or self.void or self.unfit:
                return
        if self._holdings_differ:
            try:
                call(self.ranked)
            finally:
                self._rehearsed.set()

    def store(self, interrupted: Callable[[], bool]) -> RoundStore:
        """Wait until all ranks have checked in. Return the store. Raises Interrupted or
        UnfitModel.
        """
        while True:
            if self.unfit:
                raise UnfitModel(
                    f"The model of this process (rank {self.place.rank} of round "
                    f"{self.place.generation}) has other parameters, shapes or "
                    "types than its peers'. All workers must run the same script with the same "
                    "arguments; was it changed meanwhile?"
                )
            if interrupted() or self.void or self._lost:
                raise Interrupted("This round is void; a newer one follows.")
            if self.everyone:
                return RoundStore(self._store, interrupted)
            time.sleep(_POLL_S)
