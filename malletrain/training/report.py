"""Reports of a training script to the agent: samples done, timestamps, metrics, and the stacks of a
worker that hangs. Standard library only.

:func:`report` and :func:`metric` decide when a report is sent as a datagram: at once after a step
of 10 ms or more, because the worker may be stopped in its next collective; of shorter steps at most
every 50 ms, and 10 ms after the last report while the training waits. Counts are cumulative, so a
lost datagram loses nothing. They decide nothing about throughput. Nothing here raises into the
training loop or blocks it. Without ``MALLETRAIN_SOCKET`` in the environment all functions are
no-ops, so that the same script runs under plain Python or torchrun.

:func:`install_stack_signal` lets the agent see the stacks of a hanging worker: on a signal, they
are written to a file in the job's directory. It uses Python's faulthandler, which needs neither the
interpreter's lock nor a Python thread, so it works in a worker that is stuck in a collective or a
system call.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from typing import IO, Any

from malletrain.protocol import env
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.flags import FlagsReader
from malletrain.protocol.job_files import STACKS_FILE, STACKS_SIGNAL
from malletrain.protocol.worker_channel import (
    BatchFacts,
    BetweenEpochs,
    Datagram,
    ModelFacts,
    Outbox,
    OwnerNotice,
    ScriptMetric,
    Sender,
    StartupMark,
    WorkLeft,
    decode_datagram,
    encode,
    progress_encoder,
)
from malletrain.training import step_times, tracking
from malletrain.training.step_times import Busy

_file: IO[bytes] | None = None


def install_stack_signal() -> None:
    """Install the signal handler. Never raises. Does nothing outside MalleTrain, or if the script
    uses the signal itself.
    """
    global _file
    flags = os.environ.get(env.FLAGS)
    if not flags or _file is not None:
        return
    path = os.path.join(os.path.dirname(flags), f"{STACKS_FILE}{os.getpid()}")
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if signal.getsignal(STACKS_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            return
        flags_of_file = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        _file = os.fdopen(os.open(path, flags_of_file, 0o600), "wb", buffering=0)
        faulthandler.register(STACKS_SIGNAL, file=_file, all_threads=True, chain=False)


def remove_stack_signal() -> None:
    """Remove the handler in a forked child of the worker."""
    global _file
    if _file is not None:
        faulthandler.unregister(STACKS_SIGNAL)
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
        _file.close()
        _file = None


_SAMPLES = "the number of samples of the step just finished, e.g. report(len(batch))"
_BUSY = "as busy_s the seconds that this process worked in the step"
SEND_INTERVAL_S = 0.05
"""Minimum time between two progress datagrams of steps shorter than QUIET_S, seconds."""
EPOCH_INTERVAL_S = 1.0
"""Minimum time between two announced ends of epochs, seconds."""
QUIET_S = 0.01
"""Time without a further report, seconds, after which the last report is sent."""
EXIT_TIMEOUT_S = 5.0
"""Maximum time, seconds, for which a process that exits waits for a slow agent to receive its last
reports.
"""
_MAX_SAMPLES = 1e15

sentence_keys: set[str] = set()


def tell(sentence: str, once: str | None = None) -> None:
    """Print a message to the user on stderr. Never raises.

    Args:
        sentence: the message.
        once: key; only the first message with this key is printed in this process. None prints
            always.
    """
    if once is not None:
        if once in sentence_keys:
            return
        sentence_keys.add(once)
    try:
        print(f"malletrain: {sentence}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # stderr is closed or absent
        pass


def notice(sentence: str) -> None:
    """Print a message to the user as :func:`tell` does, and show it with the job
    (``malletrain show``), once in this process. Rank 0 calls it. Never raises.
    """
    if sentence not in sentence_keys:
        tell(sentence, once=sentence)
        send(OwnerNotice, sentence=sentence)


def _env_int(name: str, default: int = 0) -> int:
    try:
        return max(0, int(os.environ.get(name, "")))
    except ValueError:
        return default


class _Worker:
    """This process as the agent sees it: its identity and its counts."""

    def __init__(self, socket_path: str) -> None:
        self.sender = Sender(
            os.environ.get(env.JOB, ""), _env_int(env.GENERATION), _env_int("RANK"), os.getpid()
        )
        self.outbox = Outbox(socket_path)
        self.forgotten = False
        self.epoch_due = 0.0
        """Earliest time (monotonic, seconds) for the next announced end of an epoch."""
        self.between_epochs = False
        """True while the announced end of an epoch is not closed."""
        self._busy = Busy()
        self._clock: step_times.StepClock | None = None
        self._measures_torch = False
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
            self.added_at = 0.0
            self.sent_steps = 0
            self.parts: tuple[float | None, ...] = ()

    def _measure_steps(self) -> None:
        """Measure the parts of the steps from now on, if the agent accepts them. Called in the
        reporting thread.
        """
        if os.environ.get(env.STEP_TIMES) != "1":
            return
        self._clock = self._clock or step_times.start()
        if not self._measures_torch and "torch" in sys.modules:
            self._measures_torch = True
            from malletrain.training import step_hooks

            step_hooks.install()

    def add(self, batch_size: float, busy_s: float | None) -> None:
        self._busy.step(busy_s)
        if self._clock is not None:
            self.parts = self._clock.read()
        self.samples += batch_size
        self.steps += 1
        self.batch = batch_size
        self.last = time.time()
        now = time.monotonic()
        is_long, self.added_at = now - self.added_at >= QUIET_S, now
        if is_long or now >= self.due:
            self._measure_steps()
            if self.steps == 1:
                self.first = self.last
                self.put(StartupMark(self.sender, "first", self.first))
            self.due = now + SEND_INTERVAL_S
            self.flush()
        if self.sent_steps != self.steps and not self._late:
            self._wake()

    def flush(self) -> None:
        with self._lock:  # the thread below calls this, too
            steps = self.steps
            if self.sent_steps == steps:
                return
            unsent, busy = self.outbox.unsent, self._busy.read()
            counts = (self.samples, steps, self.batch, self.first, self.last, unsent, busy)
            data = self.encode(*counts, self.parts)
            reached(FaultPoint.WORKER_REPORTS)
            if self.outbox.send(data):
                self.sent_steps = steps
            reached(FaultPoint.WORKER_REPORTED)

    def retry(self) -> None:
        with self._lock:
            self.outbox.retry()

    def agent_is_slow(self) -> bool:
        """Send again what the agent has not received. Return whether the agent's queue is too
        full.
        """
        self.flush()
        with self._lock:
            is_left = self.sent_steps != self.steps or not self.outbox.retry()
            return is_left and self.outbox.agent_is_slow()

    def close(self) -> None:
        self.outbox.close()
        self._busy.close()
        if self._clock is not None:
            step_times.stop()

    def _wake(self) -> None:
        """Let the thread send the unsent reports."""
        self._late = True
        self._wake_event.set()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._send_late, name="malletrain-reports", daemon=True
            )
            # no thread can start, or the interpreter exits: send without one
            with contextlib.suppress(RuntimeError):
                self._thread.start()

    def _send_late(self) -> None:
        """Run in a thread: send reports that no later report has superseded, and those that the
        agent was too slow for. A worker may be stopped in the collective after its last report, and
        then sends nothing.
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
            decode_datagram(data)  # report to the user here what the agent would reject
        except (TypeError, ValueError, RecursionError) as error:
            tell(f"A report of this script is ignored: {error}", once=f"put {error}")
            return
        with self._lock:
            sent = self.outbox.send(data, keep=True)
        if not sent and not self._late:
            self._wake()


