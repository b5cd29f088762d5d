"""The daemon's life: take the state directory, restore, listen, poll, adopt; on SIGTERM stop and
leave the jobs running.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from typing import Any

import structlog

from malletrain import __version__
from malletrain.config.model import Config
from malletrain.daemon import logs
from malletrain.daemon.api import Api, StepFailed
from malletrain.daemon.backends import backend
from malletrain.daemon.clock import Clock
from malletrain.daemon.core import Core, LeaseActions
from malletrain.daemon.inbox import Inbox
from malletrain.daemon.leases import Leases
from malletrain.daemon.login import Login
from malletrain.daemon.logsink import LogSink
from malletrain.daemon.metrics import Metrics, MetricsError
from malletrain.daemon.transport import Transport
from malletrain.identity.keys import KeyPair, KeyRing
from malletrain.identity.state_directory import (
    INFO,
    DaemonInfo,
    StateDirError,
    lock_state_dir,
    remove_daemon_info,
    write_atomically,
    write_daemon_info,
)
from malletrain.identity.users import Users
from malletrain.protocol import env, messages
from malletrain.store.store import Store, StoreError
from scavenger.interface import SchedulerError

log = structlog.get_logger(__name__)

WATCH_EVERY_S = 0.5


def run(config: Config) -> int:
    """Run the daemon until SIGTERM or SIGINT; returns the exit code (0: stopped as asked, 1: could
    not run).
    """
    logs.configure(config.daemon.log_level, config.daemon.log_format)
    try:
        with lock_state_dir(config.state_dir), Store.open(config.database_url) as store:
            return asyncio.run(Daemon(config, store).serve())
    except (StateDirError, StoreError, SchedulerError, MetricsError, OSError) as e:
        print(f"malletraind: {e}", file=sys.stderr)
        return 1


def tell_service_manager(state: str) -> None:
    """Tell systemd how the service is doing, where it asks for that (sd_notify(3)); a manager that
    does not listen is no trouble.
    """
    if address := os.environ.get("NOTIFY_SOCKET"):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel,
        ):
            channel.sendto(
                state.encode(), f"\0{address[1:]}" if address.startswith("@") else address
            )


class Daemon:
    """All parts of one daemon, wired."""

    def __init__(self, config: Config, store: Store) -> None:
        self.config = config
        self.clock = Clock()
        self.metrics = Metrics()
        self.boot = str(store.boot())
        self.users = Users(config.daemon.users) if config.daemon.users is not None else None
        self.keys = KeyRing(
            config.state_dir,
            lookup=self.users.user_of if self.users is not None else lambda key: None,
            strangers=config.daemon.several_users,
        )
        self.door = Login(config, self.keys)
        self.core = Core(config, store, self.clock, self.metrics)
        self.core.rounds.key_of = self.keys.job_key
        self.logs = LogSink(config.state_dir / "logs", config.jobs.log_limit)
        self.inbox = Inbox(self.core, self.logs, self.boot, self._horizon)
        self.transport = Transport(
            self.keys.server.secret.encode(),
            self.keys.server.public.encode(),
            self.keys.identity,
            self._message,
            self._invalid,
            self._disconnected,
        )
        self.leases: Leases | None = None
        self.api: Api | None = None
        self.endpoint = ""
        self._answers: set[asyncio.Task[None]] = set()

    async def serve(self) -> int:
        """Run until a signal asks to stop, or something that cannot be mended happens."""
        loop = asyncio.get_running_loop()
        core = self.core
        core.failed = loop.create_future()
        core.transmit = self.transport.send
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        tasks: list[asyncio.Task[None]] = []
        try:
            bound = self._listen()
            self.endpoint = f"tcp://{self._host()}:{bound.rpartition(':')[2]}"
            await asyncio.to_thread(backend(self.config).prepare, self.config)
            scavenger = backend(self.config).connect(self.config)
            self.leases = Leases(core, self.inbox, self.keys, scavenger, self._agent_command)
            core.outside = LeaseActions(self.leases.take, self.leases.give_back, self.leases.recall)
            self.inbox.on_trouble = self.leases.poke
            self.api = Api(core, self.leases, self.logs, self.boot, scavenger.name)
            if self.config.daemon.metrics_listen:
                self.metrics.serve(self.config.daemon.metrics_listen)
            self.metrics.started(__version__)
            tasks = [
                loop.create_task(work) for work in (self._lead(), self.leases.run(), self._watch())
            ]
            self._announce()
            tell_service_manager("READY=1")
            await self._until(stop, tasks)
            return 0
        finally:
            tell_service_manager("STOPPING=1")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.metrics.stop()
            self.transport.stop()

    async def _until(self, stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
        assert self.core.failed is not None
        for task in tasks:
            task.add_done_callback(self._task_ended)
        waiting = asyncio.ensure_future(stop.wait())
        ends: list[asyncio.Future[Any]] = [waiting, self.core.failed]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.core.failed.done():
            self.core.failed.result()
        with self.core.step():
            for run in self.core.runs.values():
                self.core.books.save(run)
            running = sum(bool(run.rounds.members) for run in self.core.runs.values())
            nodes = len(list(self.core.agents))
            self.core.trail.record(
                "daemon-stopped",
                f"The daemon stops; {running} jobs go on without it on {nodes} nodes.",
            )
        remove_daemon_info(
            self.config.state_dir / INFO
        )  # what was announced to the site stays: it is true again at the next start

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        failed = self.core.failed
        if (
            not task.cancelled()
            and task.exception() is not None
            and failed is not None
            and not failed.done()
        ):
            failed.set_exception(task.exception() or RuntimeError())

    async def _lead(self) -> None:
        """Restore what was, give the agents time to report, then begin to plan."""
        wait = self.config.daemon.adopt_wait if self.leases and self.leases.active else 0.0
        self.core.controller.hold(self.clock.now() + wait + 60.0)
        self.core.restore()
        with self.core.step():
            known = len(self.leases.active) if self.leases else 0
            self.core.trail.record(
                "daemon-started",
                f"The daemon runs; it knows {len(self.core.runs)} unfinished jobs and {known} "
                "leases.",
                boot=self.boot,
            )
        loop = asyncio.get_running_loop()
        due = loop.time() + wait
        # reports and the ends of leases count alike: looking is simpler than being told of both
        while loop.time() < due and not self._all_reported():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        self.inbox.adopt()

    def _all_reported(self) -> bool:
        """Whether the agent of every lease that runs has said hello."""
        running = [row.id for row in self.core.lease_rows.active.values() if row.started]
        return all(self.core.agents.of_lease(lease) for lease in running)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + WATCH_EVERY_S
            await asyncio.sleep(WATCH_EVERY_S)
            self.metrics.loop_lag(loop.time() - due)
            self.inbox.watch()
            self._gauges()

    def _gauges(self) -> None:
        agents = list(self.core.agents)
        leaving = sum(agent.gone_at is not None for agent in agents)
        training = sum(agent.holds is not None and agent.gone_at is None for agent in agents)
        free = len(agents) - leaving - training
        self.metrics.nodes(training, free, leaving)
        for use, count in (("training", training), ("free", free), ("leaving", leaving)):
            self.metrics.node_seconds(use, count * WATCH_EVERY_S)
        states: dict[str, int] = {}
        for job in self.core.controller.jobs.values():
            states[job.state.value] = states.get(job.state.value, 0) + 1
        self.metrics.jobs(states)

    # --- the socket's callbacks ---

    def _message(self, peer: bytes, who: str, message: object) -> None:
        role, _, name = who.partition(":")
        handlers = {
            "lease": self._agent_message,
            "client": self._client_message,
            "stranger": self._stranger_message,
        }
        self.core.guard(handlers[role])(peer, name, message)

    def _agent_message(self, peer: bytes, lease: str, message: object) -> None:
        self.inbox.handle(peer, lease, message)

    def _client_message(self, peer: bytes, user: str, message: object) -> None:
        if not isinstance(message, messages.Request) or self.api is None:
            why = (
                "The daemon is just starting; ask again."
                if self.api is None
                else f"A client may not send {type(message).__name__}."
            )
            self.transport.send(peer, messages.Error(why))
            return
        self._reply(peer, message, self.api.answer(user, message))

    def _stranger_message(self, peer: bytes, key: str, message: object) -> None:
        if isinstance(message, messages.Request):
            self._reply(peer, message, self.door.answer(key, message))
        else:
            self.transport.send(peer, messages.Goodbye("The lease has ended."))

    def _reply(
        self, peer: bytes, request: messages.Request, answer: Coroutine[Any, Any, messages.Reply]
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(peer, request, answer))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(
        self, peer: bytes, request: messages.Request, answer: Coroutine[Any, Any, messages.Reply]
    ) -> None:
        try:
            reply = await answer
        except Exception as error:
            log.exception("request failed", op=request.op)
            reply = messages.Reply(
                request.id,
                False,
                error="The daemon failed at this request; its log says how.",
                code="internal",
            )
            if (
                isinstance(error, StepFailed)
                and self.core.failed is not None
                and not self.core.failed.done()
            ):
                self.core.failed.set_exception(error.__cause__ or error)
        self.transport.send(peer, reply)

    def _invalid(self, sentence: str) -> None:
        role = sentence.partition(":")[0]
        sender = {"lease": "agent", "client": "client"}.get(role, "unknown")
        self.metrics.invalid_message(sender)
        log.warning("message refused", reason=sentence)

    def _disconnected(self) -> None:
        loop = asyncio.get_running_loop()
        for delay in (0.02, 0.2):
            loop.call_later(delay, self.core.guard(self.inbox.probe))

    # --- small things ---

    def _horizon(self, node: str) -> tuple[float | None, str | None]:
        return self.leases.horizon(node) if self.leases else (None, None)

    def _agent_command(self, lease: str, key: KeyPair) -> tuple[tuple[str, ...], dict[str, str]]:
        argv = (
            *(sys.executable, "-m", "malletrain.agent"),
            *("--endpoint", self.endpoint),
            *("--server-key", self.keys.server.public),
            *("--lease", lease),
        )
        return argv, {
            env.LEASE_KEY: key.secret,
            env.GRACE_S: f"{backend(self.config).grace_s(self.config):g}",
        }

    def _listen(self) -> str:
        """Bind. With port 0 the port of the last time is taken again: the agents of a daemon that
        was killed look for it there.
        """
        listen, kept = self.config.daemon.listen, self.config.state_dir / "port"
        if not listen.endswith(":0"):
            return self.transport.start(listen)
        if kept.exists():
            try:
                return self.transport.start(listen[:-1] + kept.read_text().strip())
            except OSError as e:
                log.warning(
                    "the last port is taken; agents of the last daemon will not find this one",
                    reason=str(e),
                )
        bound = self.transport.start(listen)
        write_atomically(kept, bound.rpartition(":")[2] + "\n")
        return bound

    def _host(self) -> str:
        if self.config.daemon.advertise:
            return self.config.daemon.advertise
        host = self.config.daemon.listen.removeprefix("tcp://").rpartition(":")[0]
        return socket.getfqdn() if host in ("0.0.0.0", "*", "[::]") else host

    def _announce(self) -> None:
        host = socket.gethostname()
        info = DaemonInfo(
            self.endpoint, self.keys.server.public, os.getpid(), host, __version__, self.clock.now()
        )
        write_daemon_info(self.config.state_dir / INFO, info)
        if self.config.daemon.announce is not None:
            write_daemon_info(self.config.daemon.announce, info)
        if self.users is not None and self.users.user_of("") is None and self.users.problem:
            log.warning("list of users not read", reason=self.users.problem)
        log.info("listening", endpoint=self.endpoint, state_dir=str(self.config.state_dir))
