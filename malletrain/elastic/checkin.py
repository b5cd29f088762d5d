"""The way to a round while this process still trains in the one before: its store, and whether
everybody is there.

Decides when the group before may be left: not before all ranks of the next one have checked in with
the same model. How the group is formed then is decided by :mod:`malletrain.elastic.group`.
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

from malletrain.elastic import sockets
from malletrain.elastic.errors import Interrupted, UnfitModel
from malletrain.elastic.link import Place

_POLL_S = 0.002
_ABSENT = b"\0no such key"
"""What a comparison answers for a key that is not there."""
_WAIT = timedelta(seconds=300)
_REHEARSAL_S = 0.5
"""Between two looks whether the round of a rehearsal is void."""


class RoundStore(dist.Store):
    """The store of one round: every wait ends at once when ``interrupted`` says so, and lasts as
    long as it must otherwise.
    """

    def __init__(self, inner: Any, interrupted: Callable[[], bool]) -> None:
        super().__init__()
        self._inner = inner
        self.interrupted = interrupted
        self._awaited: dict[str, bytes] = {}
        """Keys that were waited for: who waits for one gets it next. The store is at another node,
        so nothing is asked twice.
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
        # One question and one answer; a wait and a get of TCPStore are three of each.
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
        """Waits are interrupted, not limited."""


def _came(store: Any, key: str) -> bool:
    """Wait for a key for long, without asking again and again. Returns whether it came."""
    try:
        store.wait([key], _WAIT)
    except dist.DistStoreError:
        return False
    return True


class RoomMaker(Protocol):
    """What this process holds, or will."""

    def for_joiners(self) -> str:
        """What joiners need memory for."""

    def make_room(self, data: str) -> None:
        """Have that memory ready, where there is no state yet."""


class CheckIn:
    """The way to a round, gone in a thread while this process still trains: connect to the store
    and say so, when the memory for the state of the others is ready (``rooms``).

    ``everyone`` is true once all ranks have done that; only then may anybody leave the group
    before. ``failed`` is called, in that thread, when the store cannot be reached; nobody is waited
    for any more then.

    With ``holding``, what this process has of the state, each member tells the others its own, and
    ``arrange`` returns the rank of each from all of them, in the order of their places: the last to
    come calls it. As long as this process ``rehearses`` it says that it is there only when
    :meth:`rehearse` is over, where the holdings differ.
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
        """With the rank by that order, once everyone is there."""
        self._holding = holding
        self._arrange = arrange
        self._failed = failed
        self._signature = signature
        self.everyone = False
        self.void = False
        self._lost = False
        """The store is gone, or this place: not everyone will ever be there."""
        self.unfit = False
        """The model here has other tensors than that of rank 0."""
        self._store: Any = None
        self._rehearses = rehearses
        self._differ = False
        """The members' holdings differ."""
        self._ranked, self._rehearsed = threading.Event(), threading.Event()
        sockets.spare(place.port)
        threading.Thread(
            target=self._go, name=f"malletrain-round-{place.generation}", daemon=True
        ).start()

    def _go(self) -> None:
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
                # another process had this place and died; the round cannot be formed any more
                self._lost = True
                return
            if self._holding is not None and not self._ordered(store):
                return
            if store.add("here", 1) == self.place.size:
                store.set("all", "")
            self._store = store
            while not self.void and not _came(store, "all"):
                pass
            self.everyone = not self.void
        except (
            Exception
        ):  # whatever the store says: this way is closed, and the daemon forms another round
            self._lost = True
            if not self.void:
                self._failed()

    def _make_room(self, data: str) -> None:
        try:
            self._rooms.make_room(data)
        except (ValueError, TypeError, AttributeError, MemoryError, RuntimeError):
            pass  # then it is allocated when it is needed, where a lack of memory is told

    def _ordered(self, store: Any) -> bool:
        """Tell the others the holding, and learn the rank; False when the round is void."""
        size = self.place.size
        store.set(f"holding/{self.place.rank}", self._holding)
        if store.add("holding", 1) == size:
            holdings = [store.get(f"holding/{rank}").decode() for rank in range(size)]
            order = self._arrange(holdings) if self._arrange is not None else list(range(size))
            store.set("order", json.dumps([order, len(set(holdings)) > 1]))
        while not self.void and not _came(store, "order"):
            pass
        if self.void:
            return False
        order, differ = json.loads(store.get("order"))
        self.ranked = replace(self.place, rank=order[self.place.rank])
        self._differ = differ
        self._ranked.set()
        # Who had no state may have it by now, and trains.
        while differ and self._rehearses() and not self.void:
            if self._rehearsed.wait(_REHEARSAL_S):
                break
        return not self.void

    def rehearse(self, call: Callable[[Place], None], interrupted: Callable[[], bool]) -> None:
        """In the training thread of who rehearses: ``call`` with the place that it will have, while
        the others train. Returns at once where there is nobody who trains.
        """
        while not self._ranked.wait(_POLL_S):
            if interrupted() or self.void or self.unfit:
                return
        if self._differ:
            try:
                call(self.ranked)
            finally:
                self._rehearsed.set()

    def store(self, interrupted: Callable[[], bool]) -> RoundStore:
        """The store, once all are there. Raises Interrupted, or UnfitModel."""
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