_worker: _Worker | None = None
_connected = False


def _connect() -> _Worker | None:
    """Read the environment on the first call. Return the worker, or None outside MalleTrain."""
    global _worker, _connected
    if not _connected:
        _connected = True
        path = os.environ.get(env.SOCKET)
        if path:
            _worker = _Worker(path)
            install_stack_signal()
            tracking.set_wandb_run()
            atexit.register(_at_exit)
    return _worker


def forget() -> None:
    """Forget the worker in a forked child (for example a DataLoader worker), which is not a worker
    of the job. If the child reports, it starts with new counts.
    """
    global _worker, _connected
    if _worker is not None:
        _worker.forgotten = True
        remove_stack_signal()
        _worker.close()
    _worker, _connected = None, False


os.register_at_fork(after_in_child=forget)


def _at_exit() -> None:
    worker = _worker
    if worker is None:
        return
    # If the agent's queue is full, wait for a moment, to not lose the last steps and metrics.
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while worker.agent_is_slow() and time.monotonic() < deadline:
        time.sleep(0.005)


def _usable(argument: object, what: str = _SAMPLES) -> float | None:
    """Return ``argument`` (a number, a numpy scalar or a tensor of one element) as a Python number.
    If it is none, tell the user that ``what`` is needed and return None.
    """
    value: Any = argument
    try:
        if not isinstance(value, int | float) and hasattr(value, "item"):
            value = value.item()
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and 0 <= value <= _MAX_SAMPLES
        ):
            return value if type(value) is int else float(value)
        shown = repr(argument)[:60]
    except Exception:  # an odd object must not stop a training run
        shown = f"an object of type {type(argument).__name__}"
    tell(f"report() takes {what}, but got {shown}; such reports are ignored.", once=what)
    return None


