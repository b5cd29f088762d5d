"""The client of a daemon for asyncio, with the methods and arguments of :class:`malletrain.Client`.
Several calls may be awaited at the same time.

Decides what a client requests and when. :mod:`malletrain.api.session` decides how it waits, so that
:class:`malletrain.Client` runs the same coroutines without an event loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from malletrain.api.copies import copy_snapshot, export_weights, open_log
from malletrain.api.following import AGAIN_S, ENDED, Endings, LogTail, overdue, stream_of
from malletrain.api.function_job import function_spec, result_of
from malletrain.api.options import FunctionOptions, MapOptions, SubmitOptions, limits_of, spec_of
from malletrain.api.series import JobMetrics, write_events
from malletrain.api.session import AioSession, ClientSession, place_of
from malletrain.client import ClientError, operations
from malletrain.client.errors import RETRIED
from malletrain.client.exchange import TIMEOUT_S
from malletrain.client.operations import Operation
from malletrain.identity.keys import user_name
from malletrain.protocol.messages import JobSpec, daemon_of
from malletrain.protocol.views import (
    EventView,
    JobDetail,
    JobView,
    MembersView,
    NodeView,
    StatusView,
    TaskView,
    UsageView,
)
from malletrain.submission.goals import changes_of
from malletrain.submission.resuming import file_of, requeued, resuming, with_snapshots_bound
from malletrain.submission.task_lists import indices, one_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


class AsyncClient:
    """The jobs and nodes of one daemon, for use within one event loop. Usable as an asynchronous
    context manager.

    Args:
        state_dir: state directory of the daemon. Default: ``$MALLETRAIN_STATE_DIR``, your own
            daemon's, else the site's.
        timeout_s: maximum time for an answer, seconds.
        session: how the client waits. Default: in the running event loop.

    Raises:
        malletrain.client.Unreachable: no daemon answers. Every method raises it if the daemon is
            gone.
        malletrain.client.ClientError: the daemon refuses; the text is a sentence.
    """

    def __init__(
        self,
        state_dir: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        session: ClientSession | None = None,
    ) -> None:
        self.state_dir = place_of(state_dir)
        """State directory of the daemon; None: your own daemon, else the site's."""
        self._session = session or AioSession(self.state_dir, timeout_s)

    async def do(self, operation: Operation[T]) -> T:
        """Carry out one operation of :mod:`malletrain.client.operations`."""
        return await self._session.do(operation)

    async def submit(
        self,
        script: str | os.PathLike[str],
        args: Sequence[object] = (),
        **options: Unpack[SubmitOptions],
    ) -> AsyncJob:
        """As :meth:`malletrain.Client.submit`."""
        source = options.pop("resume_from", None)
        spec = spec_of(script, args, options)
        if source is not None:
            spec = resuming(spec, file_of(source) or (await self.job(source)).id)
        return await self.submit_spec(with_snapshots_bound(spec))

    async def submit_array(
        self,
        script: str | os.PathLike[str],
        args: Sequence[object] = (),
        *,
        array: str | Iterable[int],
        **options: Unpack[SubmitOptions],
    ) -> list[AsyncJob]:
        """As :meth:`malletrain.Client.submit_array`."""
        numbers = indices(array if isinstance(array, str) else ",".join(map(str, array)))
        source = options.pop("resume_from", None)
        spec = spec_of(script, args, options)
        if source is not None:
            spec = resuming(spec, file_of(source) or (await self.job(source)).id)
        return [await self.submit_spec(with_snapshots_bound(one_of(spec, n))) for n in numbers]

    async def requeue(self, job: str, args: Sequence[object] = ()) -> AsyncJob:
        """As :meth:`malletrain.Client.requeue`."""
        old = await self.do(operations.job(job))
        return await self.submit_spec(requeued(old, args, time.time(), user_name()))

    async def submit_spec(self, spec: JobSpec) -> AsyncJob:
        """Submit a job from its specification."""
        return AsyncJob(self._session, await self.do(operations.submit(spec)))

    async def submit_function(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        options: FunctionOptions | None = None,
        **named: Any,
    ) -> AsyncJob:
        """As :meth:`malletrain.Client.submit_function`; the result is that of
        :meth:`AsyncJob.result`.
        """
        return await self.submit_spec(function_spec(function, args, named, options or {}))

    async def map(
        self,
        function: Callable[..., Any],
        items: Iterable[Any],
        /,
        *,
        ordered: bool = True,
        chunk: int = 0,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[MapOptions],
    ) -> AsyncIterator[Any]:
        """As :meth:`malletrain.Client.map`, as an asynchronous iterator: it ends with the first
        exception. ``progress`` is called in another thread. The farm is cancelled if the iterator
        is closed before its end.
        """
        from malletrain.api.client import Client  # it runs the coroutines of this module

        client = await asyncio.to_thread(Client, self.state_dir)
        try:
            results = await asyncio.to_thread(
                lambda: client.map(
                    function, items, ordered=ordered, chunk=chunk, progress=progress, **options
                )
            )
            with results:
                while (result := await asyncio.to_thread(next, results, client)) is not client:
                    yield result
        finally:
            await asyncio.to_thread(client.close)

    async def job(self, job: str) -> AsyncJob:
        """Return a job by id or name (the newest of several with the same name)."""
        return AsyncJob(self._session, (await self.do(operations.job(job))).job)

    async def jobs(self, *, ended: int = 1000) -> list[AsyncJob]:
        """As :meth:`malletrain.Client.jobs`."""
        views = await self.do(operations.jobs(ended=ended))
        return [AsyncJob(self._session, view) for view in views]

    async def cancel(self, *jobs: AsyncJob | str) -> list[bool]:
        """As :meth:`malletrain.Client.cancel`."""
        selected = [await self.job(job) if isinstance(job, str) else job for job in jobs]
        return [await job.cancel() for job in selected]

    async def wait(
        self, jobs: Iterable[AsyncJob | str], timeout: float | None = None
    ) -> list[AsyncJob]:
        """Wait until all these jobs have ended; return them.

        Raises:
            TimeoutError: some have not ended after ``timeout`` seconds.
        """
        selected = [await self.job(job) if isinstance(job, str) else job for job in jobs]
        await wait_for(self._session, selected, timeout)
        return selected

    async def status(self) -> StatusView:
        """Return a summary of the daemon and the machine."""
        return await self.do(operations.status())

    async def nodes(self, *, explain: bool = False) -> list[NodeView]:
        """As :meth:`malletrain.Client.nodes`."""
        return await self.do(operations.nodes(explain=explain))

    async def events(
        self, *, since: int = 0, limit: int = 500, job: str | None = None, wait_s: float = 0.0
    ) -> list[EventView]:
        """As :meth:`malletrain.Client.events`."""
        return await self.do(operations.events(since=since, limit=limit, job=job, wait_s=wait_s))

    async def members(self, job: str, *, since: str = "", wait_s: float = 0.0) -> MembersView:
        """As :meth:`malletrain.Client.members`."""
        return await self.do(operations.members(job, since=since, wait_s=wait_s))

    async def worth(
        self,
        job: str,
        values: Mapping[int, float] | None = None,
        *,
        next_each: float | None = None,
        next_count: int = 1,
        expires_s: float | None = None,
    ) -> str:
        """As :meth:`malletrain.Client.worth`."""
        operation = operations.worth(
            job, values, next_each=next_each, next_count=next_count, expires_s=expires_s
        )
        return await self.do(operation)

    async def set_link(self, job: str, name: str, url: str) -> str:
        """As :meth:`malletrain.Client.set_link`."""
        return await self.do(operations.link(job, name, url))

    async def usage(self, **between: float) -> list[UsageView]:
        """As :meth:`malletrain.Client.usage`."""
        return await self.do(operations.usage(**between))

    async def close(self) -> None:
        """End the connection."""
        await self._session.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class AsyncJob:
    """One job of a daemon: the asyncio version of :class:`malletrain.api.job.Job`."""

    def __init__(self, session: ClientSession, view: JobView) -> None:
        self._session = session
        self.view = view
        """The job's state at the last request to the daemon."""

    def __repr__(self) -> str:
        return f"<AsyncJob {self.id} {self.name!r} {self.view.state}>"

    @property
    def id(self) -> str:
        """The job's id, such as ``j7``."""
        return self.view.id

    @property
    def name(self) -> str:
        """The job's name."""
        return self.view.name

    async def refresh(self) -> JobView:
        """Ask the daemon for the job's state and return it."""
        return (await self.detail()).job

    async def status(self) -> str:
        """Return its current state."""
        return self.view.state if self.view.state in ENDED else (await self.refresh()).state

    async def detail(self) -> JobDetail:
        """Return all details of the job, as ``malletrain show``."""
        detail = await self._session.do(operations.job(self.id))
        self.view = detail.job
        return detail

    async def wait(self, timeout: float | None = None) -> str:
        """As :meth:`malletrain.api.job.Job.wait`."""
        await wait_for(self._session, [self], timeout)
        return self.view.state

    async def logs(
        self, *, follow: bool = False, rank: int = 0, launcher: bool = False, service: bool = False
    ) -> AsyncIterator[str]:
        """Yield its output, line by line: ``async for line in job.logs(follow=True)``.

        Args:
            follow: continue over every rescale until the job has ended.
            rank: global rank of the worker.
            launcher: the launcher's log instead.
            service: the logs of a service's processes instead.
        """
        tail = LogTail(self.id, stream_of(rank, launcher, service), follow)
        async for line in self._lines(tail):
            yield line

    async def _lines(self, tail: LogTail) -> AsyncIterator[str]:
        while not tail.over:
            for line in tail.receive(await self._session.do(tail.request())):
                yield line
            if not tail.over:
                await self._session.sleep(tail.pause_s)

    async def metrics(self, *names: str, since: float = 0.0, most: int = 0) -> JobMetrics:
        """As :meth:`malletrain.api.job.Job.metrics`."""
        request = operations.metrics(self.id, names=names, since=since, most=most)
        series = await self._session.do(request)
        return JobMetrics(series)

    async def result(self, timeout: float | None = None) -> Any:
        """As :meth:`malletrain.api.job.Job.result`."""
        await self.wait(timeout)
        return await self._session.run(result_of, await self.detail())

    async def export(self, out: str | os.PathLike[str] | None = None, *, name: str = "") -> Path:
        """As :meth:`malletrain.api.job.Job.export`."""
        return await self._session.run(
            export_weights, await self.detail(), await self._daemon(), out, name
        )

    async def copy(
        self, folder: str | os.PathLike[str], *, snapshot: bool = True, logs: bool = True
    ) -> list[Path]:
        """As :meth:`malletrain.api.job.Job.copy`."""
        place, files = Path(folder), []
        if snapshot:
            files += await self._session.run(
                copy_snapshot, await self.detail(), await self._daemon(), place
            )
        if logs:
            for stream in (await self._session.do(operations.logs(self.id))).streams:
                with open_log(place, stream) as out:
                    async for line in self._lines(LogTail(self.id, stream, False)):
                        out.write(f"{line}\n")
                files.append(Path(out.name))
        return files

    async def _daemon(self) -> str:
        return daemon_of((await self._session.do(operations.status())).boot)

    async def tensorboard(self, folder: str | os.PathLike[str]) -> Path:
        """As :meth:`malletrain.api.job.Job.tensorboard`."""
        detail, metrics = await self.detail(), await self.metrics()
        return await self._session.run(write_events, Path(folder), detail, metrics.values())

    async def events(self, since: int = 0) -> list[EventView]:
        """As :meth:`malletrain.api.job.Job.events`."""
        events: list[EventView] = []
        while page := await self._session.do(
            operations.events(since=since, limit=1000, job=self.id)
        ):
            events += page
            since = page[-1].seq
        return events

    async def members(self, *, since: str = "", wait_s: float = 0.0) -> MembersView:
        """As :meth:`malletrain.Client.members`."""
        return await self._session.do(operations.members(self.id, since=since, wait_s=wait_s))

    async def worth(
        self,
        values: Mapping[int, float] | None = None,
        *,
        next_each: float | None = None,
        next_count: int = 1,
        expires_s: float | None = None,
    ) -> str:
        """As :meth:`malletrain.Client.worth`."""
        operation = operations.worth(
            self.id, values, next_each=next_each, next_count=next_count, expires_s=expires_s
        )
        return await self._session.do(operation)

    async def tasks(self, state: str = "") -> AsyncIterator[TaskView]:
        """As :meth:`malletrain.api.job.Job.tasks`."""
        after = -1
        while page := (
            await self._session.do(operations.tasks(self.id, state=state, after=after))
        ).tasks:
            for task in page:
                yield task
            after = page[-1].number

    async def retry(self, *numbers: int) -> int:
        """As :meth:`malletrain.api.job.Job.retry`."""
        state = "" if numbers else "failed"
        return await self._session.do(operations.retry(self.id, numbers=numbers, state=state))

    async def extend(
        self, *, deadline: str | None = None, budget: str | None = None, work: str | None = None
    ) -> JobView:
        """Change its goals. An argument that is None changes nothing; ``"none"`` removes a goal.

        Args:
            deadline: time by which the job is to complete, as for ``malletrain extend``.
            budget: maximum charge, such as ``"200nh"``, or ``"+50nh"`` to add to the present one.
            work: total number of samples.
        """
        changes = changes_of(deadline, budget, work)
        return await self._session.do(operations.extend(self.id, **changes))

    async def scale(self, nodes: int | str | tuple[int, int]) -> str:
        """Change its minimum and maximum number of nodes; return the effect, as a sentence."""
        return await self._session.do(operations.scale(self.id, *limits_of(nodes)))

    async def set_link(self, name: str, url: str) -> str:
        """As :meth:`malletrain.Client.set_link`."""
        return await self._session.do(operations.link(self.id, name, url))

    async def cancel(self) -> bool:
        """Stop it and free its nodes. Return False if it had already ended."""
        (result,) = await self._session.do(operations.cancel([self.id]))
        if not result["ok"] and (await self.refresh()).state not in ENDED:
            raise ClientError(result["sentence"])
        return bool(result["ok"])


async def wait_for(session: ClientSession, jobs: Sequence[AsyncJob], timeout: float | None) -> None:
    """Wait until all these jobs have ended.

    Args:
        session: connection to the daemon.
        jobs: the jobs.
        timeout: time limit, seconds; None: none.

    Raises:
        TimeoutError: some have not ended after ``timeout`` seconds.
    """
    by_id = {job.id: job for job in jobs}
    endings = Endings(job.id for job in jobs if job.view.state not in ENDED)
    until = None if timeout is None else time.monotonic() + timeout

    def remaining_s() -> float:
        return float("inf") if until is None else until - time.monotonic()

    while endings.waiting:
        try:
            news = await session.do(endings.request(remaining_s()))
            for name in endings.receive(news):
                endings.update(await by_id[name].refresh())
        except ClientError as error:
            if error.code not in RETRIED:
                raise
            endings.restart()
            if remaining_s() <= 0:
                raise
            await session.sleep(max(0.0, min(AGAIN_S, remaining_s())))
        if endings.waiting and remaining_s() <= 0:
            raise TimeoutError(overdue(endings.waiting, timeout or 0.0))
