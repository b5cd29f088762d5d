"""The API of the page: ``/api/v1``, one route per operation. Data have the form of the command
line's ``--json``.

:class:`Routes` decides which answers come from the last poll and which from the daemon.
:mod:`malletrain.web.guard` decides before which requests are admitted, and what a viewer sees.

:class:`EncodedAnswers` caches large answers, encoded once for each version of the board and for all
viewers.

:class:`SubmitForm` and :class:`ScaleForm` are the forms that viewers send: jobs to submit, and
limits of their scale. They decide only the format; a job is validated by the same code as in
``malletrain submit``.

:class:`Stream` sends server-sent events to all viewers: everything once, then the changes. A change
is encoded once for all viewers of one user. A viewer that is behind gets the kept changes, or
everything again. The server does not wait for slow viewers.
"""

from __future__ import annotations

import asyncio
import gzip
import secrets
from collections.abc import AsyncIterator, Callable, Hashable
from functools import partial
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from malletrain.client import ClientError, Connection, operations
from malletrain.protocol.bounds import MAX_NODES
from malletrain.protocol.farm import MAX_TASKS
from malletrain.protocol.messages import JobSpec
from malletrain.protocol.views import (
    EventView,
    JobDetail,
    JobView,
    LogView,
    NodeForecastView,
    NodeView,
    SeriesView,
    TaskHistoryView,
    TasksView,
    UsageView,
)
from malletrain.submission.options import ScriptOptions
from malletrain.submission.resuming import with_snapshots_bound
from malletrain.submission.software import SoftwareOptions
from malletrain.submission.spec import build
from malletrain.web.guard import Viewer
from malletrain.web.history import HistoryView, TimelineView
from malletrain.web.poller import Board, BoardChange, ConnectionPool, MachineView, Poller
from malletrain.web.schema import Done, answers
from malletrain.web.sweeps import SweepUnavailableError, SweepView, TrialView, sweeps, trials

MIN_COMPRESSED_BYTES = 1000
"""Minimum size of an answer that is compressed, bytes."""


class EncodedAnswers:
    """The newest version of each large answer."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(4)
        """Random name of this server, because versions of another one are not comparable."""
        self._plain: dict[str, tuple[int, bytes]] = {}
        self._compressed: dict[str, tuple[int, bytes]] = {}

    def answer(
        self, request: Request, name: str, version: int, make: Callable[[], Any]
    ) -> Response:
        """Return a large answer, or status 304 if the client has it already.

        Args:
            request: request of the client.
            name: name of the answer.
            version: version of the board.
            make: returns the data of the answer.
        """
        etag = f'"{self._name}-{name}-{version}"'
        headers = {"cache-control": "no-store", "etag": etag, "vary": "accept-encoding"}
        etags = request.headers.get("if-none-match", "")
        if etag in (each.strip().removeprefix("W/") for each in etags.split(",")):
            return Response(None, 304, headers)
        body = _cached(self._plain, name, version, lambda: msgspec.json.encode(make()))
        if (
            "gzip" in request.headers.get("accept-encoding", "")
            and len(body) >= MIN_COMPRESSED_BYTES
        ):
            plain = body
            body = _cached(self._compressed, name, version, lambda: gzip.compress(plain, 1))
            headers["content-encoding"] = "gzip"
        return Response(body, 200, headers, media_type="application/json")


def _cached(
    cache: dict[str, tuple[int, bytes]], name: str, version: int, make: Callable[[], bytes]
) -> bytes:
    entry = cache.get(name)
    if entry is None or entry[0] != version:
        entry = cache[name] = (version, make())
    return entry[1]


Text = Annotated[str, Field(max_length=4096)]
Texts = Annotated[list[Text], Field(max_length=1000)]
Nodes = Annotated[int, Field(ge=1, le=MAX_NODES)]


class SubmitForm(BaseModel):
    """A job, with the options of ``malletrain submit``."""

    model_config = ConfigDict(extra="forbid")

    script: Annotated[str, Field(min_length=1, max_length=4096)]
    """Path of the script on the host of the page."""
    args: Texts = []
    nodes: Annotated[str, Field(max_length=40)] | None = None
    """``N`` or ``MIN:MAX``."""
    name: Annotated[str, Field(max_length=64)] | None = None
    workdir: Text | None = None
    env: Texts = []
    """``NAME=VALUE`` each."""
    live: bool = False
    profile: bool = True
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    kind: Annotated[str, Field(max_length=64)] | None = None
    """Kind of slots, or class of nodes."""
    nproc_per_node: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] | None = None
    """Processes on each node; `auto`: found by measuring."""
    threads: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] | None = None
    """Threads of each process."""
    loader_workers: Annotated[int, Field(ge=0, le=4096)] | Literal["auto"] | None = None
    """Loader workers of each process, for DataLoaders that name no number."""
    data_memory: Annotated[str, Field(max_length=40)] | None = None
    """Memory of each node for the script's DataCache, such as `25%` or `8G`."""
    venv: Text | None = None
    conda: Text | None = None
    container: Text | None = None
    modules: Texts = []

    def spec(self) -> JobSpec:
        """Return the validated job specification. Raises SpecError."""
        software = SoftwareOptions(
            module=tuple(self.modules),
            venv=self.venv,
            conda=self.conda,
            container=self.container,
        )
        options = ScriptOptions(
            nodes=self.nodes,
            name=self.name,
            workdir=self.workdir,
            env=self.env,
            live=self.live,
            profile=self.profile,
            weight=self.weight,
            kind=self.kind,
            nproc_per_node=self.nproc_per_node,
            threads=self.threads,
            loader_workers=self.loader_workers,
            data_memory=self.data_memory,
            software=software,
        )
        return with_snapshots_bound(build(self.script, self.args, options))


