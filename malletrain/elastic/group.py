"""Process groups that can be left, given up and formed again within one process.

Decides how a group is formed over a store that can be interrupted, how all its ranks agree to leave it after the same step, and how a
collective that waits for a vanished peer is ended: gloo has no abort, so the sockets of the group are shut down, which every operation on
them notices at once; NCCL's communicators are aborted. It decides neither when (:mod:`malletrain.elastic.run`) nor who is in a round.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from malletrain.blame import PEER_LOST
from malletrain.elastic.link import Place

CONNECT_TIMEOUT_S = 20.0
"""For the connections between peers whose addresses are known; waiting for peers to come is not limited but interrupted."""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
CLOSE_LATER_S = 1.0
_POLL_S = 0.002


class Interrupted(RuntimeError):
    """What was going on is void: a newer round came, or a member of this one is lost."""


class UnfitModel(RuntimeError):
    """This process cannot join: its model differs from its peers'."""


class RoundStore(dist.Store):
    """The store of one round: every wait ends at once when ``interrupted`` says so, and lasts as long as it must otherwise."""

    def __init__(self, inner: Any, interrupted: Callable[[], bool]) -> None:
        super().__init__()
        self._inner = inner
        self._interrupted = interrupted

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        while not self._inner.check(list(keys)):
            if self._interrupted():
                raise Interrupted("This round is void; a newer one follows.")
            time.sleep(_POLL_S)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._inner.get(key))

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


class CheckIn:
    """The way to a round, gone in a thread while this process still trains: connect to the store and say so.

    ``everyone`` is true once all ranks have done that; only then may anybody leave the group before.
    """

    def __init__(self, place: Place, signature: str) -> None:
        self.place = place
        self._signature = signature
        self.everyone = False
        self.problem: str | None = None
        self.void = False
        self.unfit = False
        """The model here has other tensors than that of rank 0."""
        self._store: Any = None
        self._connected = threading.Event()
        threading.Thread(target=self._go, name=f"malletrain-round-{place.generation}", daemon=True).start()

    def _go(self) -> None:
        try:
            store = dist.TCPStore(
                self.place.host, self.place.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
            )
            if self.place.rank == 0:
                store.set("signature", self._signature)
            elif store.get("signature").decode() != self._signature:
                self.unfit = True
                return
            if store.add("here", 1) == self.place.size:
                store.set("all", "1")
            self._store = store
            self._connected.set()
            while not self.void and not store.check(["all"]):
                time.sleep(_POLL_S)
            self.everyone = not self.void
        except Exception as error:  # whatever the store says: this way is closed, and the daemon forms another round
            self.problem = str(error)
            self._connected.set()

    def store(self, interrupted: Callable[[], bool]) -> RoundStore:
        """The store, once all are there. Raises Interrupted, or UnfitModel."""
        while not self.everyone:
            if self.unfit:
                raise UnfitModel(
                    f"The model of this process (rank {self.place.rank} of round {self.place.generation}) has other parameters, shapes or "
                    "types than its peers'. All workers must run the same script with the same arguments; was it changed meanwhile?"
                )
            if interrupted() or self.void:
                raise Interrupted("This round is void; a newer one follows.")
            time.sleep(_POLL_S)
        return RoundStore(self._store, interrupted)


def is_peer_loss(error: BaseException) -> bool:
    """Whether ``error`` is what a collective says when a peer is gone."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | Interrupted):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or any(words in text for words in PEER_LOST))


def _sockets() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found[int(name)] = target
    return found


def _shut_down(fd: int, identity: str) -> None:
    """Shut one TCP connection down, if ``fd`` still is it."""
    try:
        if os.readlink(f"/proc/self/fd/{fd}") != identity:
            return
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # never a listening socket: gloo ends the process over that
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


class Group:
    """The default process group of one round.

    Args:
        place: this process in the round.
        store: the round's store, None under torchrun and for a round of one.
        cuda: whether gradients live on GPUs: collectives on them go by NCCL, the others by gloo.
    """

    def __init__(self, place: Place, store: RoundStore | None, cuda: bool) -> None:
        self.place = place
        self.broken = False
        """A peer is lost: nothing more can be done together."""
        self._flag = torch.zeros(2, dtype=torch.int32)
        self._work: Any = None
        self._sockets: dict[int, str] = {}
        self._held: Any = None
        self._own = not dist.is_initialized()
        if place.size == 1 and store is None and "MASTER_ADDR" not in os.environ:
            self._own = False
            return  # plain python: nothing to be distributed over
        if self._own:
            self._form(store, cuda)

    def _form(self, store: RoundStore | None, cuda: bool) -> None:
        before = _sockets()
        backend = "cpu:gloo,cuda:nccl" if cuda and dist.is_nccl_available() else "gloo"
        options: dict[str, Any] = {} if store is None else {"store": store, "rank": self.place.rank, "world_size": self.place.size}
        dist.init_process_group(backend, timeout=timedelta(seconds=CONNECT_TIMEOUT_S), **options)
        self._held = dist.distributed_c10d._get_default_group()
        dist.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT, self._held)
        # What was opened meanwhile are gloo's connections (and its listener, which is never touched).
        self._sockets = {fd: name for fd, name in _sockets().items() if before.get(fd) != name}

    @property
    def several(self) -> bool:
        """Whether there are peers."""
        return self.place.size > 1 and dist.is_initialized()

    def begin_step(self, go: bool, stop: bool) -> None:
        """Start to ask all ranks whether this step is the last of the group (``go``) or of the loop (``stop``); the answer travels while
        the step computes."""
        self._flag[0], self._flag[1] = int(go), int(stop)
        if self.several and not self.broken:
            try:
                self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, async_op=True)
            except RuntimeError:
                self.broken = True

    def end_step(self) -> tuple[bool, bool]:
        """The answers, the same on all ranks. Raises what the collective raises when a peer is lost."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        go, stop = self._flag.tolist()
        return bool(go), bool(stop)

    def abort(self) -> None:
        """End every collective under way here, from any thread; the peers notice too."""
        self.broken = True
        for fd, identity in self._sockets.items():
            _shut_down(fd, identity)
        if self._held is not None and dist.is_initialized() and "nccl" in dist.get_backend_config(self._held):
            try:
                self._held.abort()
            except RuntimeError:
                pass

    def leave(self) -> None:
        """Make room for the next group. The connections stay until :meth:`close`: a peer may not have read all of the last step yet."""
        self._work = None
        if self._held is not None and dist.is_initialized():
            if self.broken:
                self.abort()
            dist.destroy_process_group()

    def close(self) -> None:
        """Drop the connections, a little later: taking a group down holds the interpreter for some hundredths of a second."""
        held, self._held = [self._held], None
        if held[0] is not None:
            timer = threading.Timer(CLOSE_LATER_S, held.clear)
            timer.daemon = True
            timer.start()