def report(batch_size: float, busy_s: float | None = None) -> None:
    """Report a finished training step. This is the one line that MalleTrain needs in a script. Call
    it on every rank at the end of each step, always from the same thread.

    Args:
        batch_size: number of samples that *this process* trained on in the step (not the global
            batch: the ranks' numbers are summed).
        busy_s: time that this process itself worked in the step, seconds, without its wait for the
            other ranks. It is used to detect slow nodes. Default: processor time of the calling
            thread, or nothing if the work is done by an accelerator.

    Takes a few microseconds, never blocks, never raises. Does nothing outside MalleTrain.
    """
    if type(batch_size) is not int or not 0 <= batch_size <= _MAX_SAMPLES:
        usable = _usable(batch_size)
        if usable is None:
            return
        batch_size = usable
    if busy_s is not None:
        busy_s = _usable(busy_s, _BUSY)
    worker = _worker or _connect()
    if worker is not None:
        worker.add(batch_size, busy_s)


_last_steps: dict[str, tuple[int, int]] = {}
"""Metric → the round in which it was last reported, and its step. Of the first MAX_WATCHED_METRICS
metrics.
"""
MAX_WATCHED_METRICS = 1000


def _tell_decreasing_steps(name: str, step: int) -> None:
    """Tell the owner of a sweep's trial if the steps of a metric decrease within a round. In a new
    round, after the loss of a node, steps are repeated.
    """
    if name not in _last_steps and len(_last_steps) >= MAX_WATCHED_METRICS:
        return
    number = generation()
    last_round, last = _last_steps.get(name, (number, step))
    _last_steps[name] = number, step
    if step < last and last_round == number:
        notice(
            f"The metric {name[:40]} was reported for a lower step than the one before. If the "
            "sweep's pruner compares trials by this metric, it does not see such values. It sees "
            "all values of steps that count over the whole training and are reported in order."
        )


