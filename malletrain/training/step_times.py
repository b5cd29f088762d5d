"""Measures where the time of this process's training steps goes: waiting for data, in exchanges
with other ranks, in snapshots. What is left of a step is computing.

Decides nothing about what follows from the times. Each part is measured by its duration on the wall
clock, so a process that busy-waits in a collective, or whose OpenMP threads spin, does not compute.
If the process uses a GPU, the duration is that on the GPU: an event is recorded in its stream at
the begin and at the end of the part, and the time between them is the time for which the stream had
nothing else to do. The events are read when they have occurred; a step never waits for the GPU.

Only the thread that reports the steps counts. Within a part another one is not counted: a
collective of a snapshot belongs to the snapshot. Standard library only.
:mod:`malletrain.training.step_hooks` says where the parts of a step begin in torch.

:class:`Busy` measures the time for which the process worked itself instead of waiting for other
ranks. Ranks that train together all step at the pace of the slowest, which differs from the others
by its working time. If the script does not report that time, it is the time for which the reporting
thread was on a processor or waited for one, as the kernel counts it: a thread that waits in a
collective sleeps, and a thread beside a noisy neighbour waits for its processor. With an
accelerator the thread's time is meaningless, and nothing is reported.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

from malletrain.protocol.worker_channel import MEASURED_PARTS, StepPart

MAX_PENDING = 256
"""Maximum number of parts whose GPU events have not occurred. Further ones are not counted."""

P = ParamSpec("P")
R = TypeVar("R")
_ACCELERATOR_LIBRARIES = ("jax", "tensorflow", "torch_xla")
"""Libraries whose work is not done in the reporting thread."""


class StepClock:
    """Cumulative times of the steps of one thread, the one that creates the clock."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._seconds: dict[StepPart, float] = {}
        self._part: StepPart | None = None
        self._began: Any = 0.0
        self._cuda: Any = None
        """``torch.cuda`` if the current part is measured on the GPU."""
        self._device = 0
        """The GPU on which the current part is measured."""
        self._pending: deque[tuple[StepPart, int, Any, Any]] = deque()
        """StepPart, GPU, begin and end of GPU events that have not been read."""
        self._free: dict[int, list[Any]] = {}
        """GPU → events that can be recorded again there. An event belongs to one GPU."""
        self._left_out: set[StepPart] = set()

    def leave_out(self, part: StepPart) -> None:
        """Report ``part`` as not measured from now on: it is measured in part only."""
        self._left_out.add(part)

    @property
    def is_of_this_thread(self) -> bool:
        """Whether the calling thread is the one whose steps are measured."""
        return threading.get_ident() == self._thread

    def begin(self, part: StepPart, any_thread: bool = False) -> bool:
        """Begin a part of a step.

        Args:
            part: the part.
            any_thread: whether the call is made on behalf of the clock's thread, which waits.

        Returns:
            Whether it has begun. It has not within another part, and in another thread; then do
            not call :meth:`end`.
        """
        if self._part is not None or not (any_thread or self.is_of_this_thread):
            return False
        cuda = _cuda()
        if cuda is None:
            self._began = time.perf_counter()
        else:
            try:
                if part in self._left_out or len(self._pending) >= MAX_PENDING:
                    return False
                if cuda.is_current_stream_capturing():
                    return False
                self._device = cuda.current_device()
                self._began = self._event(cuda)
            except RuntimeError as error:
                self._fail(error)
                return False
        self._part, self._cuda = part, cuda
        return True

    def end(self) -> None:
        """End the part that has begun."""
        part, self._part = self._part, None
        if part is None:
            return
        if self._cuda is not None:
            try:
                if self._cuda.current_device() == self._device:
                    ended = self._event(self._cuda)
                    self._pending.append((part, self._device, self._began, ended))
                    self._seconds.setdefault(part, 0.0)
                else:
                    self._free.setdefault(self._device, []).append(self._began)
            except RuntimeError as error:
                self._fail(error)
            return
        took = time.perf_counter() - self._began
        self._seconds[part] = self._seconds.get(part, 0.0) + took

    def read(self) -> tuple[float | None, ...]:
        """Return the cumulative seconds of each part, in the order of ``MEASURED_PARTS``; None for
        a part that never began or is left out.
        """
        if self._pending:
            try:
                self._read_events()
            except RuntimeError as error:
                self._fail(error)
        return tuple(
            None if part in self._left_out else self._seconds.get(part) for part in MEASURED_PARTS
        )

    def _event(self, cuda: Any) -> Any:
        free = self._free.get(self._device)
        event = free.pop() if free else cuda.Event(enable_timing=True)
        event.record()
        return event

    def _fail(self, error: RuntimeError) -> None:
        """Stop to measure: an error of the GPU belongs to the script, which meets it itself."""
        self._pending.clear()
        self._free.clear()
        self._left_out.update(MEASURED_PARTS)
        from malletrain.training import report  # which imports this module

        reason = (str(error).splitlines() or [type(error).__name__])[0]
        report.tell(
            f"Where the time of the steps goes is not measured any more: {reason}",
            once="step times",
        )

    def _read_events(self) -> None:
        while self._pending and self._pending[0][3].query():
            part, device, began, ended = self._pending.popleft()
            self._seconds[part] += max(0.0, began.elapsed_time(ended)) / 1e3
            self._free.setdefault(device, []).extend((began, ended))


