"""Process groups that can be left, given up and formed again within one process.

Decides how a group is formed over a store that can be interrupted, how all its ranks agree to leave
it after the same step, and how a collective that waits for a vanished peer is ended: gloo has no
abort, so the sockets of the group are shut down, which every operation on them notices at once, and
what gloo itself misses is left behind; NCCL's communicators are aborted. It decides neither when
(:mod:`malletrain.elastic.run`) nor who is in a round.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from malletrain.elastic import rates, sockets
from malletrain.elastic.checkin import RoundStore
from malletrain.elastic.errors import ElasticError, Interrupted, MismatchError
from malletrain.elastic.link import Place
from malletrain.elastic.wishes import StepWishes
from malletrain.protocol import env
from malletrain.training.torch_private import (
    forget_failed_group,
    require,
    set_backend_timeout,
    set_timeout,
)

CONNECT_TIMEOUT_S = 20.0
"""For the connections between peers whose addresses are known; waiting for peers to come is not
limited but interrupted.
"""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
CLOSE_LATER_S = 1.0
ABANDONED_POLL_S = 0.5
_POLL_S = 0.002
_MARK = (8191.5, -8191.5)
"""Goes along with what a step exchanges, and comes back from a maximum as it is, if all ranks have
sent it. Numbers that no script adds up to. Where groups have no fence (CUDA) it shows that a
collective of the script came in between.
"""


def connect(
    store: Any, rank: int, size: int, timeout: timedelta, owner: Group | None = None
) -> Any:
    """gloo's part of a group, or of one within it that belongs to ``owner``. A peer that is lost
    meanwhile would be waited for until ``timeout``; this wait is given up instead when the round is
    void, and left behind in a thread.

    The end of the process waits for that thread: coming back from gloo to an interpreter that ends
    would abort the process, and the job would count as failed.
    """
    made: list[Any] = []
    before = sockets.opened()
    short = min(timeout, timedelta(seconds=CONNECT_TIMEOUT_S))  # torch gives a mesh half an hour
    task = _Apart(
        lambda: made.append(dist.ProcessGroupGloo(store, rank, size, short)), daemon=False
    )
    round_is_void = _forming
    while not task.over.wait(_POLL_S):
        if round_is_void():
            raise Interrupted("This round is void; a newer one follows.")
    if task.error is not None:
        raise task.error
    if timeout != short:
        set_backend_timeout(made[0], timeout)
    if owner is not None:
        owner.adopt(made[0], before)
    return made[0]


PLAIN_BACKEND = "malletrain_gloo"
"""gloo's part of groups with GPUs: no fence, and the script's own waits are gloo's."""
_forming: Callable[[], bool] = lambda: False  # noqa: E731
"""Whether the round that is being formed is void: torch hands a backend no more than its store."""
_newest: Callable[[], Group | None] = lambda: None  # noqa: E731
dist.Backend.register_backend(PLAIN_BACKEND, connect, devices=["cpu", "cuda"])
_here = threading.local()
"""What this thread does: ``library`` collectives, or a transfer ``apart``."""


def newest() -> Group | None:
    """The group that was formed last, or is being formed: what is made within it is its own."""
    return _newest()


@contextlib.contextmanager
def library_collectives() -> Iterator[None]:
    """Collectives that this thread begins in here are the library's, and not the script's."""
    before = getattr(_here, "library", False)
    _here.library = True
    try:
        yield
    finally:
        _here.library = before