def metric(name: str, value: float, step: int | None = None) -> None:
    """Report a named number, such as ``metric("loss", 0.97, step=300)``. The daemon stores each
    value with its time, the number of samples processed so far and the job's scale; very long
    series are thinned out. Never raises.

    Args:
        name: name of the metric, at most 100 characters.
        value: value of the metric. NaN and infinity are shown as such, and are never a trial's best
            value.
        step: a count of the script from 0 over the whole training, such as an epoch; None for none.
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
            "metric() takes a name, a number and a step from 0. A call with "
            f"{shown} has something else, and is ignored.",
            once=f"metric {shown}",
        )
        return
    if step is not None and env.TRIAL in os.environ:
        _tell_decreasing_steps(name, step)
    worker = _worker or _connect()
    if os.environ.get(env.TRACK):
        tracking.log_to_trackers(name, value, step)
    if worker is not None:
        worker.flush()
        worker.put(ScriptMetric(worker.sender, name, value, time.time(), worker.samples, step))


def mark(name: str, at: float | None = None) -> None:
    """Report a point in the start-up of this process, to show where a rescale spends its time.
    Never raises.

    Args:
        name: name of the point.
        at: its time, seconds since the epoch. Default: now.
    """
    worker = _worker or _connect()
    if worker is not None:
        worker.put(StartupMark(worker.sender, name, time.time() if at is None else at))


def describe(parameters: int | None = None, flops_per_sample: float | None = None) -> None:
    """Report facts about the model. None leaves a fact out.

    Args:
        parameters: number of parameters.
        flops_per_sample: floating-point operations per sample, forward and backward.
    """
    worker = _worker or _connect()
    if worker is not None:
        worker.put(ModelFacts(worker.sender, parameters, flops_per_sample))


def tell_batch(
    rank: int,
    global_batch_size: int | None,
    base: int | None = None,
    most: int | None = None,
    noise_scale: float | None = None,
) -> None:
    """Report how the ranks share the samples of a step, once for each sampler, and after each
    change.

    Args:
        rank: rank of this process; rank 0 reports.
        global_batch_size: samples per step over all ranks; None if each rank has its own batch.
        base: the script's global batch, samples.
        most: largest global batch, samples, if it follows the gradient noise.
        noise_scale: the gradient noise scale, samples; infinite if there is only noise.
    """
    if rank == 0:
        if noise_scale is not None:
            noise_scale = min(noise_scale, _MAX_SAMPLES)
        send(
            BatchFacts,
            global_batch=global_batch_size,
            base_batch=base,
            most=most,
            noise_scale=noise_scale,
        )


def flush() -> None:
    """Send all reports that are not sent yet."""
    worker = _worker
    if worker is not None:
        worker.flush()
        worker.retry()


def send(kind: type[Any], **fields: Any) -> None:
    """Send a datagram from this worker. It is stored until the agent receives it.

    Args:
        kind: a class of :mod:`malletrain.protocol.worker_channel`.
        fields: fields of the datagram, without the sender.
    """
    worker = _worker or _connect()
    if worker is not None:
        worker.put(kind(worker.sender, **fields))


def training_over() -> None:
    """Report that this process has no samples left to train on and runs the code after its
    training. The job is then no longer stopped for a planned rescale. The next :func:`report`
    revokes this.
    """
    flush()
    send(WorkLeft, samples=0.0)


def between_epochs(entered: bool) -> None:
    """Report that this process has entered or left the code that follows the steps of an epoch. A
    planned rescale waits until it has left. An end of an epoch within a second of an announced one
    is not announced. ``entered``: True on entering, False on leaving.
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
    """Return (samples, steps) that this process has reported so far."""
    worker = _worker
    return (worker.samples, worker.steps) if worker is not None else (0, 0)


def entered(generation: int, rank: int, world_size: int) -> None:
    """Continue in another round without a restart; the counts start at 0 again. For
    :mod:`malletrain.elastic`.

    Args:
        generation: number of the new round.
        rank: rank of this process in it.
        world_size: number of ranks in it.
    """
    flush()
    os.environ.update(
        {env.GENERATION: str(generation), "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    )
    worker = _worker or _connect()
    if worker is not None:
        worker.enter(Sender(worker.sender.job, generation, rank, os.getpid()))


def generation() -> int:
    """Return the number of the round of this process; 0 outside MalleTrain."""
    return _env_int(env.GENERATION)


def open_flags() -> FlagsReader | None:
    """Open the agent's flags. Return None outside MalleTrain, or if they cannot be read (the user
    gets a message).
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
    """Report the marks ``start`` (creation of this process, to 10 ms) and ``import`` (now)."""
    now = time.time()
    try:
        with open("/proc/self/stat", "rb") as file:
            # field 22 of proc_pid_stat(5), since boot
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        mark("start", now - age)
    except (
        OSError,
        ValueError,
        IndexError,
        AttributeError,
    ):  # no /proc here: the agent knows the start time anyway
        pass
    mark("import", now)
