"""Process groups that one process can leave, abort and form again.

Decides how a group is formed over a store whose waits can be interrupted, how all its ranks agree
to leave it after the same step, and how a collective that waits for a lost peer is ended. gloo has
no abort, so the sockets of the group are shut down. Every operation on them then fails at once; an
operation that gloo loses track of is abandoned in a thread. NCCL's communicators are aborted.
Decides neither when a group changes (:mod:`malletrain.elastic.membership`) nor which processes are
in a round.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from malletrain.elastic import same_on_all, sockets, step_exchange
from malletrain.elastic.checkin import RoundStore
from malletrain.elastic.errors import ElasticError, Interrupted, MismatchError
from malletrain.elastic.link import Place
from malletrain.elastic.step_exchange import StepWishes
from malletrain.protocol import env
from malletrain.training.step_times import counted_as
from malletrain.training.torch_private import (
    forget_failed_group,
    require,
    set_backend_timeout,
    set_timeout,
)

CONNECT_TIMEOUT_S = 20.0
"""Timeout for connections between peers whose addresses are known. The wait for peers to check in
has no timeout; it is interrupted when the round is void.
"""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
CLOSE_DELAY_S = 1.0
"""Delay before the connections of a group that was left are closed, seconds."""
ABANDONED_POLL_S = 0.5
_POLL_S = 0.002
_MARK = (8191.5, -8191.5)
"""Sent with the requests of a step. A maximum over all ranks leaves it unchanged if every rank has
sent it. The values are unlikely in a collective of a script. On groups without a fence (CUDA), any
other result shows that a collective of the script was matched with that of a step.
"""


def connect(
    store: Any, rank: int, size: int, timeout: timedelta, owner: Group | None = None
) -> Any:
    """Return the gloo backend of a default group, or of a group within it.

    If a peer is lost meanwhile, gloo waits for it until ``timeout``. This function stops waiting
    when the round is void, and abandons the wait in a thread. The process waits for that thread
    before it exits: if gloo returned to an interpreter that is shutting down, the process would
    abort, and the job would count as failed.

    Args:
        store: store over which the peers exchange addresses.
        rank: rank of this process in the new group.
        size: number of its ranks.
        timeout: timeout of its collectives.
        owner: default group of the round, which the new group ends with; None for the default group
            itself.

    Raises:
        Interrupted: the round is void.
    """
    backends: list[Any] = []
    before = sockets.open_sockets()
    # torch gives a mesh a timeout of half an hour
    connect_timeout = min(timeout, timedelta(seconds=CONNECT_TIMEOUT_S))
    task = _AbandonableCall(
        lambda: backends.append(dist.ProcessGroupGloo(store, rank, size, connect_timeout)),
        daemon=False,
    )
    round_is_void = _round_is_void
    while not task.over.wait(_POLL_S):
        if round_is_void():
            raise Interrupted("This round is void; a newer one follows.")
    if task.error is not None:
        raise task.error
    if timeout != connect_timeout:
        set_backend_timeout(backends[0], timeout)
    if owner is not None:
        owner.adopt(backends[0], before)
    return backends[0]


PLAIN_BACKEND = "malletrain_gloo"
"""gloo backend of groups with GPUs. It has no fence, and the script waits in gloo itself."""
_round_is_void: Callable[[], bool] = lambda: False  # noqa: E731
"""Returns whether the round that is being formed is void. It is a global because torch passes a
backend nothing but its store.
"""
_newest: Callable[[], Group | None] = lambda: None  # noqa: E731
dist.Backend.register_backend(PLAIN_BACKEND, connect, devices=["cpu", "cuda"])
_thread_state = threading.local()
"""State of this thread. ``library``: it calls collectives of the library. ``abandonable``: it runs
a call of :meth:`Group.call_abandonable`.
"""


def newest() -> Group | None:
    """Return the default group that was formed last, or is being formed. Groups that are made now
    belong to it.
    """
    return _newest()


@contextlib.contextmanager
def library_collectives() -> Iterator[None]:
    """Within this context, collectives of this thread belong to the library, not to the script."""
    before = getattr(_thread_state, "library", False)
    _thread_state.library = True
    try:
        yield
    finally:
        _thread_state.library = before


class Group:
    """The default process group of one round.

    The ranks may be at different places of the script: a process that joins a running training
    starts at the top. A collective that the script calls there must not be matched with a
    collective that other ranks call in a step, because gloo matches collectives by their order
    only. Therefore a collective of the script outside of a step is preceded by the same small
    collective as a step (:meth:`fence`). All ranks then know whether every rank is in a step or in
    a collective of the script before any data of the script is sent.

    If a connection breaks at the wrong moment, gloo may lose track of an operation, and wait for it
    until its timeout. Therefore no thread of the script waits for gloo itself. It waits for a
    future, which :meth:`abort` also completes. An operation that gloo has lost track of is
    abandoned together with its group until it times out (:func:`_keep_until_done`).

    Args:
        place: membership of this process in the round.
        store: store of the round; None under torchrun and for a round of one process.
        cuda: whether gradients are on GPUs. Their collectives then use NCCL, all others gloo. With
            ``MALLETRAIN_GPU_BACKEND=gloo`` all use gloo.
        backend: backend for collectives that use gloo, in a round with a store.
        alone_too: whether a single process under plain Python needs a group.
        exchange: version of the numbers that the ranks exchange; -1 for the newest.
    """

    def __init__(
        self,
        place: Place,
        store: RoundStore | None,
        cuda: bool,
        backend: str = PLAIN_BACKEND,
        alone_too: bool = False,
        exchange: int = -1,
    ) -> None:
        self.place = place
        self.layout = step_exchange.EXCHANGES[exchange]
        """The numbers that the ranks exchange."""
        self.broken = False
        """A peer is lost, so that no further collective can succeed."""
        self.exchanges = 0
        """Number of gradient averages that were started."""
        self.rates_differ = False
        """The last answer shows that the ranks made their last update at different learning rates.
        """
        self.batch_sizes_differ = False
        """The last answer shows that the ranks train with different global batch sizes."""
        self.changed = (same_on_all.UNKNOWN, same_on_all.UNKNOWN)
        """The highest and the lowest number of changed objects in the last answer."""
        length = len(self.layout.wishes) + 2 * len(self.layout.compared) + 2 + len(_MARK)
        self._flag = torch.zeros(length, dtype=torch.float64)
        self._flag_work: Any = None
        self._step_begun = False
        """The collective of the current step has started."""
        self._lock = threading.Lock()
        self._waiting: dict[Any, Callable[[], None]] = {}
        self._sockets: dict[int, str] = {}
        self._ports: set[int] = set()
        self._world: Any = None
        self._adopted: list[Any] = []
        self._nccl = False
        self.by_host = False
        """Collectives of GPU tensors use gloo, through host memory."""
        if place.size == 1 and store is None and "MASTER_ADDR" not in os.environ:
            # plain Python, a single process
            if alone_too:
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            return
        if not dist.is_initialized():
            self._form(store, cuda, backend, alone_too)

    def _form(
        self, store: RoundStore | None, cuda: bool, live_backend: str, alone_too: bool
    ) -> None:
        self.place.set_network_variables()  # gloo reads it for every group
        before = sockets.open_sockets()
        nccl = cuda and dist.is_nccl_available() and os.environ.get(env.GPU_BACKEND) != "gloo"
        backend = "gloo" if store is None else live_backend
        if cuda:
            backend = f"cpu:{backend},cuda:{'nccl' if nccl else backend}"
        self.by_host = cuda and not nccl
        if self.by_host and alone_too and self.place.size > 1:
            raise ElasticError(
                "The shards of a model on GPUs move by NCCL only, one process on each GPU: submit "
                f"the job without {env.GPU_BACKEND}=gloo."
            )
        options: dict[str, Any] = (
            {}
            if store is None
            else {"store": store, "rank": self.place.rank, "world_size": self.place.size}
        )
        global _round_is_void, _newest
        if store is not None:
            _round_is_void, _newest = store.interrupted, weakref.ref(self)
        hook = sys.excepthook
        try:
            dist.init_process_group(
                backend, timeout=timedelta(seconds=CONNECT_TIMEOUT_S), **options
            )
        except BaseException:
            forget_failed_group()
            raise
        finally:
            sys.excepthook = hook  # torch wraps it again for every group
        self._world, self._nccl = dist.group.WORLD, nccl
        set_timeout(self._world, COLLECTIVE_TIMEOUT)
        # The sockets that were opened meanwhile are gloo's listener and its connections to peers.
        # Connections from peers may arrive later.
        self._note_connections(before)

    def _note_connections(self, before: dict[int, str]) -> None:
        opened = {fd: name for fd, name in sockets.open_sockets().items() if before.get(fd) != name}
        self._sockets.update(opened)
        self._ports |= {port for fd in opened if (port := sockets.listens_on(fd))}

    def adopt(self, gloo: Any, before: dict[int, str]) -> None:
        """Make a group within this one end with it.

        Args:
            gloo: its gloo backend.
            before: sockets of this process before it was formed.
        """
        self._adopted.append(gloo)
        self._note_connections(before)

    @property
    def several(self) -> bool:
        """Whether there are peers."""
        return self.place.size > 1 and dist.is_initialized()

    # --- operations that can be aborted ---

    def watched(
        self, work: Any, value: Any = None, then: Callable[[], object] | None = None
    ) -> Any:
        """Return a future for a gloo collective that is completed when the collective ends or is
        aborted.

        Args:
            work: the collective.
            value: result of the future.
            then: called in gloo's thread before the future is completed, if the collective
                succeeds.
        """
        on_gpu = isinstance(value, torch.Tensor) and value.is_cuda
        future: Any = torch.futures.Future(devices=[value.device] if on_gpu else None)

        def complete() -> None:
            with self._lock:
                if self._waiting.pop(work, None) is None:
                    return
            future.set_result(value)

        def done(source: Any) -> None:
            try:
                source.wait()
                if then is not None and not self.broken:
                    then()
            except RuntimeError:
                self.broken = True
            complete()

        with self._lock:
            self._waiting[work] = complete
        work.get_future().add_done_callback(done)
        if self.broken:
            complete()
        return future

    @counted_as("exchange")
    def wait(self, work: Any) -> None:
        """Wait for a gloo collective. Raises Interrupted if it is aborted or fails."""
        if not work.is_completed():
            self.watched(work).wait()
        else:
            work.wait()
        if self.broken:
            raise Interrupted("A peer is lost.")

    def call_abandonable(self, call: Callable[[], None]) -> None:
        """Run ``call``, which sends to or receives from single peers, in a thread that can be
        abandoned. If this thread is one, run it here. Raises what ``call`` raises, or Interrupted
        if the group is aborted.
        """
        if getattr(_thread_state, "abandonable", False):
            call()
            return
        task = _AbandonableCall(call)
        with self._lock:
            self._waiting[task] = task.over.set
        if self.broken:
            task.over.set()
        task.over.wait()
        with self._lock:
            self._waiting.pop(task, None)
        if self.broken:
            raise Interrupted("A peer is lost.")
        if task.error is not None:
            raise task.error

    def average(self, tensor: torch.Tensor) -> Any:
        """Start to average ``tensor`` over all ranks, in place. Return a future of it. For tensors
        that gloo reduces; a GPU tensor goes through host memory.
        """
        self.exchanges += 1
        if not tensor.is_cuda:
            return self.watched(
                dist.all_reduce(tensor, async_op=True), tensor, lambda: tensor.div_(self.place.size)
            )
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
        return self.watched(
            dist.all_reduce(copy, async_op=True),
            tensor,
            lambda: tensor.copy_(copy).div_(self.place.size),
        )

    def mean(self, value: Any) -> Any:
        """Return the mean over all ranks of a number, or of a tensor of one element, as a tensor.
        Raises what :meth:`wait` raises.
        """
        if not self.several:
            return value
        number = torch.as_tensor(value).detach()
        total = number.to("cpu", torch.float64).reshape(1)
        self.wait(dist.all_reduce(total, async_op=True))
        return (total / self.place.size).to(number.device, number.dtype).reshape(number.shape)

    def agree(self) -> None:
        """Wait until all ranks have called this method. Raises what :meth:`wait` raises."""
        if self.several:
            with library_collectives():
                self.wait(dist.all_reduce(torch.zeros(1), async_op=True))

    def begin_step(
        self,
        go: bool,
        stop: bool,
        save: bool = False,
        rate: float = same_on_all.UNKNOWN,
        batch_size: int | None = None,
        changed: float = same_on_all.UNKNOWN,
    ) -> None:
        """Start the collective in which the ranks exchange their requests for this step. It runs
        while the step computes; :meth:`end_step` returns the result.

        Args:
            go: ask that this step be the last of the group.
            stop: ask that it be the last of the loop.
            save: ask that all ranks save after it.
            rate: learning rates of the last update in this group (:func:`same_on_all.rate_of`).
            batch_size: global batch size with which this rank trains, or will at the next step;
                None if the size depends on the number of ranks, or is unknown.
            changed: objects that have changed since the step before
                (:class:`malletrain.elastic.same_on_all.ChangedObjects`).
        """
        if not self._step_begun:  # otherwise meet() has begun the step, by a call of this rank only
            compared = {
                "rate": rate,
                "batch_size": batch_size or same_on_all.UNKNOWN,
                "changed": changed,
            }
            self._ask(StepWishes(go, stop, save, step=True), compared)

    def meet(self, wishes: StepWishes) -> bool:
        """Return whether all ranks make the same call, ``wishes``, outside of a step. If not, the
        other ranks are in a step, which has then begun for this rank as well. Raises what
        :meth:`wait` raises.
        """
        if self._step_begun:
            return False
        self._ask(wishes)
        answer = self._answer()
        self._step_begun = answer.step
        return not answer.step and answer.save == wishes.save and answer.hash == wishes.hash

    @property
    def forming(self) -> bool:
        """Whether the default group is still being formed, so that no group within it exists."""
        return self._world is None

    def fence(self, name: str) -> None:
        """Called before the script's collective ``name`` of all ranks. Outside of a step it waits
        until all ranks are about to call one.

        Raises:
            MismatchError: other ranks are in a step, or in a call of the library.
            Interrupted: see :meth:`wait`.
        """
        if self._step_begun or not self.several or getattr(_thread_state, "library", False):
            return
        self._ask(StepWishes(False, False, script=True))
        self._answer(f" ({name})")
        self._step_begun = False

    def end_step(self) -> StepWishes:
        """Return the combined requests, which are equal on all ranks. Raises what :meth:`wait`
        raises.
        """
        self._step_begun = False
        return self._answer()

    def _ask(self, wishes: StepWishes, compared: Mapping[str, float] | None = None) -> None:
        compared, self._step_begun = compared or {}, True
        flags = [getattr(wishes, name) for name in self.layout.wishes]
        numbers = [compared.get(name, same_on_all.UNKNOWN) for name in self.layout.compared]
        extremes = [extreme for number in numbers for extreme in same_on_all.both(number)]
        rank = self.place.rank + 1  # 0 means that no rank is there
        rank_in = (rank * wishes.step, rank * wishes.script)
        self._flag.copy_(torch.tensor((*flags, *extremes, *rank_in, *_MARK), dtype=torch.float64))
        if self.several and not self.broken:
            with library_collectives():
                self._flag_work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, async_op=True)

    def _answer(self, collective: str = "") -> StepWishes:
        """Return the combined requests. ``collective``: the one that this rank is about to call,
        for messages.
        """
        work, self._flag_work = self._flag_work, None
        if work is not None:
            self.wait(work)
        elif self.broken:
            raise Interrupted("A peer is lost.")
        *numbers, in_step, in_script, high, low = self._flag.tolist()
        names = self.layout.wishes
        flags, extremes = numbers[: len(names)], numbers[len(names) :]
        wishes = StepWishes(**dict(zip(names, map(bool, flags), strict=True)))
        here = f"rank {self.place.rank}"
        if (high, low) != _MARK:
            raise MismatchError(_sentence("Another rank", collective, f"{here} is in one"))
        if wishes.script and (wishes.step or wishes.save or wishes.hash):
            place = "others are in run.save() or run.digest()"
            if wishes.step:
                place = f"rank {int(in_step) - 1} is in one"
            raise MismatchError(_sentence(f"Rank {int(in_script) - 1}", collective, place))
        pairs = zip(extremes[::2], extremes[1::2], strict=True)
        compared = dict(zip(self.layout.compared, pairs, strict=True))
        self.rates_differ = same_on_all.differ(*compared["rate"])
        self.batch_sizes_differ = same_on_all.differ(*compared["batch_size"])
        most, negated_least = compared["changed"]
        self.changed = (most, -negated_least)
        return wishes

    # --- its end ---

    def abort(self) -> None:
        """Abort every operation of this group on this rank, and on its peers, whose operations then
        fail. Can be called from any thread.
        """
        self.broken = True
        for fd, identity in sockets.open_sockets().items():
            sockets.shut_down(fd, identity, self._sockets.get(fd) == identity, self._ports)
        world = self._world
        if self._nccl and world is not None:
            try:
                world.abort()
            except RuntimeError:
                pass
        with self._lock:
            pending = list(self._waiting.items())
        if pending and world is not None:
            _keep_until_done([work for work, _ in pending], [world, *self._adopted])
        for _, complete in pending:
            complete()

    def leave(self) -> None:
        """Destroy torch's default group, so that the next one can be formed. The connections stay
        open until :meth:`close`, because a peer may not have read all data of the last step yet.
        """
        self._flag_work = None
        if self._world is not None and dist.is_initialized():
            if self.broken:
                self.abort()
            dist.destroy_process_group()

    def close(self) -> None:
        """Close the connections after CLOSE_DELAY_S. Destroying a group holds the interpreter lock
        for a few hundredths of a second.
        """
        groups, self._world, self._adopted = [self._world, *self._adopted], None, []
        if groups[0] is not None:
            timer = threading.Timer(CLOSE_DELAY_S, groups.clear)
            timer.daemon = True
            timer.start()


def rehearse() -> None:
    """Run once, without peers, the code that forms a group and trains with it, so that it is warm
    when other ranks wait for it.
    """
    if dist.is_initialized():
        return
    require("live mode")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    model = torch.nn.Linear(1, 1)
    ddp = torch.nn.parallel.DistributedDataParallel(model, init_sync=False)
    for _ in range(2):  # DDP arranges its buckets after the first backward pass
        ddp(torch.ones(1, 1)).sum().backward()
    # The last reference to a group must be Python's own. If the reducer drops it, the thread waits
    # for gloo's threads while it holds the interpreter lock, which they may need.
    del ddp, model
    dist.destroy_process_group()
    del world


def _sentence(caller: str, collective: str, others: str) -> str:
    return (
        f"{caller} calls a collective of the script{collective} outside of a training step, while "
        f"{others}: the ranks are at different places of the script. A process that joins a "
        "running training starts at the top of the script, which the others have passed. "
        "Call collectives of your own within the steps, or in the code after an epoch, on all "
        "ranks."
    )


class _AbandonableCall:
    """A call in a thread of its own. Unless it is a daemon thread, the process waits for it before
    it exits.
    """

    def __init__(self, call: Callable[[], None], daemon: bool = True) -> None:
        self.over = threading.Event()
        self.error: Exception | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, name="malletrain-transfer", daemon=daemon)
        self._thread.start()

    def _run(self) -> None:
        _thread_state.abandonable = True
        try:
            self._call()
        except Exception as error:
            self.error = error
        self.over.set()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()


def _keep_until_done(works: list[Any], groups: list[Any]) -> None:
    """Keep ``groups`` alive until their aborted operations have ended. Destroying a group before
    that would wait for them.
    """
    for reference in (*groups, *works):
        # This reference prevents that even the end of the interpreter destroys them.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(reference))

    def wait_and_drop() -> None:
        while not all(work.is_completed() for work in works):
            time.sleep(ABANDONED_POLL_S)
        for reference in (*groups, *works):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(reference))

    threading.Thread(target=wait_and_drop, name="malletrain-given-up", daemon=True).start()
