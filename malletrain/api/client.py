"""The client of a daemon in Python: submit, inspect, wait, cancel. :class:`Client` runs the
coroutines of :class:`malletrain.api.aio.AsyncClient` and waits for them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from malletrain.api.aio import AsyncClient, wait_for
from malletrain.api.functions import FunctionExecutor, FunctionFuture
from malletrain.api.job import Job
from malletrain.api.map_results import MapResults, start_map
from malletrain.api.options import FunctionOptions, MapOptions, SubmitOptions
from malletrain.api.session import BlockingSession, finish, place_of
from malletrain.client import Connection
from malletrain.client.exchange import TIMEOUT_S
from malletrain.client.operations import Operation
from malletrain.protocol.messages import JobSpec
from malletrain.protocol.views import EventView, MembersView, NodeView, StatusView, UsageView

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
        self.state_dir = place_of(state_dir)
        """State directory of the daemon; None: your own daemon, else the site's."""
        connect = partial(Connection.of, self.state_dir, timeout_s=timeout_s)
        self._session = BlockingSession(connect)
        self._client = AsyncClient(self.state_dir, timeout_s=timeout_s, session=self._session)
        self._functions = FunctionExecutor(self, {})
        self._executors = weakref.WeakSet([self._functions])
        self._lock = threading.Lock()
        """Held while executors are added."""

    def do(self, operation: Operation[T]) -> T:
        """Carry out one operation of :mod:`malletrain.client.operations`."""
        return finish(self._client.do(operation))

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
        return Job(finish(self._client.submit(script, args, **options)))

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
        jobs = finish(self._client.submit_array(script, args, array=array, **options))
        return [Job(job) for job in jobs]

    def requeue(self, job: str, args: Sequence[object] = ()) -> Job:
        """Submit an ended job again, from its snapshot.

        Args:
            job: its id or name.
            args: additional arguments, appended to the old ones.

        Raises:
            malletrain.submission.error.SpecError: the job has not ended, or belongs to another
                user.
        """
        return Job(finish(self._client.requeue(job, args)))

    def submit_spec(self, spec: JobSpec) -> Job:
        """Submit a job from its specification."""
        return Job(finish(self._client.submit_spec(spec)))

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
        """Call ``function(item)`` for each item in processes on idle nodes, as a farm. Return an
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
        """Return a :class:`concurrent.futures.Executor` that runs functions as jobs."""
        executor = FunctionExecutor(self, options)
        with self._lock:
            self._executors.add(executor)
        return executor

    def job(self, job: str) -> Job:
        """Return a job by id or name (the newest of several with the same name)."""
        return Job(finish(self._client.job(job)))

    def jobs(self, *, ended: int = 1000) -> list[Job]:
        """Return unfinished jobs and the newest ended ones, the oldest first.

        Args:
            ended: maximum number of ended jobs.
        """
        return [Job(job) for job in finish(self._client.jobs(ended=ended))]

    def cancel(self, *jobs: Job | str) -> list[bool]:
        """Cancel jobs. Return for each whether it had not ended yet."""
        selected = [self.job(job) if isinstance(job, str) else job for job in jobs]
        return [job.cancel() for job in selected]

    def wait(self, jobs: Iterable[Job | str], timeout: float | None = None) -> list[Job]:
        """Wait until all these jobs have ended; return them.

        Raises:
            TimeoutError: some have not ended after ``timeout`` seconds.
        """
        selected = [self.job(job) if isinstance(job, str) else job for job in jobs]
        finish(wait_for(self._session, [job.coroutines for job in selected], timeout))
        return selected

    def set_link(self, job: str, name: str, url: str) -> str:
        """Give an unfinished job a link to a page of its own, such as a TensorBoard. ``malletrain
        show`` and the page in the browser show it to every user.

        Args:
            job: its id or name.
            name: of the link, 1 to 40 characters; one of this name is replaced.
            url: ``http://`` or ``https://`` address, without a password; empty: remove the link.

        Returns:
            What the link is now, as a sentence.

        Raises:
            ClientError: the job has ended, is another user's, or has 8 other links, or the name or
                the address is invalid.
        """
        return finish(self._client.set_link(job, name, url))

    # --- services ---

    def members(self, job: str, *, since: str = "", wait_s: float = 0.0) -> MembersView:
        """Return the members of a service, and what nodes are worth to it.

        Args:
            job: its id or name.
            since: the ``version`` of the last answer. If it is still the present one, the daemon
                answers at the next change: a member that joins, becomes ready, gets notice to leave
                or leaves, another value of nodes, or the end of the service.
            wait_s: maximum time to wait for that, seconds, a minute at most.
        """
        return finish(self._client.members(job, since=since, wait_s=wait_s))

    def worth(
        self,
        job: str,
        values: Mapping[int, float] | None = None,
        *,
        next_each: float | None = None,
        next_count: int = 1,
        expires_s: float | None = None,
    ) -> str:
        """Set what nodes are worth to a service of your own from now on, in place of the values
        with which it was submitted. Pass either ``values`` or ``next_each``.

        Args:
            job: its id or name.
            values: number of nodes → value, samples/s, at 1 to 64 sizes. If all are 0, the service
                gives all its nodes back and waits for none.
            next_each: value that each of the next nodes adds. The nodes that the service has keep
                their value, and nodes beyond the next ones are worth nothing more.
            next_count: number of the next nodes.
            expires_s: time after which the values lapse unless they are set again, seconds; then
                the last values without such a limit apply. None: they do not lapse.

        Returns:
            What the values are now, as a sentence.
        """
        return finish(
            self._client.worth(
                job, values, next_each=next_each, next_count=next_count, expires_s=expires_s
            )
        )

    # --- the machine ---

    def status(self) -> StatusView:
        """Return a summary of the daemon and the machine."""
        return finish(self._client.status())

    def nodes(self, *, explain: bool = False) -> list[NodeView]:
        """Return idle and leased nodes; with ``explain`` all nodes with the rules they passed or
        failed.
        """
        return finish(self._client.nodes(explain=explain))

    def events(
        self, *, since: int = 0, limit: int = 500, job: str | None = None, wait_s: float = 0.0
    ) -> list[EventView]:
        """Return events of the audit log, the oldest first.

        Args:
            since: return events with a higher ``seq``. If negative, return that number of newest
                events.
            limit: maximum number of events.
            job: id or name of a job; None: events of all jobs.
            wait_s: if there are no events, wait this long for one, seconds.
        """
        return finish(self._client.events(since=since, limit=limit, job=job, wait_s=wait_s))

    def usage(self, **between: float) -> list[UsageView]:
        """Return the usage of leased nodes; ``since`` and ``until`` in seconds since the epoch."""
        return finish(self._client.usage(**between))

    # --- its end ---

    def close(self) -> None:
        """Close the connections of all threads; no call may be in progress. Functions continue to
        run; their futures, also those of executors, end with an error that says how to get the
        result.
        """
        with self._lock:
            executors = list(self._executors)
        for executor in executors:
            executor.leave()
        finish(self._client.close())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
