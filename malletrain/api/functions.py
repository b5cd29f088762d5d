"""Functions as jobs: a :class:`concurrent.futures.Executor` whose workers are idle nodes.

Decides when a function's future is done. :mod:`malletrain.api.function_job` converts a function to
a job.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Any, Protocol, TypeVar

from malletrain.api.following import AGAIN_S, ENDED, Endings
from malletrain.api.function_job import function_spec, result_of
from malletrain.api.job import Job
from malletrain.api.options import FunctionOptions
from malletrain.client import ClientError
from malletrain.client.errors import TRANSIENT
from malletrain.client.operations import Operation
from malletrain.protocol.messages import JobSpec
from malletrain.training.functions import FunctionLost

R = TypeVar("R")
T = TypeVar("T")

LOGGER = logging.getLogger(__name__)
LISTEN_S = 1.0
"""Maximum duration of one request for news, seconds, and so the maximum wait of
:meth:`FunctionExecutor.leave`."""


class JobSubmitter(Protocol):
    """Interface of a client that submits jobs."""

    def do(self, operation: Operation[T]) -> T:
        """Carry out one operation."""

    def submit_spec(self, spec: JobSpec) -> Job:
        """Submit a job from its specification."""


class FunctionFuture(Future[R]):
    """The result of a function that runs as a job."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._ending = threading.RLock()
        self.job = job
        """The job: its state, logs, metrics."""

    def cancel(self) -> bool:
        """Cancel the job. Return False if the function has ended."""
        if self.done():
            return self.cancelled()
        self.job.cancel()
        if self.job.status != "cancelled":
            return False
        self.resolve()
        return self.cancelled()

    def resolve(self) -> None:
        """Set the outcome of the job, which has ended. Can be called from several threads.

        Raises:
            malletrain.client.ClientError: the daemon cannot say now how the job ended.
        """
        if self.done():
            return
        if self.job.view.state == "cancelled":
            with self._ending:
                if not self.done() and super().cancel():
                    self.set_running_or_notify_cancel()
            return
        detail = self.job.detail()
        try:
            result = result_of(detail)
        except BaseException as error:
            self.fail(error)
            return
        with self._ending:
            if not self.done():
                self.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Set an exception as the outcome, unless there is one."""
        with self._ending:
            if not self.done():
                self.set_exception(error)


class FunctionExecutor(Executor):
    """Runs functions as jobs: ``with client.executor(nodes="1:4") as pool: pool.submit(f, x)``.

    Args:
        client: the client that submits the jobs.
        options: options of every job, as for :meth:`malletrain.Client.submit`.
    """

    def __init__(self, client: JobSubmitter, options: FunctionOptions) -> None:
        self._client = client
        self._options = options
        self._endings = Endings(())
        self._futures: dict[str, FunctionFuture[Any]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_shut_down = False
        self._work = threading.Event()

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> FunctionFuture[R]:
        """Submit a job that calls ``fn(*args, **kwargs)``; what rank 0 returns is the result.

        Raises:
            RuntimeError: the executor was shut down.
            TypeError: the function or its arguments cannot be sent to another process.
        """
        return self.run(fn, args, kwargs, {})

    def run(
        self,
        function: Callable[..., R],
        args: tuple[Any, ...],
        named: dict[str, Any],
        options: FunctionOptions,
    ) -> FunctionFuture[R]:
        """Call a function on a node, like :meth:`submit`, with additional options of this job.

        Args:
            function: the function.
            args: its positional arguments.
            named: its keyword arguments.
            options: options of the job.
        """
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("This executor was shut down; make another.")
            if self._thread is None:
                self._start_watching()
            merged: FunctionOptions = {**self._options, **options}
            spec = function_spec(function, args, named, merged)
            future: FunctionFuture[R] = FunctionFuture(self._client.submit_spec(spec))
            self._futures[future.job.id] = future
            self._endings.add(future.job.id)
            self._work.set()
            return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more functions. With ``wait``, return when all have ended.

        Raises:
            malletrain.client.ClientError: a job could not be cancelled. All others are.
        """
        with self._lock:
            self._is_shut_down = True
            futures, thread = list(self._futures.values()), self._thread
        self._work.set()
        if cancel_futures:
            _cancel_all(futures)
        if wait and thread is not None:
            thread.join()

    def leave(self) -> None:
        """Stop watching the functions that have not ended. Their futures end with an error that
        says so; the jobs continue.
        """
        with self._lock:
            self._is_shut_down, thread = True, self._thread
            futures = list(self._futures.values())
            self._futures.clear()
        self._work.set()
        if thread is not None:
            thread.join()
        for future in futures:
            future.fail(
                ClientError(
                    f"The client was closed before {_job(future)} ended. The job continues; "
                    f'Client().job("{future.job.id}").result() waits for its result.'
                )
            )

    def _start_watching(self) -> None:
        """Start the thread that watches for ended jobs, from the current position in the log."""
        news = self._client.do(self._endings.request(0.0))
        self._endings.receive(news)
        self._thread = threading.Thread(target=self._watch, name="malletrain-futures", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self._futures or not self._is_shut_down:
            try:
                self._watch_once()
            except BaseException:  # a future's callback has called sys.exit(); it is not repeated
                LOGGER.exception("A callback of a future tried to end the thread of all futures.")

    def _watch_once(self) -> None:
        """Wait for news, and set the outcomes of the jobs that have ended."""
        if not self._futures:
            self._work.clear()
            if not self._futures and not self._is_shut_down:
                self._work.wait()
            return
        try:
            news = self._client.do(self._endings.request(LISTEN_S))
        except Exception as error:
            if not _is_transient(error):
                for name in list(self._futures):
                    self._fail(name, error)
                return
            self._endings.restart()
            time.sleep(AGAIN_S)
            return
        for name in self._endings.receive(news):
            self._resolve_if_ended(name)

    def _resolve_if_ended(self, name: str) -> None:
        """Set the outcome of a job's future if the job has ended. If the daemon cannot say so now,
        the job stays due.
        """
        future = self._futures.get(name)
        if future is None:
            self._endings.drop(name)
            return
        try:
            if future.job.refresh().state in ENDED:
                future.resolve()
                self._futures.pop(name, None)
            self._endings.update(future.job.view)
        except Exception as error:
            if _is_transient(error):
                time.sleep(AGAIN_S)
            else:
                self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        """End the future of a job about which the daemon says no more."""
        self._endings.drop(name)
        future = self._futures.pop(name, None)
        if future is not None:
            lost = FunctionLost(f"What becomes of {_job(future)} is not known any more: {error}")
            lost.__cause__ = error
            future.fail(lost)


def _job(future: FunctionFuture[Any]) -> str:
    return f"job {future.job.id} ({future.job.name})"


def _is_transient(error: Exception) -> bool:
    return isinstance(error, ClientError) and error.code in TRANSIENT


def _cancel_all(futures: Iterable[FunctionFuture[Any]]) -> None:
    """Cancel all futures. Raises the first error after the last one."""
    first: ClientError | None = None
    for future in futures:
        try:
            future.cancel()
        except ClientError as error:
            first = first or error
    if first is not None:
        raise first
