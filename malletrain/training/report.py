"""What a training script tells the agent: samples done, points in time, metrics.

Decides when a report becomes a datagram: every 50 ms, and 10 ms after the last while the training
waits (counts are cumulative, so a lost one loses nothing). It decides nothing about throughput.
Nothing here raises into the training loop or blocks it, and without ``MALLETRAIN_SOCKET`` in the
environment everything is a no-op, so that the same script runs under plain python or torchrun.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import Any

from malletrain.protocol import env
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.flags import FlagsReader
from malletrain.protocol.worker_channel import (
    BetweenEpochs,
    Datagram,
    ModelFacts,
    Outbox,
    ScriptMetric,
    Sender,
    StartupMark,
    WorkLeft,
    decode_datagram,
    encode,
    progress_encoder,
)
from malletrain.training import stacks, tracking
from malletrain.training.busy import Busy

_SAMPLES = "the number of samples of the step just finished, e.g. report(len(batch))"
_BUSY = "as busy_s the seconds that this process worked in the step"
SEND_INTERVAL_S = 0.05
EPOCH_INTERVAL_S = 1.0
"""Between two ends of epochs that are announced."""
QUIET_S = 0.01
"""A report after which so long no other follows is sent by itself."""
EXIT_PATIENCE_S = 5.0
"""How long a process that ends waits for an agent that stands still to take its last reports."""
_MOST_SAMPLES = 1e15

sentence_keys: set[str] = set()


def tell(sentence: str, once: str | None = None) -> None:
    """Say something to the user on stderr; with ``once``, only the first time for that key in this
    process. Never raises.
    """
    if once is not None:
        if once in sentence_keys:
            return
        sentence_keys.add(once)
    try:
        print(f"malletrain: {sentence}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # stderr is closed or absent
        pass


def _env_int(name: str, default: int = 0) -> int:
    try:
        return max(0, int(os.environ.get(name, "")))
    except ValueError:
        return default


class _Worker:
    """This process as the agent sees it: who it is, and its counts."""

    def __init__(self, socket_path: str) -> None:
        self.sender = Sender(
            os.environ.get(env.JOB, ""), _env_int(env.GENERATION), _env_int("RANK"), os.getpid()
        )
        self.outbox = Outbox(socket_path)
        self.forgotten = False
        self.epoch_due = 0.0
        """When the next end of an epoch may be announced."""
        self.between_epochs = False
        """One was, and is not over."""
        self._busy = Busy()
        self._lock = threading.RLock()
        self._wake_event = threading.Event()
        self._late = False
        self._thread: threading.Thread | None = None
        self.enter(self.sender)

    def enter(self, sender: Sender) -> None:
        with self._lock:
            self.sender = sender
            self.encode = progress_encoder(sender)
            self.samples: float = 0
            self.steps = 0
            self.batch: float = 0
            self.first = 0.0
            self.last = 0.0
            self.due = 0.0
            self.sent_steps = 0

    def add(self, batch_size: float, busy_s: float | None) -> None:
        self._busy.step(busy_s)
        self.samples += batch_size
        self.steps += 1
        self.batch = batch_size
        self.last = time.time()
        now = time.monotonic()
        if now >= self.due:
            if self.steps == 1:
                self.first = self.last
                self.put(StartupMark(self.sender, "first", self.first))
            self.due = now + SEND_INTERVAL_S
            self.flush()
        if self.sent_steps != self.steps and not self._late:
            self._wake()

    def flush(self) -> None:
        with self._lock:  # against the thread below
            steps = self.steps
            if self.sent_steps == steps:
                return
            unsent, busy = self.outbox.unsent, self._busy.read()
            data = self.encode(self.samples, steps, self.batch, self.first, self.last, unsent, busy)
            reached(FaultPoint.WORKER_REPORTS)
            if self.outbox.send(data):
                self.sent_steps = steps
            reached(FaultPoint.WORKER_REPORTED)

    def retry(self) -> None:
        with self._lock:
            self.outbox.retry()

    def agent_is_slow(self) -> bool:
        """Try again what it has not taken; whether its queue is too full."""
        self.flush()
        with self._lock:
            is_left = self.sent_steps != self.steps or not self.outbox.retry()
            return is_left and self.outbox.agent_is_slow()

    def close(self) -> None:
        self.outbox.close()
        self._busy.close()

    def _wake(self) -> None:
        """Have the thread send what is left."""
        self._late = True
        self._wake_event.set()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._send_late, name="malletrain-reports", daemon=True
            )
            with contextlib.suppress(
                RuntimeError
            ):  # no thread can be had, or the interpreter ends: then without
                self._thread.start()

    def _send_late(self) -> None:
        """In a thread: send what no later report took along, and what the agent was too slow for. A
        worker may be stopped in the collective after its last report, and then says nothing any
        more.
        """
        while self._wake_event.wait() and not self.forgotten:
            steps = -1
            while steps != self.steps:
                steps = self.steps
                time.sleep(QUIET_S)
            self._wake_event.clear()
            self._late = False
            self.flush()
            while self.agent_is_slow() and not self.forgotten:
                time.sleep(QUIET_S)

    def put(self, message: Datagram) -> None:
        try:
            data = encode(message)
            decode_datagram(data)  # what the agent would refuse is better said to the user, here
        except (TypeError, ValueError, RecursionError) as error:
            tell(f"Something reported is ignored: {error}", once=f"put {error}")
            return
        with self._lock:
            sent = self.outbox.send(data, keep=True)
        if not sent and not self._late:
            self._wake()


_worker: _Worker | None = None
_connected = False


def _connect() -> _Worker | None:
    """Read the environment once; the worker, or None outside MalleTrain."""
    global _worker, _connected
    if not _connected:
        _connected = True
        path = os.environ.get(env.SOCKET)
        if path:
            _worker = _Worker(path)
            stacks.offer()
            tracking.name_runs()
            atexit.register(_at_exit)
    return _worker


def forget() -> None:
    """A forked child (a DataLoader worker, say) is not the worker its parent is: it starts from
    nothing if it ever reports.
    """
    global _worker, _connected
    if _worker is not None:
        _worker.forgotten = True
        stacks.withdraw()
        _worker.close()
    _worker, _connected = None, False


os.register_at_fork(after_in_child=forget)


def _at_exit() -> None:
    worker = _worker
    if worker is None:
        return
    # Last steps and metrics are worth a wait where the agent's queue is full.
    deadline = time.monotonic() + EXIT_PATIENCE_S
    while worker.agent_is_slow() and time.monotonic() < deadline:
        time.sleep(0.005)


def _usable(argument: object, what: str = _SAMPLES) -> float | None:
    """The number in ``argument`` (a numpy scalar or a tensor of one element will do) as one of
    Python's own, or None after telling the user ``what`` is wanted.
    """
    value: Any = argument
    try:
        if not isinstance(value, int | float) and hasattr(value, "item"):
            value = value.item()
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and 0 <= value <= _MOST_SAMPLES
        ):
            return value if type(value) is int else float(value)
        shown = repr(argument)[:60]
    except Exception:  # an odd object must not stop a training run
        shown = f"an object of type {type(argument).__name__}"
    tell(f"report() takes {what}, but got {shown}; such reports are ignored.", once=what)
    return None


def report(batch_size: float, busy_s: float | None = None) -> None:
    """Say that a training step is done. The one line MalleTrain needs in a script; call it on every
    rank at the end of the step.

    Args:
        batch_size: number of samples that *this process* trained on in the step (not the global
            batch: ranks are added up).
        busy_s: for how long this process worked itself in the step, seconds: without its wait for
            the other ranks. Nodes that are slower than others are found by it. Without it the time
            of the calling thread counts, where the work is not an accelerator's.

    Costs a few microseconds, never blocks, never raises; does nothing outside MalleTrain. Call it
    from one thread.
    """
    if type(batch_size) is not int or not 0 <= batch_size <= _MOST_SAMPLES:
        usable = _usable(batch_size)
        if usable is None:
            return
        batch_size = usable
    if busy_s is not None:
        busy_s = _usable(busy_s, _BUSY)
    worker = _worker or _connect()
    if worker is not None:
        worker.add(batch_size, busy_s)


def metric(name: str, value: float, step: int | None = None) -> None:
    """Report a named number, such as ``metric("loss", 0.97, step=300)``. All values are kept over
    time, with the samples that were processed by then and the job's scale; of very many a selection
    that keeps the picture. Never raises.

    Args:
        name: what it is, in 100 characters at most.
        value: a number. NaN and infinity are shown as such, and are never a trial's best value.
        step: the script's own count from 0, such as an epoch.
    """
    try:
        value = float(value)
        step = None if step is None else int(step)
        usable = step is None or step >= 0
    except Exception:  # as in report(): the training run goes on
        usable = False
    if not isinstance(name, str) or not name or not usable:
        shown = (
            f"the name {name[:40]!r}"
            if isinstance(name, str)
            else f"a name of type {type(name).__name__}"
        )
        tell(
            f"metric() takes a name, a number and a step from 0, but with {shown} it got "
            "something else; it is ignored.",
            once=f"metric {shown}",
        )
        return
    worker = _worker or _connect()
    if os.environ.get(env.TRACK):
        tracking.mirror(name, value, step)
    if worker is not None:
        worker.flush()
        worker.put(ScriptMetric(worker.sender, name, value, time.time(), worker.samples, step))


def mark(name: str, at: float | None = None) -> None:
    """Report a point in the start-up of this process (``at``: seconds since the epoch, now by
    default), to see where a rescale spends its time. Never raises.
    """
    worker = _worker or _connect()
    if worker is not None:
        worker.put(StartupMark(worker.sender, name, time.time() if at is None else at))


def describe(parameters: int | None = None, flops_per_sample: float | None = None) -> None:
    """Report facts about the model: number of parameters, floating point operations per sample
    (forward and backward).
    """
    worker = _worker or _connect()
    if worker is not None:
        worker.put(ModelFacts(worker.sender, parameters, flops_per_sample))


def flush() -> None:
    """Send what has been reported but not sent yet."""
    worker = _worker
    if worker is not None:
        worker.flush()
        worker.retry()


def send(kind: type[Any], **fields: Any) -> None:
    """Send a datagram of ``kind`` (a class of :mod:`malletrain.protocol.worker_channel`) from this
    worker; kept until the agent takes it.
    """
    worker = _worker or _connect()
    if worker is not None:
        worker.put(kind(worker.sender, **fields))


def training_over() -> None:
    """Say that this process has no samples left to train on and is in the code after its training:
    the job is not stopped for a planned change of nodes any more. Taken back by the next
    :func:`report`.
    """
    flush()
    send(WorkLeft, samples=0.0)


def between_epochs(entered: bool) -> None:
    """Say that this process has entered the code that follows the steps of an epoch, or has left
    it: a planned change of nodes waits for that. Epochs that follow within a second of one that was
    announced are not.
    """
    worker = _worker or _connect()
    if worker is None:
        return
    now = time.monotonic()
    if entered and now >= worker.epoch_due:
        worker.epoch_due, worker.between_epochs = now + EPOCH_INTERVAL_S, True
        flush()
        send(BetweenEpochs, entered=True)
    elif not entered and worker.between_epochs:
        worker.between_epochs = False
        send(BetweenEpochs, entered=False)


def totals() -> tuple[float, int]:
    """(samples, steps) reported by this process so far."""
    worker = _worker
    return (worker.samples, worker.steps) if worker is not None else (0, 0)


def entered(generation: int, rank: int, world_size: int) -> None:
    """This process goes on in another round, without a restart: counts begin anew there. For
    :mod:`malletrain.elastic`.
    """
    flush()
    os.environ.update(
        {env.GENERATION: str(generation), "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    )
    worker = _worker or _connect()
    if worker is not None:
        worker.enter(Sender(worker.sender.job, generation, rank, os.getpid()))


def generation() -> int:
    """The round this process belongs to, 0 outside MalleTrain."""
    return _env_int(env.GENERATION)


def open_flags() -> FlagsReader | None:
    """The agent's flags, or None when there are none (a script outside MalleTrain) or they cannot
    be read (the user is told).
    """
    path = os.environ.get(env.FLAGS)
    if not path:
        return None
    try:
        return FlagsReader(path)
    except (OSError, ValueError) as error:
        tell(
            f"Snapshots on demand are off, because the agent's flags cannot be read: {error}",
            once="flags",
        )
        return None


def mark_import() -> None:
    """Marks ``start`` (when this process was created, to 10 ms) and ``import`` (now)."""
    now = time.time()
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(
                file.read().rpartition(b")")[2].split()[19]
            )  # field 22 of proc_pid_stat(5), since boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        mark("start", now - age)
    except (
        OSError,
        ValueError,
        IndexError,
        AttributeError,
    ):  # no /proc here: the agent knows when it started us anyway
        pass
    mark("import", now)
