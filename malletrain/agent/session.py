"""The agent itself: one connection to the daemon, one socket for the launcher, one for the workers,
and at most one job.

Decides the order of things on this node: what a message of the daemon does, what SIGTERM starts,
when the process may end. A preempted agent tells the daemon and lets the workers go on until the
daemon has moved the job; without an answer it stops them itself in time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import time
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from malletrain import __version__
from malletrain.agent.config import AgentConfig
from malletrain.agent.fitness import NodeFitness
from malletrain.agent.fork_servers import NodeForkServers
from malletrain.agent.jobrun import NodeJob
from malletrain.agent.launch import JobPlace
from malletrain.agent.link import DaemonLink, send_now
from malletrain.agent.logs import SEND_INTERVAL_S, LogForwarder
from malletrain.agent.networks import interface_of, networks
from malletrain.agent.probe import Prober
from malletrain.agent.process import become_subreaper, sweep
from malletrain.agent.reports import FLUSH_INTERVAL_S, WorkerSocket
from malletrain.agent.run_dir import private_directory
from malletrain.agent.stacks import StackReader
from malletrain.memory.folder import bytes_below, folder_for_job, private_folder
from malletrain.protocol import env, messages, wire
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.launcher_channel import socket_directory
from malletrain.protocol.messages import Assign, Drain, Hello, Phase, Release, Round, Welcome
from malletrain.protocol.phases import AssignmentPhase

STEP_S = 0.1
LAST_LOGS_S = 2.0
"""What a Goodbye that names no time leaves for the logs."""
LAST_WORDS = 0.05, 0.5
"""Part of the grace time, and seconds at most, kept at its end for telling what was not sent."""
PEER_SAVES_S = 2.0
"""How long a node without rank 0 that is wanted back, while no daemon is there, trains on so that
rank 0 may reach the end of its step and save. The main scheduler's job waits for it.
"""
LINGER_MS = 500

log = logging.getLogger("malletrain.agent")


class NodeAgent:
    """One run of the agent on its lease."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self.directory = private_directory(config.run_dir, config.node, os.environ)
        self._memory = private_folder(config.node)
        self._sockets = socket_directory(self.directory)
        self._workers = WorkerSocket(str(self._sockets / "workers.sock"))
        self._launcher_endpoint = f"ipc://{self._sockets / 'launcher.sock'}"
        self._launchers = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._launchers.linger = 0
        self._launchers.bind(self._launcher_endpoint)
        self._launcher_id: bytes | None = None
        callbacks = self._hello, self._from_daemon, self._welcomed, self._warm_bytes
        self._link = DaemonLink(config, *callbacks, lambda: bytes_below(self._memory))
        self._prober, self._stacks = Prober(self._link.send), StackReader(self._link.send)
        self._logs = LogForwarder(config.node, self._link.send)
        self._fitness = NodeFitness(config, self.directory, self._link.send)
        marks = {env.NODE: config.node, env.LEASE: config.lease}
        reach = self._link.send, self._memory
        self._servers = NodeForkServers(self._sockets, os.environ, marks, *reach)
        self._run: NodeJob | None = None
        self._hello_assignment: messages.Assignment | None = None
        self._next: Assign | None = None
        self._count = 0
        self._gone_at: float | None = None
        self._exiting = False
        self._logs_until: float | None = None
        self._over = asyncio.Event()

    async def run(self) -> int:
        """Serve until the daemon says Goodbye or the lease ends. Returns the exit code."""
        become_subreaper()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signum, self._signalled, signum)
        loop.add_reader(self._workers, self._from_workers)
        tasks = [
            asyncio.create_task(work)
            for work in (self._keep_in_touch(), self._listen_to_launchers(), self._step_for_ever())
        ]
        over = asyncio.create_task(self._over.wait())
        try:
            done, _ = await asyncio.wait([over, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what went wrong in it
        finally:
            self._prober.close()
            self._stacks.close()
            self._fitness.stop()
            remaining = sweep()
            if remaining:
                log.warning("processes that resist SIGKILL: %s", remaining)
            self._link.close(LINGER_MS)
            for task in (over, *tasks):
                task.cancel()
            await asyncio.gather(over, *tasks, return_exceptions=True)
            loop.remove_reader(self._workers)
            self._workers.close()
            self._launchers.close(0)
            shutil.rmtree(self._sockets, ignore_errors=True)
            shutil.rmtree(self.directory, ignore_errors=True)
            shutil.rmtree(self._memory or self.directory, ignore_errors=True)
            zmq.asyncio.Context.instance().term()
        return 0

    # --- the daemon ---

    async def _keep_in_touch(self) -> None:
        """Say nothing before it is known whether the node is fit for jobs."""
        await self._fitness.first_look()
        await self._link.run()

    def _hello(self) -> Hello:
        config = self._config
        # That the workers have ended comes last: nobody wants to hear of a job that is over.
        self._hello_assignment = self._run.assignment(ended=False) if self._run else None
        return Hello(
            node=config.node,
            lease=config.lease,
            host=config.host,
            pid=os.getpid(),
            gpus=config.gpus,
            node_class=config.node_class,
            gone_in_s=self._gone_at and max(0.0, self._gone_at - time.monotonic()),
            assignment=self._hello_assignment,
            shipping=self._logs.jobs(),
            networks=networks(),
            sick=self._fitness.sick,
            warm=self._servers.settled(),
            version=__version__,
        )

    def _warm_bytes(self) -> int:
        return self._servers.memory_bytes()

    def _welcomed(self, welcome: Welcome) -> None:
        self._logs.limit_bytes = welcome.log_limit_bytes
        self._logs.reconnected()
        self._fitness.reconnected()
        if self._run is not None:
            self._run.reconnected()
        now = self._run.assignment() if self._run else None
        if now is not None and now != self._hello_assignment:  # it changed on the way
            self._link.send(Phase(now))

    def _from_daemon(self, message: Any) -> None:
        try:
            self._handle(message)
        except Exception:  # a mistake of ours must not end a training that runs well
            log.exception("could not handle a %s of the daemon", type(message).__name__)

    def _handle(self, message: Any) -> None:
        match message:
            case Assign():
                self._assign(message)
            case (
                Round() | Drain() | messages.Abort() | messages.ExpectLoss() | messages.ShowStacks()
            ):
                self._to_run(message)
            case messages.ProbeOpen() | messages.ProbeTo():
                self._prober.begin(message)
            case messages.WarmUp():
                self._servers.warm_up(message)
                self._servers.step(busy=self._run is not None)
            case Release():
                self._release(message)
            case messages.Goodbye():
                log.info(
                    "the daemon gives the lease back%s",
                    f": {message.reason}" if message.reason else "",
                )
                # said again at every message, where the daemon does not know the lease any more
                until = time.monotonic() + (message.within_s or LAST_LOGS_S)
                self._logs_until = min(until, self._logs_until or until)
                self._shut_down(self._run.stop_grace_s if self._run else 0.0)
            case messages.LogAck():
                self._logs.acknowledged(message)
            case messages.Error():
                log.warning("the daemon refused a message: %s", message.sentence)
            case _:
                log.warning("ignored an unexpected %s", type(message).__name__)

    def _to_run(self, message: Any) -> None:
        if self._run is None or self._run.job != message.job:
            kind = type(message).__name__
            log.warning("ignored a %s for job %s, which is not here", kind, message.job)
        elif isinstance(message, messages.ExpectLoss):
            self._run.flags.expect_loss(message.in_s)
        elif isinstance(message, messages.ShowStacks):
            ranks = self._run.reports.ranks(message.generation)
            self._stacks.read(message, self.directory / f"job-{self._count}", ranks)
        elif isinstance(message, Round):
            self._run.round(message)
        elif isinstance(message, messages.Abort):
            self._run.abort(message)
        else:
            self._run.drain(message)

    def _assign(self, message: Assign) -> None:
        if self._exiting or self._gone_at is not None:
            return  # the daemon knows, or is about to
        if message.spec.nproc_per_node == 0:
            spec = msgspec.structs.replace(message.spec, nproc_per_node=max(1, self._config.gpus))
            message = msgspec.structs.replace(message, spec=spec)
        if self._run is None:
            self._start(message)
        elif self._run.job == message.job and not self._run.releasing:
            self._run.assigned_again(message)
        elif self._run.releasing:
            self._next = message
        else:
            log.warning("job %s is here; job %s was not started", self._run.job, message.job)
            self._link.send(Phase(self._run.assignment()))

    def _start(self, message: Assign) -> None:
        self._count += 1
        self._launcher_id = None
        host = message.host or self._config.host
        place = JobPlace(
            directory=self.directory / f"job-{self._count}",
            memory=folder_for_job(self._memory, f"job-{self._count}"),
            launcher_endpoint=self._launcher_endpoint,
            worker_socket=self._workers.path,
            host=host,
            interface=interface_of(host, networks()),
            node=self._config.node,
            lease=self._config.lease,
            environment=os.environ,
            daemon=self._link.daemon,
            chosen=bool(message.host),
        )
        try:
            self._run = NodeJob(
                message,
                place,
                self._servers,
                self._logs,
                self._fitness.send,
                self._tell_launcher,
                self._from_workers,
            )
        except OSError as error:
            sentence = f"The node cannot hold the job: {error}."
            log.error("%s", sentence)
            self._link.send(
                Phase(messages.Assignment(message.job, AssignmentPhase.EXITED), sentence)
            )

    def _release(self, message: Release) -> None:
        if self._next is not None and self._next.job == message.job:
            self._next = None
        if self._run is not None and self._run.job == message.job:
            self._run.release(message.grace_s)
        else:
            self._link.send(messages.Released(message.job))

    # --- launcher and workers ---

    async def _listen_to_launchers(self) -> None:
        while True:
            identity, *frames = await self._launchers.recv_multipart()
            try:
                message = wire.decode(frames)
            except wire.WireError as error:
                log.warning("ignored a message of a launcher: %s", error)
                continue
            if not isinstance(message, messages.LauncherMessage):
                log.warning("ignored an unexpected %s of a launcher", type(message).__name__)
                continue
            job = message.assignment.job if isinstance(message, Phase) else message.job
            if self._run is None or self._run.job != job:
                self._tell(identity, Release(job, 0.0))
                continue
            self._launcher_id = identity
            self._tell(identity, messages.Alive(""))
            self._run.from_launcher(message)

    def _tell_launcher(self, message: messages.Message) -> None:
        if self._launcher_id is not None:
            self._tell(self._launcher_id, message)

    def _tell(self, identity: bytes, message: messages.Message) -> None:
        reached(FaultPoint.AGENT_TELLS)
        send_now(self._launchers, [identity, *wire.encode(message)])
        reached(FaultPoint.AGENT_TOLD)

    def _from_workers(self) -> None:
        datagrams, run = self._workers.receive(), self._run
        if run is not None:
            for served in run.reports.take_all(datagrams, time.monotonic()):
                run.drain_served(served)
            run.note_training()

    # --- time ---

    async def _step_for_ever(self) -> None:
        next_flush = next_logs = 0.0
        while True:
            await asyncio.sleep(STEP_S)
            now = time.monotonic()
            self._fitness.step(now)
            self._servers.step(busy=self._run is not None)
            if self._run is not None:
                self._run.step(self._link.connected)
                if now >= next_flush:
                    next_flush = now + FLUSH_INTERVAL_S
                    self._run.reports.flush_due(now)
                if self._run.ended:
                    self._run_ended()
            else:
                self._servers.reap()
            if now >= next_logs and self._link.connected:
                next_logs = now + SEND_INTERVAL_S
                self._logs.step()
            if (
                self._gone_at is not None
                and not self._exiting
                and (self._alone_for_nothing(now) or now >= self._gone_at - self._margin())
            ):
                log.warning("the lease ends and the daemon has not moved the job; stopping it here")
                self._shut_down(self._margin() * 0.8)
            if self._exiting and self._run is None:
                self._ship(now)

    def _ship(self, now: float) -> None:
        """No process is left: go once the daemon has all logs, or the time for that is up. Where
        the node is wanted and no daemon is there to take them, nobody is kept waiting.
        """
        share, most = LAST_WORDS
        limits = [] if self._logs_until is None else [self._logs_until]
        if self._gone_at is not None:
            limits.append(self._gone_at - min(most, share * self._config.grace_s))
        in_vain = self._gone_at is not None and not self._link.connected
        if not self._logs.files or in_vain or now >= min(limits, default=now):
            self._logs.abandon()
            reached(FaultPoint.AGENT_LEAVES)
            self._over.set()

    def _run_ended(self) -> None:
        self._run, following, self._next = None, self._next, None
        if self._gone_at is not None:
            self._exiting = True
        if following is not None and not self._exiting:
            self._start(following)

    def _alone_for_nothing(self, now: float) -> bool:
        """Whether the node is wanted back, no daemon is there to move the job, and nothing of the
        job can be saved any more by waiting.
        """
        run, began = self._run, (self._gone_at or now) - self._config.grace_s
        if run is None or self._link.connected:
            return False
        return not run.unsaved or (not run.has_rank_0 and now >= began + PEER_SAVES_S)

    def _margin(self) -> float:
        """Seconds before the end of the lease at which the agent stops the workers itself."""
        stop = self._run.stop_grace_s if self._run else 0.0
        return min(stop + 1.0, self._config.grace_s / 2)

    # --- the end ---

    def _signalled(self, signum: int) -> None:
        if self._gone_at is not None:
            return
        name = signal.Signals(signum).name
        self._gone_at = time.monotonic() + self._config.grace_s
        self._servers.leave()
        reached(FaultPoint.AGENT_NOTICED)
        log.info("%s: leaving within %g s", name, self._config.grace_s)
        if not self._link.send(
            messages.Leaving(
                self._config.grace_s, f"The main scheduler wants the node back ({name})."
            )
        ):
            self._link.announce()
        if self._run is None:
            self._shut_down(0.0)
        elif not self._link.connected:
            self._run.save_alone(0.8 * (self._config.grace_s - self._margin()))

    def _shut_down(self, grace_s: float) -> None:
        self._exiting, self._next = True, None
        self._servers.leave()
        if self._run is not None:
            self._run.release(grace_s)
