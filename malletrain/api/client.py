"""The client of a daemon in Python: submit, inspect, wait, cancel. The asyncio version is
:class:`malletrain.api.aio.AsyncClient`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from malletrain.api.functions import FunctionExecutor, FunctionFuture
from malletrain.api.job import Job, wait_for
from malletrain.api.map_results import MapResults, start_map
from malletrain.api.options import FunctionOptions, MapOptions, SubmitOptions, spec_of
from malletrain.client import Connection, Unreachable, operations
from malletrain.client.exchange import TIMEOUT_S
from malletrain.client.operations import Operation
from malletrain.identity.keys import user_name
from malletrain.protocol import env
from malletrain.protocol.messages import JobSpec
from malletrain.protocol.views import EventView, NodeView, StatusView, UsageView
from malletrain.submission.again import requeued
from malletrain.submission.array import indices, one_of
from malletrain.submission.resuming import file_of, resuming, with_snapshots_bound

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
R = TypeVar("R")


class Client:
    """The jobs and nodes of one daemon. May be used from several threads: each has a connection of
    its own. Usable as a context manager.

    Args:
        state_dir: state directory of the daemon. Default: ``$MALLETRAIN_STATE_DIR``, your own
            daemon's, else the site's.
        timeout_s: maximum time for an answer, seconds.

    Raises:
        malletrain.client.Unreachable: no daemon answers. Every method raises it if the daemon is
            gone.
        malletrain.client.ClientError: the daemon refuses; the text is a sentence.
    """

    def __init__(
        self, state_dir: str | os.PathLike[str] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        place = os.fspath(state_dir) if state_dir else os.environ.get(env.STATE_DIR)
        self.state_dir = Path(place) if place else None
        """State directory of the daemon; None: your own daemon, else the site's."""
        self.timeout_s = timeout_s
        self._local = threading.local()
        self._lock = threading.Lock()
        self._open: list[Connection] = []
        self._functions = FunctionExecutor(self, {})
        self._connection()

    def _connection(self) -> Connection:
        """Returns this thread's connection."""
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = Connection.of(
                self.state_dir, timeout_s=self.timeout_s
            )
            with self._lock:
                self._open.append(connection)
        return connection

    def do(self, operation: Operation[T]) -> T:
        """Carry out one operation of :mod:`malletrain.client.operations`."""
        connection = self._connection()
        try:
            return connection.do(operation)
        except Unreachable:  # after a restart it may be at another address
            self._forget(connection)
            raise

    def _forget(self, connection: Connection) -> None:
        """Close the connection, so that this thread's next call looks for the daemon again."""
        self._local.connection = None
        with self._lock:
            if connection in self._open:
                self._open.remove(connection)
        connection.close()

    # --- jobs ---

    def submit(
        self,
        script: str | os.PathLike[str],
        args: Sequence[object] = (),
        **options: Unpack[SubmitOptions],
    ) -> Job:
        """Submit ``script`` as a job that follows the idle nodes.

        Args:
            script: a torchrun script that reports its progress (:func:`malletrain.report`).
            args: its arguments.
            **options: those of ``malletrain submit``, see
                :class:`malletrain.api.options.SubmitOptions`.

        Raises:
            malletrain.submission.error.SpecError: an option is invalid; the sentence says what is
                accepted.
        """
        source = options.pop("resume_from", None)
        spec = spec_of(script, args, options)
        if source is not None:
            spec = resuming(spec, file_of(source) or self.job(source).id)
        return self.submit_spec(with_snapshots_bound(spec))

    def submit_array(
        self,
        script: str | os.PathLike[str],
        args: Sequence[object] = (),
        *,
        array: str | Iterable[int],
        **options: Unpack[SubmitOptions],
    ) -> list[Job]:
        """Submit a job for each index, which replaces ``{index}`` in arguments and variables.

        Args:
            script: as in :meth:`submit`.
            args: its arguments.
            array: indices, as numbers or as text such as ``"1-10"``.
            **options: as in :meth:`submit`.
        """
        numbers = indices(array if isinstance(array, str) else ",".join(map(str, array)))
        source = options.pop("resume_from", None)
        spec = spec_of(script, args, options)
        if source is not None:
            spec = resuming(spec, file_of(source) or self.job(source).id)
        return [self.submit_spec(with_snapshots_bound(one_of(spec, n))) for n in numbers]

    def requeue(self, job: str, args: Sequence[object] = ()) -> Job:
        """Submit an ended job again, from its snapshot.

        Args:
            job: its id or name.
            args: additional arguments, appended to the old ones.

        Raises:
            malletrain.submission.error.SpecError: the job has not ended, or belongs to another
                user.
        """
        return self.submit_spec(
            requeued(self.do(operations.job(job)), args, time.time(), user_name())
        )

    def submit_spec(self, spec: JobSpec) -> Job:
        """Submit a job from its specification."""
        return Job(self, self.do(operations.submit(spec)))

    def submit_function(
        self,
        function: Callable[..., R],
        /,
        *args: Any,
        options: FunctionOptions | None = None,
        **named: Any,
    ) -> FunctionFuture[R]:
        """Run ``function(*args, **named)`` as a job. Every rank calls it; what rank 0 returns is
        the future's result. The function and its arguments are packed by cloudpickle.

        Args:
            function: function that is called on the nodes, and again from the beginning after each
                rescale, each lost node and each failure. With :class:`malletrain.Snapshot` it can
                resume its state; with the option ``tries=1`` it is called at most once.
            *args: its arguments.
            options: options of the job; see :class:`malletrain.api.options.FunctionOptions`.
            **named: its arguments by name.

        Raises:
            TypeError: the function does not take these arguments, one of them is an option of jobs
                that the function would take as a ``**`` argument, or they cannot be pickled.
        """
        return self._functions.run(function, args, named, options or {})

    def map(
        self,
        function: Callable[..., R],
        items: Iterable[Any],
        /,
        *,
        ordered: bool = True,
        chunk: int = 0,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[MapOptions],
    ) -> MapResults[R]:
        """Call ``function(item)`` for each item in processes on idle nodes, as a farm. Returns an
        iterator of the results.

        Args:
            function: the function, packed by cloudpickle. It may be called more than once for an
                item, if the node of its process is lost.
            items: the items. All are packed before the first is sent.
            ordered: whether results come in the order of the items, else as they are there.
            chunk: number of items for one process after another. Default: so many that the farm
                has up to 64 tasks for each of its nodes.
            progress: called with the number of items that are done, and of all.
            **options: options of the farm, such as ``nodes="1:8"``; see
                :class:`malletrain.api.options.MapOptions`.

        Raises:
            malletrain.submission.error.SpecError: an option is invalid.
            TypeError: the function or an item cannot be pickled.
        """
        return start_map(self, function, items, ordered, chunk, progress, options)

    def executor(self, **options: Unpack[FunctionOptions]) -> FunctionExecutor:
        """Returns a :class:`concurrent.futures.Executor` that runs functions as jobs."""
        return FunctionExecutor(self, options)

    def job(self, job: str) -> Job:
        """Returns a job by id or name (the newest of several with the same name)."""
        return Job(self, self.do(operations.job(job)).job)

    def jobs(self, *, ended: int = 1000) -> list[Job]:
        """Returns unfinished jobs and the newest ended ones, the oldest first.

        Args:
            ended: maximum number of ended jobs.
        """
        return [Job(self, view) for view in self.do(operations.jobs(ended=ended))]

    def cancel(self, *jobs: Job | str) -> list[bool]:
        """Cancel jobs. Returns for each whether it had not ended yet."""
        return [(self.job(job) if isinstance(job, str) else job).cancel() for job in jobs]

    def wait(self, jobs: Iterable[Job | str], timeout: float | None = None) -> list[Job]:
        """Wait until all these jobs have ended; returns them.

        Raises:
            TimeoutError: some have not ended after ``timeout`` seconds.
        """
        selected = [self.job(job) if isinstance(job, str) else job for job in jobs]
        wait_for(self, selected, timeout)
        return selected

    # --- the machine ---

    def status(self) -> StatusView:
        """Returns a summary of the daemon and the machine."""
        return self.do(operations.status())

    def nodes(self, *, explain: bool = False) -> list[NodeView]:
        """Returns idle and leased nodes; with ``explain`` all nodes with the rules they passed or
        failed.
        """
        return self.do(operations.nodes(explain=explain))

    def events(
        self, *, since: int = 0, limit: int = 500, job: str | None = None, wait_s: float = 0.0
    ) -> list[EventView]:
        """Returns events of the audit log with ``seq > since``, the oldest first. A negative
        ``since`` is the number of newest events to return. If there are none, waits up to
        ``wait_s`` seconds for one.
        """
        return self.do(operations.events(since=since, limit=limit, job=job, wait_s=wait_s))

    def usage(self, **between: float) -> list[UsageView]:
        """Returns the usage of leased nodes; ``since`` and ``until`` in seconds since the epoch."""
        return self.do(operations.usage(**between))

    # --- its end ---

    def close(self) -> None:
        """Close the connections of all threads; no call may be in progress. Functions continue to
        run; their futures are not updated.
        """
        self._functions.leave()
        with self._lock:
            for connection in self._open:
                connection.close()
            self._open.clear()
        self._local = threading.local()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