class ScaleForm(BaseModel):
    """New limits of a job's scale."""

    model_config = ConfigDict(extra="forbid")

    min_nodes: Nodes
    max_nodes: Nodes


KEEP_ALIVE_S = 15.0
"""Time without changes after which a line is sent, seconds, so that no proxy closes the connection
as dead.
"""


class Stream:
    """The stream of one board. ``poller``: counts the viewers."""

    def __init__(self, board: Board, poller: Poller) -> None:
        self._board, self._poller = board, poller
        self._encoded: dict[tuple[int, bool, str], bytes] = {}
        self._name = secrets.token_hex(4)
        """Random name of this server, because versions are not comparable after a restart."""

    async def follow(self, request: Request) -> StreamingResponse:
        """Changes as server-sent events: first everything, or all since ``Last-Event-ID``."""
        viewer: Viewer = request.state.viewer
        name, _, number = request.headers.get("last-event-id", "").partition("-")
        version = int(number) if name == self._name and number.isdecimal() else -1
        return StreamingResponse(
            self._changes(viewer, version),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    async def _changes(self, viewer: Viewer, version: int) -> AsyncIterator[bytes]:
        self._poller.watched(1)
        try:
            while not self._board.over:
                if version < 0:
                    changes = [self._board.everything()]
                else:
                    changes = list(self._board.since(version))
                for change in changes:
                    yield self._event(change, viewer)
                    version = change.version
                if not await self._board.news(version, KEEP_ALIVE_S):
                    yield b": still here\n\n"
        finally:
            self._poller.watched(-1)

    def _event(self, change: BoardChange, viewer: Viewer) -> bytes:
        key = (change.version, change.full, "" if viewer.all_of_it else viewer.name)
        if key not in self._encoded:
            # Older versions are rarely requested again.
            self._encoded = {k: v for k, v in self._encoded.items() if k[0] >= self._board.version}
            owners = {job.id: job.owner for job in self._board.jobs.values()}
            data = msgspec.json.encode(viewer.change(change, owners))
            self._encoded[key] = (
                f"id: {self._name}-{change.version}\nevent: change\ndata: ".encode()
                + data
                + b"\n\n"
            )
        return self._encoded[key]


API = "/api/v1"
FIRST_POLL_WAIT_S = 10.0
"""Maximum time for which a request waits for the first poll of the daemon, seconds."""

Job = Annotated[str, Path(max_length=300, description="Id or name of a job.")]
Sweep = Annotated[str, Path(max_length=300, description="Name of a sweep.")]
Moment = Annotated[float | None, Query(ge=0, le=1e11, description="Seconds since the epoch.")]
Seq = Annotated[int, Query(ge=-1000, le=2**53, description="Number of the last event seen.")]


class WebRefusal(Exception):
    """A refused request. ``code``: as the daemon's, see :class:`malletrain.client.ClientError`."""

    def __init__(self, status: int, sentence: str, code: str = "refused") -> None:
        super().__init__(sentence)
        self.status, self.code = status, code


class Routes:
    """The operations. ``connections``: to the daemon. ``board``: its last answers. ``home``:
    the state directory with this user's sweeps.
    """

    def __init__(
        self, board: Board, poller: Poller, connections: ConnectionPool, home: FilePath
    ) -> None:
        self.board, self.poller, self.connections, self.home = board, poller, connections, home
        self._encoded = EncodedAnswers()
        self.stream = Stream(board, poller)
        self.router = router = APIRouter(prefix=API)
        router.get("/machine", responses=answers(MachineView))(self.machine)
        router.get("/jobs", responses=answers(list[JobView]))(self.jobs)
        router.post("/jobs", status_code=201, responses=answers(JobView, 201))(self.submit)
        router.get("/jobs/{job}", responses=answers(JobDetail))(self.job)
        router.post("/jobs/{job}/cancel", responses=answers(Done))(self.cancel)
        router.put("/jobs/{job}/scale", responses=answers(Done))(self.scale)
        router.get("/jobs/{job}/logs", responses=answers(LogView))(self.logs)
        router.get("/jobs/{job}/history", responses=answers(HistoryView))(self.history)
        router.get("/jobs/{job}/metrics", responses=answers(list[SeriesView]))(self.metrics)
        router.get("/jobs/{job}/tasks", responses=answers(TasksView))(self.tasks)
        router.get("/jobs/{job}/tasks/history", responses=answers(TaskHistoryView))(
            self.task_history
        )
        router.get("/nodes", responses=answers(list[NodeView]))(self.nodes)
        router.get("/timeline", responses=answers(TimelineView))(self.timeline)
        router.get("/events", responses=answers(list[EventView]))(self.events)
        router.get("/usage", responses=answers(list[UsageView]))(self.usage)
        router.get("/forecast", responses=answers(list[NodeForecastView]))(self.forecast)
        router.get("/sweeps", responses=answers(list[SweepView]))(self.sweeps)
        router.get("/sweeps/{sweep}", responses=answers(list[TrialView]))(self.trials)
        router.get("/stream", responses=answers(None))(self.stream.follow)

    # --- from the last poll ---

    async def machine(self, request: Request) -> Response:
        """The daemon and the machine at a glance."""
        return reply(_viewer(request).machine(self.board.machine, self._owners()))

    async def jobs(
        self,
        request: Request,
        state: Annotated[list[str] | None, Query(max_length=10)] = None,
        owner: Annotated[str | None, Query(max_length=300)] = None,
    ) -> Response:
        """All unfinished jobs and the newest others, the oldest first."""
        await self._wait_for_first_poll()
        viewer, board = _viewer(request), self.board
        if viewer.all_of_it and state is None and owner is None:
            return self._encoded.answer(
                request, "jobs", board.version, lambda: list(board.jobs.values())
            )
        views = [
            viewer.job(job)
            for job in board.jobs.values()
            if (state is None or job.state in state) and owner in (None, job.owner)
        ]
        return reply(views)

    async def nodes(self, request: Request) -> Response:
        """Idle and leased nodes."""
        await self._wait_for_first_poll()
        board = self.board
        return self._encoded.answer(
            request, "nodes", board.version, lambda: list(board.nodes.values())
        )

    async def timeline(self, request: Request, since: Moment = None) -> Response:
        """The states of the nodes over time, for the last hour at most."""
        await self._wait_for_first_poll()
        board = self.board
        if since:
            return reply(board.timeline.view(since, board.version))
        everything = partial(board.timeline.view, 0.0, board.version)
        return self._encoded.answer(request, "timeline", board.version, everything)

    async def history(self, job: Job) -> Response:
        """Throughput and scale of a job over time, since the page was started."""
        await self._wait_for_first_poll()
        return reply(self.board.history.view((await self._detail(job)).job.id))

    # --- from the daemon ---

    async def job(self, request: Request, job: Job) -> Response:
        """Everything about a job."""
        return reply(_viewer(request).detail(await self._detail(job)))

    async def logs(
        self,
        request: Request,
        job: Job,
        stream: Annotated[str, Query(max_length=300)] = "rank0",
        cursor: Annotated[str, Query(max_length=300)] = "",
        limit: Annotated[int, Query(ge=1024, le=1024 * 1024)] = 65536,
    ) -> Response:
        """A piece of a log after ``cursor``."""
        detail = await self._managed(request, job)
        piece = await self.connections.run_cached(
            ("logs", detail.job.id, stream, cursor, limit),
            lambda client: client.logs(detail.job.id, stream=stream, cursor=cursor, limit=limit),
        )
        return reply(piece)

    async def metrics(
        self,
        request: Request,
        job: Job,
        since: Moment = None,
        most: Annotated[int, Query(ge=0, le=500, description="Points of each; 0: all.")] = 0,
    ) -> Response:
        """The metrics that the script reported, over time."""
        detail = await self._managed(request, job)
        series = await self.connections.run_cached(
            ("metrics", detail.job.id, since, most),
            lambda client: client.metrics(detail.job.id, since=since or 0.0, most=most),
        )
        return reply(series)

    async def tasks(
        self,
        request: Request,
        job: Job,
        state: Annotated[str, Query(max_length=20, description="Empty: any.")] = "",
        after: Annotated[int, Query(ge=-1, le=MAX_TASKS, description="Number before them.")] = -1,
        limit: Annotated[int, Query(ge=0, le=1000, description="0: only the counts.")] = 100,
    ) -> Response:
        """The tasks of a farm, in order, and the counts of all."""
        detail = await self._managed(request, job)
        operation = operations.tasks(detail.job.id, state=state, after=after, limit=limit)
        return await self._of_farm(("tasks", detail.job.id, state, after, limit), operation)

    async def task_history(self, request: Request, job: Job) -> Response:
        """How many tasks of a farm were done, had failed and ran, over time; the slowest ones."""
        detail = await self._managed(request, job)
        operation = operations.task_history(detail.job.id)
        return await self._of_farm(("task_history", detail.job.id), operation)

    async def _of_farm(self, key: Hashable, operation: operations.Operation[Any]) -> Response:
        try:
            return reply(
                await self.connections.run_cached(key, lambda client: client.do(operation))
            )
        except ClientError as error:
            if error.code == "refused":
                raise WebRefusal(404, str(error)) from None
            raise

    async def events(
        self,
        request: Request,
        since: Seq = -100,
        limit: Annotated[int, Query(ge=1, le=1000)] = 500,
        job: Annotated[str | None, Query(max_length=300)] = None,
    ) -> Response:
        """Events after number ``since``, oldest first; a negative number selects that many of the
        newest.
        """
        events = await self.connections.run_cached(
            ("events", since, limit, job),
            lambda client: client.events(since=since, limit=limit, job=job),
        )
        viewer, owners = _viewer(request), self._owners()
        return reply([viewer.event(event, owners) for event in events])

    async def usage(self, request: Request, since: Moment = None, until: Moment = None) -> Response:
        """Use of leased nodes, by user, month and class of nodes."""
        period = {k: v for k, v in (("since", since), ("until", until)) if v is not None}
        usage = await self.connections.run_cached(
            ("usage", since, until), lambda client: client.usage(**period)
        )
        return reply(_viewer(request).usage(usage))

    async def forecast(self) -> Response:
        """Number of nodes of each class in the last day, and its forecast for the next day."""
        return reply(
            await self.connections.run_cached(
                ("forecast",), lambda client: client.do(operations.forecast())
            )
        )

    async def sweeps(self, request: Request) -> Response:
        """The sweeps of the user as whom the page runs; others see none."""
        is_own = _viewer(request).all_of_it
        try:
            return reply(await asyncio.to_thread(sweeps, self.home) if is_own else [])
        except SweepUnavailableError as error:
            raise WebRefusal(503, str(error)) from None

    async def trials(self, request: Request, sweep: Sweep) -> Response:
        """The trials of a sweep, the best first."""
        try:
            if not _viewer(request).all_of_it:
                raise SweepUnavailableError(f"There is no sweep '{sweep}' of yours.")
            return reply(await asyncio.to_thread(trials, self.home, sweep))
        except SweepUnavailableError as error:
            raise WebRefusal(404, str(error)) from None

    # --- changes ---

    async def submit(self, request: Request, form: SubmitForm) -> Response:
        """Submit a job, as ``malletrain submit`` does on the host of the page."""
        viewer = _viewer(request)
        if not viewer.all_of_it:
            raise WebRefusal(
                403,
                f"A job submitted here would run as {viewer.own}, not as {viewer.name}; submit it "
                "with 'malletrain submit', or from a page that you started yourself.",
            )

        def submit(client: Connection) -> JobView:
            return client.submit(form.spec())

        job_view = await self.connections.run(submit)
        self.poller.now()
        return reply(job_view, 201)

    async def cancel(self, request: Request, job: Job) -> Response:
        """Cancel a job: its processes are stopped and its nodes freed."""
        detail = await self._managed(request, job)
        (result,) = await self.connections.run(lambda client: client.cancel([detail.job.id]))
        self.poller.now()
        if not result["ok"]:
            raise WebRefusal(409, str(result["sentence"]))
        return reply(Done(detail.job.id, str(result["sentence"])))

    async def scale(self, request: Request, job: Job, form: ScaleForm) -> Response:
        """Change the limits of a job's scale."""
        detail = await self._managed(request, job)
        limits = {"job": detail.job.id, **form.model_dump()}
        result = await self.connections.run(
            lambda client: client.call("scale", limits, changes=True)
        )
        self.poller.now()
        return reply(Done(detail.job.id, str(result["sentence"])))

    # --- helpers ---

    async def _detail(self, job: str) -> JobDetail:
        try:
            return await self.connections.run_cached(("job", job), lambda client: client.job(job))
        except ClientError as error:
            if error.code == "refused":
                raise WebRefusal(404, str(error)) from None
            raise

    async def _managed(self, request: Request, job: str) -> JobDetail:
        detail, viewer = await self._detail(job), _viewer(request)
        if not viewer.may_manage(detail.job.owner):
            raise WebRefusal(
                403,
                f"Job {detail.job.id} belongs to {detail.job.owner}; this is for its owner.",
            )
        return detail

    def _owners(self) -> dict[str, str]:
        return {job.id: job.owner for job in self.board.jobs.values()}

    async def _wait_for_first_poll(self) -> None:
        """Wait for the first poll. Raises WebRefusal if there is none."""
        version = -1
        while self.board.machine.status is None:
            if self.board.machine.away or not await self.board.news(version, FIRST_POLL_WAIT_S):
                raise WebRefusal(
                    503, self.board.machine.away or "The daemon does not answer.", "unreachable"
                )
            version = self.board.version


def _viewer(request: Request) -> Viewer:
    viewer: Viewer = request.state.viewer
    return viewer


def reply(data: Any, status: int = 200) -> Response:
    """Return ``data`` (views, or other data for JSON) as an answer that is not cached."""
    return Response(
        msgspec.json.encode(data),
        status,
        {"cache-control": "no-store"},
        media_type="application/json",
    )
