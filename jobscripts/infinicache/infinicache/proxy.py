"""A proxy: the table of its pool, and the coordination of puts, evictions, repairs, drains and
rebalancing.

:mod:`infinicache.table` decides. Objects do not pass through the proxy: clients and nodes exchange
chunks directly. The proxy's state may be lost: a new proxy waits until the members have registered
with their chunks, and continues from there. Repair and rebalancing share one limit of bytes per
second. The chunks of a leaver move before both and without a limit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from infinicache import moves
from infinicache.backup import peer_of
from infinicache.codec import Code
from infinicache.connection import Peers
from infinicache.demand import KeyDemand
from infinicache.entries import Entry
from infinicache.hot import (
    ReadLoad,
    choose_copy,
    copy_names,
    copy_source,
    is_copy,
    original_of,
    readable,
)
from infinicache.loads import Loads
from infinicache.mover import Mover, Upkeep
from infinicache.objects import MAX_KEY_BYTES, CacheError, StoredObject, Unavailable
from infinicache.placement import NodeArrivals
from infinicache.proxies import Ring
from infinicache.silence import Silence
from infinicache.table import Table
from malletrain.waits import happens

REGISTRATION_WAIT_S = 3.0
"""Maximum time for which a new proxy waits for members that have not registered, seconds."""
MAX_PUT_S, MAX_LARGE_PUT_S = 60.0, 300.0
"""Time after which an unfinished put is given up, seconds: besides that of its bytes, and in all.
Until then nobody else has its memory, even if its client has died.
"""
MIN_PUT_BYTES_S = 50e6
"""Minimum rate at which a client puts an object, bytes per second."""
MAX_PARALLEL_MOVES = 4
IDLE_PAUSE_S = 0.25
log = logging.getLogger("infinicache")
Handler = Callable[..., Coroutine[Any, Any, Any]]


def put_limit_s(size: int) -> float:
    """Return the time after which an unfinished put of ``size`` bytes is given up, seconds."""
    return min(MAX_PUT_S + size / MIN_PUT_BYTES_S, MAX_LARGE_PUT_S)


class Proxy:
    """The proxy role of one process. It is inactive while no slot belongs to this process.

    Args:
        peers: connections to the nodes.
        move_bytes_s: rate of repair and rebalancing, bytes per second.
        reserve: share of the memory that puts leave free.
        slots: number of slots of all proxies, among which the keys are divided.
    """

    def __init__(
        self,
        peers: Peers,
        *,
        move_bytes_s: float = 200e6,
        reserve: float = 0.0,
        slots: int = 1,
    ) -> None:
        self.table = Table(reserve=reserve)
        self.demand = KeyDemand()
        self._arrivals = NodeArrivals()
        self._reserve = reserve
        self._mover = Mover(peers, lambda: self.table)
        self._rate = move_bytes_s
        self._ring = Ring(slots)
        self._slots: set[int] = set()
        self._members: tuple[str, ...] = ()
        self._leaving: frozenset[str] = frozenset()
        self._registered: set[str] = set()
        self._slot_of: dict[str, int | None] = {}
        """Node → its slot."""
        self._silence = Silence()
        self._settled = asyncio.Event()
        self._settle_at = 0.0
        self._upkeep = Upkeep(self._mover, self._drop)
        self.read_load = ReadLoad()
        self._writing: dict[str, tuple[float, int]] = {}
        """Key of an unfinished put → when it began (time.monotonic), and its size in bytes."""
        self.backup_of: dict[str, str] = {}
        """Node → the one that keeps copies of its chunks, as the node says."""
        self._peers_of: dict[str, str | None] = {}
        """Node → the one that is to keep them."""
        self._locks: dict[str, asyncio.Lock] = {}
        self._loads = Loads()
        self._worker: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Future[Any]] = set()
        self._drops: set[asyncio.Future[Any]] = set()
        """Requests to drop lost objects that nodes have not answered yet."""

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """Return the requests that the proxy answers. Those that change something go on to their
        end if the caller is gone: half a change would leave memory that nobody counts.
        """
        changes: dict[str, Handler] = {
            "begin": self._begin,
            "commit": self._commit,
            "delete": self._delete,
            "report": self._report,
        }
        return {
            "register": self._register,
            "beat": self._beat,
            "find": self._find,
            "drain": self._drain,
            "demand": self._demand,
            "summary": self._summary,
            **{name: self._to_its_end(handle) for name, handle in changes.items()},
        }

    def _to_its_end(self, handle: Handler) -> Handler:
        async def handle_wholly(*values: Any, **arguments: Any) -> Any:
            task = self._soon(handle(*values, **arguments))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            return await asyncio.shield(task)

        return handle_wholly

    def close(self) -> None:
        """Stop the background work."""
        for task in (*self._tasks, *self._drops, *([self._worker] if self._worker else [])):
            task.cancel()

    # --- members ---

    def view(
        self,
        members: Sequence[str],
        leaving: Iterable[str],
        slots: Sequence[int],
        lasts: Mapping[str, float] | None,
    ) -> None:
        """Set the current members.

        Args:
            members: addresses of all members.
            leaving: addresses of those that are about to leave.
            slots: slots that this process serves.
            lasts: address → time that its node is expected to stay, seconds; may lack nodes.
                None: as before.
        """
        if lasts is not None:
            self._arrivals.update_lifetimes(lasts, time.monotonic())
        departed = set(self._members) - set(members)
        self._members, self._leaving = tuple(members), frozenset(leaving)
        if not slots:
            self._slots, self._registered, self._slot_of, self._peers_of = set(), set(), {}, {}
            self.table, self.demand = Table(reserve=self._reserve), KeyDemand()
            self._settled.clear()
            return
        gained, released = set(slots) - self._slots, self._slots - set(slots)
        self._slots = set(slots)
        if released:
            self._release()
        for address in departed & {*self._registered, *self.table.nodes}:
            self._arrivals.remove(address)
            self._lose(address)
        if gained:  # slots that another process had: the chunks of its nodes are not known yet
            self._settled.clear()
            self._registered, self._peers_of = set(), {}
            self._settle_at = time.monotonic() + REGISTRATION_WAIT_S
            if self._worker is None:
                self._worker = asyncio.get_running_loop().create_task(self._work())
        for address, node in self.table.nodes.items():
            node.leaving = address in self._leaving
        self._settle()

    def _release(self) -> None:
        """Forget the keys and the nodes of the slots that another process serves now. The other
        nodes drop what they have of these keys, so that it never returns in place of what that
        process stores.
        """
        elsewhere = {a for a in self.table.nodes if self._slot_of.get(a) not in self._slots}
        for entry in [e for e in self.table.objects.values() if not self._serves(e.key)]:
            self.table.remove(entry.key)
            entry.at = {i: node for i, node in entry.at.items() if node not in elsewhere}
            self._drop_soon([entry])
        for address in elsewhere:
            self._lose(address)

    def _lose(self, address: str) -> None:
        """Forget a node that has left, or belongs to another proxy."""
        self._registered.discard(address)
        self._silence.end(address)
        self._slot_of.pop(address, None)
        self._peers_of.pop(address, None)
        self._mover.undropped.pop(address, None)
        degraded, lost = self.table.lose_node(address, self.backup_of.pop(address, None))
        self._upkeep.add(degraded)
        if lost:
            log.warning("%d objects were lost with the node at %s", len(lost), address)
            self._drop_soon(lost)

    def _serves(self, key: str) -> bool:
        """Return whether this process is the proxy of a key, or of the object of a copy."""
        return self._ring.slot(original_of(key)) in self._slots

    def _settle(self) -> None:
        if self._settled.is_set() or not self._slots:
            return
        if set(self._members) <= self._registered or time.monotonic() >= self._settle_at:
            self._drop_soon(self.table.settle())
            self._settled.set()
            self._upkeep.find_degraded(self.table)

    def _register(
        self,
        address: str,
        capacity: int,
        slot: int | None,
        objects: list[Any],
        leaving: bool,
        name: str = "",
        age_s: float = 0.0,
    ) -> dict[str, Any]:
        if not self._slots:
            raise CacheError("This node is no proxy.")
        if slot not in self._slots and address in self.table.nodes:
            self._lose(address)  # another process has its address, such as by --port
        self._registered.add(address)
        self._silence.end(address)
        self._slot_of[address] = slot
        now = time.monotonic()
        self._arrivals.add(address, name, age_s, now)
        stale: list[tuple[str, str, int]] = []
        if slot in self._slots:
            inventory = []
            for stored in msgspec.convert(objects, list[StoredObject]):
                if self._serves(stored.key):
                    inventory.append(stored)
                else:  # from when one process served both slots: it could replace what is newer
                    stale.append((address, stored.key, stored.version))
            is_known = address in self.table.nodes
            degraded, lost = self.table.reconcile(address, inventory) if is_known else ([], [])
            self._upkeep.add(degraded)
            self._drop_soon(lost)
            self.table.add_node(address, capacity, self._arrivals.prospect(address, now))
            self.table.nodes[address].leaving = leaving
            stale += self.table.restore(address, inventory, self._settled.is_set())
        for node, key, version in stale:
            if node != address:
                self._soon(self._mover.drop(node, [(key, version)]))
        if self._settled.is_set():
            self._upkeep.find_degraded(self.table)  # the new node brings room
        self._settle()
        return {
            "drop": [(key, version) for node, key, version in stale if node == address],
            "served": slot in self._slots,
        }

    def _beat(self, address: str, number: int, backup: str | None = None) -> dict[str, Any]:
        if backup is not None:
            self.backup_of[address] = backup
        self._silence.end(address)
        self._settle()
        if address in self._mover.undropped:
            self._soon(self._mover.drop_again(address))
        if (node := self.table.nodes.get(address)) is not None:
            node.prospect = self._arrivals.prospect(address, time.monotonic())
        peer = peer_of(self.table.nodes, address, backup, self._peers_of)
        self._peers_of[address] = peer
        return {
            "registered": address in self._registered,
            "peer": peer,
            "served": self._slot_of.get(address) in self._slots,
        }

    async def _ready(self, key: str = "") -> None:
        if not self._slots:
            raise Unavailable("This node is no proxy; ask for the topology again.")
        if is_copy(key):
            raise CacheError(f"The key {key!r} is reserved for the cache; use another.")
        if len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
            raise CacheError(f"The key has more than {MAX_KEY_BYTES} bytes.")
        self._require_served(key)
        if not self._settled.is_set():
            within_s = max(0.05, self._settle_at - time.monotonic())
            if not await happens(self._settled, within_s):
                self._settle()
            self._require_served(key)

    def _require_served(self, key: str) -> None:
        """Raise Unavailable if another process is the proxy of this key, by now."""
        if key and not self._serves(key):
            raise Unavailable(
                f"This node is not the proxy of {key!r}; ask for the topology again, and give all "
                "nodes the same --proxies."
            )

    # --- objects ---

    def _lock(self, key: str) -> asyncio.Lock:
        """Return the lock that allows one put or delete of a key at a time."""
        if len(self._locks) > 10_000:
            self._locks = {k: lock for k, lock in self._locks.items() if lock.locked()}
        return self._locks.setdefault(key, asyncio.Lock())

    async def _begin(
        self,
        key: str,
        size: int,
        code: list[int],
        stripe_bytes: int,
        copy: str = "",
        loaded_s: float | None = None,
        miss: tuple[str, float] | None = None,
    ) -> dict[str, Any]:
        """Begin a put. ``loaded_s``: how long ago the client missed the key, if it stores what it
        has loaded since: that may be older than what was put or deleted meanwhile. ``miss``: of the
        answer to that get.
        """
        missed_at = None if loaded_s is None else self._loads.missed_at(loaded_s, miss)
        await self._ready(key)
        present_nodes: set[str] = set()
        async with self._lock(key):
            if copy:
                code, stripe_bytes, present_nodes = copy_source(self.table, key, copy)
                if copy in self.table.objects:
                    raise CacheError(f"Another reader of {key!r} makes that copy.")
                key = copy
            else:
                present = self.table.objects.get(key)
                if missed_at is not None and self._loads.changed_since(key, present, missed_at):
                    raise CacheError(f"{key!r} was put or deleted while it was loaded.")
                await self._invalidate(key)
            if self._drops:
                await asyncio.wait(self._drops)
            self._require_served(key)  # nodes were waited for
            version = max(self.table.newest + 1, time.time_ns())
            evicted: list[Entry] = []
            try:
                entry = self.table.begin(
                    key, size, Code(*code), stripe_bytes, version, evicted, present_nodes
                )
            finally:
                await self._drop(evicted)
            self._writing[key] = time.monotonic(), size
        if not copy:
            taken = entry.shape.share * entry.shape.code.n
            self.demand.write(key, size, taken, time.monotonic())
        return {
            "key": key,
            "version": version,
            "shape": msgspec.to_builtins(entry.shape),
            "at": entry.at,
        }

    async def _invalidate(self, key: str) -> bool:
        """Let the nodes drop an object and its copies. Return whether it existed. Raises CacheError
        if so many nodes do not answer that the object could be restored from them.
        """
        entry = self.table.objects.get(key)
        if entry is None:
            return False
        copies = [c for n in copy_names(key, entry.version) if (c := self.table.objects.get(n))]
        failed = await self._drop([entry, *copies])
        for copy in copies:  # an old copy is never read, even if nodes still have it
            self.table.remove(copy.key)
        if sum(node in failed for node in entry.at.values()) >= entry.shape.d:
            raise CacheError(
                f"{key!r} cannot be replaced or deleted now: the nodes that hold it do not "
                "answer; try again in a moment."
            )
        self.table.discard(entry)
        return True

    def _drop_soon(self, entries: Sequence[Entry]) -> None:
        """Let the nodes drop objects that are lost or incomplete. Puts wait for it, because the
        memory of the remaining chunks is in use until then.
        """
        if here := [entry for entry in entries if entry.at]:
            self._drops.add(task := asyncio.ensure_future(self._drop(here)))
            task.add_done_callback(self._drops.discard)

    def _give_up(self, entry: Entry) -> None:
        """Forget an object that is lost or was not finished, and have the nodes drop it."""
        self.table.discard(entry)
        self._drop_soon([entry])

    async def _drop(self, entries: Sequence[Entry]) -> set[str]:
        """Let the nodes drop objects. Return the nodes that have not answered."""
        items: dict[str, list[tuple[str, int]]] = {}
        for entry in entries:
            for node in set(entry.at.values()):
                items.setdefault(node, []).append((entry.key, entry.version))
        acknowledged = await asyncio.gather(
            *(self._mover.drop(node, todo) for node, todo in items.items())
        )
        return {node for node, ok in zip(items, acknowledged, strict=True) if not ok}

    async def _commit(self, key: str, version: int, missing: list[int]) -> dict[str, Any]:
        await self._ready()
        entry = self.table.objects.get(key)
        if entry is None or entry.version != version:
            raise CacheError(
                f"The put of {key!r} was overtaken by another put, by a delete, or by the loss of "
                "the proxy's memory."
            )
        self._writing.pop(key, None)
        if len(missing) > entry.shape.p:
            self._give_up(entry)
            raise Unavailable(
                f"{key!r} was not put: {len(missing)} of its {entry.shape.code.n} chunks could "
                "not be stored."
            )
        late = {i: node for i, node in entry.at.items() if i in missing}
        for index, node in late.items():
            self.table.set_chunk(entry, index, None)
            self._soon(self._mover.forget(node, key, version, index))
        if entry.protection < 0:  # nodes were lost meanwhile, too
            self._give_up(entry)
            raise Unavailable(f"{key!r} was not put: its nodes were lost meanwhile.")
        entry.committed, entry.committed_at = True, time.monotonic()
        if entry.protection < entry.shape.p:
            self._upkeep.add([entry])
        return {"protection": entry.protection}

    async def _find(self, key: str, spread: bool = False) -> dict[str, Any]:
        """Return the place of an object. ``spread``: also accept one of its copies; the answer
        contains its name (``name``) and, if another copy is needed, the name of that (``copy``).
        """
        await self._ready(key)
        now = time.monotonic()
        entry = of = self.table.objects.get(key)
        self.demand.read(key, now, of.shape.size if of is not None else 0)
        if entry is None or of is None or not readable(of):
            return {"key": key, "exists": False, "miss": self._loads.miss()}
        self.table.touch(of)
        self.read_load.read(key, of.shape.size, now)
        next_name = ""
        if spread:
            entry, next_name = choose_copy(self.table, of, self.read_load)
            self.table.touch(entry)
        return {
            "key": key,
            "exists": True,
            "version": entry.version,
            "shape": msgspec.to_builtins(entry.shape),
            "at": entry.at,
            "protection": entry.protection,
            "name": entry.key,
            "of": of.version,
            "copy": next_name,
        }

    async def _delete(self, key: str) -> dict[str, Any]:
        await self._ready(key)
        self.demand.forget(key)
        async with self._lock(key):
            self._require_served(key)
            self._loads.delete(key)
            return {"exists": await self._invalidate(key)}

    def _demand(self) -> dict[str, Any]:
        """Return the demand so far, as :class:`infinicache.demand.DemandCurve`."""
        now = time.monotonic()
        return {
            "curve": msgspec.to_builtins(self.demand.curve(now)),
            "observed_s": self.demand.observed_s(now),
        }

    async def _report(self, key: str, version: int, bad: dict[int, str]) -> dict[str, Any]:
        """Handle a client's report that it could not read chunks from nodes. Chunks that their
        nodes do not have either are rebuilt unless they have been moved meanwhile. The others
        stay: a client may be unable to read anything, such as one without descriptors.
        """
        before = self.table.objects.get(key)
        if before is None or before.version != version:
            return {}
        bad = {i: node for i, node in bad.items() if before.at.get(i) == node}
        intact = await self._intact_of(key, version, bad)
        entry = self.table.objects.get(key)
        if entry is None or entry.version != version or not entry.committed:
            return {}
        # All of the table at once: while nodes are waited for, another put may take the key.
        wrong = [i for i, node in bad.items() if entry.at.get(i) == node and i not in intact]
        for index in wrong:
            self.table.set_chunk(entry, index, None)
        if entry.unrecoverable:
            self.table.lost += 1
            self._give_up(entry)
        elif wrong:
            self._upkeep.add([entry])
        for index in wrong:
            await self._mover.forget(bad[index], key, version, index)
        return {}

    async def _intact_of(self, key: str, version: int, bad: Mapping[int, str]) -> set[int]:
        """Return which of these chunks their nodes have undamaged."""
        indices: dict[str, list[int]] = {}
        for index, node in bad.items():
            if node in self.table.nodes:
                indices.setdefault(node, []).append(index)
        checks = (self._mover.intact(node, key, version, of) for node, of in indices.items())
        return set[int]().union(*await asyncio.gather(*checks))

    def _summary(self) -> dict[str, Any]:
        return {
            **self.table.summary(),
            "moved_bytes": dict(self._mover.moved_bytes),
            "waiting_repairs": len(self._upkeep),
        }

    # --- moving chunks ---

    async def _drain(self, address: str) -> dict[str, Any]:
        """Hand over the chunks of a leaver, several at once, until all are moved or the leaver is
        gone.
        """
        await self._ready()
        if address in self.table.nodes:
            self.table.nodes[address].leaving = True
        # A drain may be cancelled, what it has begun may not.
        await asyncio.shield(self._soon(self._drop(moves.make_room_for_leavers(self.table))))
        before, todo = self._mover.moved_bytes["drain"], deque(moves.drain(self.table, address))

        async def move_next() -> None:
            while todo and address in self.table.nodes:
                work = self._mover.carry_out(todo.popleft(), "drain")
                await asyncio.shield(self._soon(work))

        await asyncio.gather(*(move_next() for _ in range(MAX_PARALLEL_MOVES)))
        return {"bytes": self._mover.moved_bytes["drain"] - before}

    def _soon(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start ``work`` without waiting for it."""
        self._tasks.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._tasks.discard)
        return task

    async def _work(self) -> None:
        """Repair and rebalance within the rate limit, and give up unfinished puts."""
        while True:
            try:
                spent = await self._one_piece_of_work()
            except Exception:
                log.exception("repair failed")
                spent = 0
            await asyncio.sleep(max(spent / self._rate, 0.0 if spent else IDLE_PAUSE_S))

    def _lose_silent_strangers(self, now: float) -> None:
        """Forget nodes that are no members, do not register any more and do not answer: such as
        one that was cut off from MalleTrain, and whose end is not announced.
        """
        strangers = {*self._registered, *self.table.nodes} - set(self._members)
        for address in self._silence.overdue(strangers, now):
            self._soon(self._lose_unless_alive(address))

    async def _lose_unless_alive(self, address: str) -> None:
        is_alive = await self._mover.is_alive(address)
        if not is_alive and self._silence.lasts(address) and address not in self._members:
            self._arrivals.remove(address)
            self._lose(address)
        self._silence.end(address)

    async def _one_piece_of_work(self) -> int:
        if not self._slots:
            return 0
        self._settle()
        if not self._settled.is_set():
            return 0
        now = time.monotonic()
        self._lose_silent_strangers(now)
        for key, (began, size) in [*self._writing.items()]:
            if now - began <= put_limit_s(size):
                continue
            del self._writing[key]
            if (entry := self.table.objects.get(key)) is not None and not entry.committed:
                self._give_up(entry)
        return await self._upkeep.one_piece(self.table)