def uses_gpu() -> bool:
    """Return whether this process uses a GPU by torch."""
    return _cuda() is not None


def _cuda() -> Any:
    """Return ``torch.cuda`` if this process uses a GPU by it, else None."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


_clock: StepClock | None = None


def start() -> StepClock:
    """Start to measure the steps of the calling thread. Return the clock of this process."""
    global _clock
    _clock = StepClock()
    return _clock


def stop() -> None:
    """Stop to measure."""
    global _clock
    _clock = None


def current() -> StepClock | None:
    """Return the clock of this process; None if nothing is measured."""
    return _clock


class StepSection:
    """A context manager for one part of a step."""

    __slots__ = ("_clock", "_part")

    def __init__(self, part: StepPart) -> None:
        self._part = part
        self._clock: StepClock | None = None

    def __enter__(self) -> None:
        clock = _clock
        if clock is not None and clock.begin(self._part):
            self._clock = clock

    def __exit__(self, *_: object) -> None:
        if self._clock is not None:
            self._clock.end()
            self._clock = None


def counted_as(part: StepPart) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: the time of a call counts as ``part`` of a step."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with StepSection(part):
                return function(*args, **kwargs)

        return call

    return decorate


class TimedLoader:
    """The batches of a loader; the time in which the loop waits for one counts as waiting for data.
    Its other attributes are those of the loader.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches."""
        return waits_counted(self._loader)

    def __len__(self) -> int:
        """Return the number of batches; raises TypeError if the loader has no length."""
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # before __init__, for example while it is unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)


def timed(loader: Iterable[Any]) -> TimedLoader:
    """Measure how long a training loop waits for its data: write ``for batch in
    malletrain.timed(loader)`` instead of ``for batch in loader``. ``malletrain show JOB`` shows the
    result.

    Not needed for a DataLoader of torch, nor for anything that MalleTrain iterates
    (``ElasticStream``, ``run.batches()``, the integrations): their waits are measured without it.

    Args:
        loader: the batches of this rank, any iterable.

    Returns:
        An object with the batches, the length and the attributes of ``loader``.
    """
    return TimedLoader(loader)


def waits_counted(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield ``batches``; the time to get each of them counts as waiting for data."""
    with StepSection("data"):
        iterator = iter(batches)
    missing = object()
    while True:
        with StepSection("data"):
            batch = next(iterator, missing)
        if batch is missing:
            return
        yield batch


class Busy:
    """Working time of one process, as reported by its script or else measured on the reporting
    thread.
    """

    def __init__(self) -> None:
        self._script_s: float | None = None
        self._clock: BusyClock | None = None

    def step(self, seconds: float | None) -> None:
        """Count a step; call it in the reporting thread. ``seconds``: working time reported by the
        script, or None.
        """
        if seconds is not None:
            self._script_s = (self._script_s or 0.0) + seconds
        elif self._clock is None:
            self._clock = BusyClock()

    def read(self) -> float | None:
        """Return the working time so far, seconds; None if unknown."""
        return self._clock.read() if self._script_s is None and self._clock else self._script_s

    def close(self) -> None:
        """Stop measuring."""
        if self._clock is not None:
            self._clock.close()


class BusyClock:
    """Working time of the thread that creates it. Any thread can read it."""

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):  # absent in some containers: then nothing is reported
            path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> float | None:
        """Return the working time of the thread since its start, seconds; None if meaningless."""
        if self._file is None:
            return None
        if _uses_accelerator():
            self.close()
            return None
        try:
            ran, waited = os.pread(self._file, 80, 0).split()[:2]
            return (int(ran) + int(waited)) / 1e9
        except (OSError, ValueError):  # the thread has ended
            self.close()
            return None

    def close(self) -> None:
        """Stop measuring."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _uses_accelerator() -> bool:
    """Return whether an accelerator does the work."""
    if any(name in sys.modules for name in _ACCELERATOR_LIBRARIES):
        return True
    torch = sys.modules.get("torch")
    kinds = (getattr(torch, name, None) for name in ("cuda", "xpu"))
    return any(kind is not None and kind.is_initialized() for kind in kinds)