class Group:
    """The default process group of one round.

    The ranks may be at different places of the script: a process that joins a running training
    begins at its top. Whatever the script begins there must not meet what others exchange in a
    step, because gloo tells collectives apart by their order only. Therefore a collective of the
    script outside of a step is preceded by the same small exchange as a step (:meth:`fence`): all
    ranks learn who is where before anything of the script's is sent.

    gloo may lose track of an operation when its connection breaks at the wrong moment, and wait for
    it until its timeout. Therefore no thread of the script ever waits for gloo itself: it waits for
    a future that :meth:`abort` completes too. What was lost track of stays behind with its group
    until it times out (:func:`_keep_until_done`).

    Args:
        place: this process in the round.
        store: the round's store, None under torchrun and for a round of one.
        cuda: whether gradients live on GPUs: collectives on them go by NCCL, the others by gloo;
            all by gloo where the job asks for it (``MALLETRAIN_GPU_BACKEND=gloo``).
        backend: of collectives that go by gloo, in a round with a store.
        alone_too: whether plain python's one process needs a group.
    """

    def __init__(
        self,
        place: Place,
        store: RoundStore | None,
        cuda: bool,
        backend: str = PLAIN_BACKEND,
        alone_too: bool = False,
    ) -> None:
        self.place = place
        self.broken = False
        """A peer is lost: nothing more can be done together."""
        self.exchanges = 0
        """Averages of gradients that were begun."""
        self.rates_differ = False
        """By the last answer, the ranks made their update before at different learning rates."""
        self._flag = torch.zeros(len(StepWishes._fields) + 4 + len(_MARK), dtype=torch.float64)
        self._flag_work: Any = None
        self._begun = False
        self._lock = threading.Lock()
        self._waiting: dict[Any, Callable[[], None]] = {}
        self._sockets: dict[int, str] = {}
        self._ports: set[int] = set()
        self._world: Any = None
        self._adopted: list[Any] = []
        self._nccl = False
        self.by_host = False
        """Tensors of GPUs go through host memory, by gloo."""
        if place.size == 1 and store is None and "MASTER_ADDR" not in os.environ:
            # plain python: nothing to be distributed over
            if alone_too:
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            return
        if not dist.is_initialized():
            self._form(store, cuda, backend, alone_too)

    def _form(
        self, store: RoundStore | None, cuda: bool, live_backend: str, alone_too: bool
    ) -> None:
        self.place.go_by_network()  # gloo reads it for every group
        before = sockets.opened()
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
        global _forming, _newest
        if store is not None:
            _forming, _newest = store.interrupted, weakref.ref(self)
        hook = sys.excepthook
        try:
            dist.init_process_group(
                backend, timeout=timedelta(seconds=CONNECT_TIMEOUT_S), **options
            )
        except BaseException:
            forget_failed_group()
            raise
        finally:
            sys.excepthook = hook  # torch wraps it once more for every group
        self._world, self._nccl = dist.group.WORLD, nccl
        set_timeout(self._world, COLLECTIVE_TIMEOUT)
        # What was opened meanwhile are gloo's listener and its connections to peers; those from
        # peers may come in later.
        self._note_connections(before)

    def _note_connections(self, before: dict[int, str]) -> None:
        opened = {fd: name for fd, name in sockets.opened().items() if before.get(fd) != name}
        self._sockets.update(opened)
        self._ports |= {port for fd in opened if (port := sockets.listens_on(fd))}

    def adopt(self, gloo: Any, before: dict[int, str]) -> None:
        """Have a group within this one end with it; ``before``: the sockets there were."""
        self._adopted.append(gloo)
        self._note_connections(before)

    @property
    def several(self) -> bool:
        """Whether there are peers."""
        return self.place.size > 1 and dist.is_initialized()

    # --- operations that can be given up ---

    def watched(
        self, work: Any, value: Any = None, then: Callable[[], object] | None = None
    ) -> Any:
        """A future for a gloo collective: completed with ``value`` when it is done (after ``then``,
        in gloo's thread) or given up.
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

    def wait(self, work: Any) -> None:
        """Wait for a collective of gloo. Raises Interrupted when it is given up or fails."""
        if not work.is_completed():
            self.watched(work).wait()
        else:
            work.wait()
        if self.broken:
            raise Interrupted("A peer is lost.")

    def apart(self, call: Callable[[], None]) -> None:
        """Run ``call``, which sends to or receives from single peers, in a thread that can be left
        behind; in such a thread, run it there. Raises what it raises, or Interrupted when it is
        given up.
        """
        if getattr(_here, "apart", False):
            call()
            return
        task = _Apart(call)
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
        """Average ``tensor`` over all ranks in place, on the way: a future of it. For tensors that
        go by gloo; one of a GPU goes through host memory.
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
        """The mean of a number, or of a tensor of one element, over all ranks, as a tensor. Raises
        what :meth:`wait` raises.
        """
        if not self.several:
            return value
        number = torch.as_tensor(value).detach()
        total = number.to("cpu", torch.float64).reshape(1)
        self.wait(dist.all_reduce(total, async_op=True))
        return (total / self.place.size).to(number.device, number.dtype).reshape(number.shape)

    def agree(self) -> None:
        """Wait until all ranks have come here. Raises what :meth:`wait` raises."""
        if self.several:
            with library_collectives():
                self.wait(dist.all_reduce(torch.zeros(1), async_op=True))

    def begin_step(
        self, go: bool, stop: bool, save: bool = False, rate: float = rates.UNKNOWN
    ) -> None:
        """Start to ask all ranks whether this step is the last of the group (``go``) or of the loop
        (``stop``), and whether all are to ``save`` after it; the answer travels while the step
        computes. ``rate``: of the update before it in this group.
        """
        if not self._begun:  # else a call that others did not make has begun it: meet()
            self._ask(StepWishes(go, stop, save, step=True), rate)

    def meet(self, wishes: StepWishes) -> bool:
        """Whether all ranks have come to the same call, ``wishes``, outside of a step. If not the
        others are in their step, which has begun for this rank, too. Raises what :meth:`wait`
        raises.
        """
        if self._begun:
            return False
        self._ask(wishes)
        answer = self._answer()
        self._begun = answer.step
        return not answer.step and answer.save == wishes.save and answer.hash == wishes.hash

    @property
    def forming(self) -> bool:
        """The default group is being formed: nothing within it is, yet."""
        return self._world is None

    def fence(self, name: str) -> None:
        """The script is about to begin the collective ``name`` of all ranks. Outside of a step this
        waits until all have come to one.

        Raises:
            MismatchError: others are in a step, or in a call of the library.
            Interrupted: see :meth:`wait`.
        """
        if self._begun or not self.several or getattr(_here, "library", False):
            return
        self._ask(StepWishes(False, False, script=True))
        self._answer(f" ({name})")
        self._begun = False

    def end_step(self) -> StepWishes:
        """The answers, the same on all ranks. Raises what :meth:`wait` raises."""
        self._begun = False
        return self._answer()

    def _ask(self, wishes: StepWishes, rate: float = rates.UNKNOWN) -> None:
        self._begun = True
        number = self.place.rank + 1
        where = (number * wishes.step, number * wishes.script)
        self._flag.copy_(
            torch.tensor((*wishes, *rates.both(rate), *where, *_MARK), dtype=torch.float64)
        )
        if self.several and not self.broken:
            with library_collectives():
                self._flag_work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, async_op=True)

    def _answer(self, collective: str = "") -> StepWishes:
        """What all ranks ask for; ``collective``: what this one is about to begin, for messages."""
        work, self._flag_work = self._flag_work, None
        if work is not None:
            self.wait(work)
        elif self.broken:
            raise Interrupted("A peer is lost.")
        *flags, highest, negated_lowest, in_step, in_script, high, low = self._flag.tolist()
        wishes = StepWishes(*map(bool, flags))
        here = f"rank {self.place.rank}"
        if (high, low) != _MARK:
            raise MismatchError(_sentence("Another rank", collective, f"{here} is in one"))
        if wishes.script and (wishes.step or wishes.save or wishes.hash):
            place = "others are in run.save() or run.digest()"
            if wishes.step:
                place = f"rank {int(in_step) - 1} is in one"
            raise MismatchError(_sentence(f"Rank {int(in_script) - 1}", collective, place))
        self.rates_differ = rates.differ(highest, negated_lowest)
        return wishes

    # --- its end ---

    def abort(self) -> None:
        """Give up every operation under way here, from any thread; the peers notice too."""
        self.broken = True
        for fd, identity in sockets.opened().items():
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
        for _, give_up in pending:
            give_up()

    def leave(self) -> None:
        """Make room for the next group. The connections stay until :meth:`close`: a peer may not
        have read all of the last step yet.
        """
        self._flag_work = None
        if self._world is not None and dist.is_initialized():
            if self.broken:
                self.abort()
            dist.destroy_process_group()

    def close(self) -> None:
        """Drop the connections, a little later: taking a group down holds the interpreter for some
        hundredths of a second.
        """
        groups, self._world, self._adopted = [self._world, *self._adopted], None, []
        if groups[0] is not None:
            timer = threading.Timer(CLOSE_LATER_S, groups.clear)
            timer.daemon = True
            timer.start()


def rehearse() -> None:
    """Do once, alone, what a new group needs, so that its code and the network are warm when the
    others wait for it.
    """
    if dist.is_initialized():
        return
    require("live mode")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    model = torch.nn.Linear(1, 1)
    ddp = torch.nn.parallel.DistributedDataParallel(model, init_sync=False)
    for _ in range(2):  # DDP arranges its buckets after the first
        ddp(torch.ones(1, 1)).sum().backward()
    # The last hold on a group must be Python's own. Were it the reducer's, gloo's threads would be
    # waited for without letting go of the interpreter, which they may need.
    del ddp, model
    dist.destroy_process_group()
    del world


def _sentence(who: str, collective: str, others: str) -> str:
    return (
        f"{who} calls a collective of the script{collective} outside of a training step, while "
        f"{others}: the ranks are at different places of the script. A process that joins a "
        "running training begins at the top of the script, where the others are not any more. "
        "Call collectives of your own within the steps, or in the code after an epoch, on all "
        "ranks."
    )


class _Apart:
    """A call in a thread of its own, for which the end of the process waits unless ``daemon``."""

    def __init__(self, call: Callable[[], None], daemon: bool = True) -> None:
        self.over = threading.Event()
        self.error: Exception | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, name="malletrain-transfer", daemon=daemon)
        self._thread.start()

    def _run(self) -> None:
        _here.apart = True
        try:
            self._call()
        except Exception as error:
            self.error = error
        self.over.set()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()


def _keep_until_done(works: list[Any], groups: list[Any]) -> None:
    """Keep groups until the operations that were given up have ended: taking one down before would
    wait for them.
    """
    for one in (*groups, *works):
        ctypes.pythonapi.Py_IncRef(
            ctypes.py_object(one)
        )  # not even the end of the interpreter takes it down

    def wait_and_drop() -> None:
        while not all(work.is_completed() for work in works):
            time.sleep(ABANDONED_POLL_S)
        for one in (*groups, *works):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(one))

    threading.Thread(target=wait_and_drop, name="malletrain-given-up", daemon=True).start()
