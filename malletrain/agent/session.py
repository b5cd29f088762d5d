"""The agent: one connection to the daemon, one socket for launchers, one for workers, and at most
one job.

Decides how a message of the daemon and a SIGTERM are handled, and when the process may end. A
preempted agent informs the daemon, and lets the workers continue until the daemon has moved the
job. Without an answer it stops them itself in time.
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
from malletrain.agent.commands import CommandMessage, NodeCommands
from malletrain.agent.config import AgentConfig
from malletrain.agent.fork_servers import NodeForkServers
from malletrain.agent.health import NodeFitness
from malletrain.agent.jobrun import NodeJob
from malletrain.agent.launch import JobPlace
from malletrain.agent.link import DaemonLink, send_now
from malletrain.agent.logs import SEND_INTERVAL_S, LogForwarder
from malletrain.agent.networks import Prober, interface_of, networks
from malletrain.agent.process import become_subreaper, sweep
from malletrain.agent.reports import FLUSH_INTERVAL_S, WorkerSocket
from malletrain.agent.run_dir import private_directory
from malletrain.agent.sharing import CHECK_EVERY_S, lease_bytes, watch_of
from malletrain.agent.stacks import StackReader
from malletrain.launch.cores import allowed_cores
from malletrain.memory.folder import DATA_FOLDER, bytes_below, folder_for_job, private_folder
from malletrain.protocol import env, messages, wire
from malletrain.protocol.farm import TaskAck, TaskItems, TaskStop
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.launcher_channel import socket_directory
from malletrain.protocol.messages import Assign, Drain, Hello, Phase, Release, Round, Welcome
from malletrain.protocol.phases import AssignmentPhase

STEP_S = 0.1
LOG_TIME_S = 2.0
"""Time for sending logs after a Goodbye that names none, seconds."""
ABANDON_FRACTION, MAX_ABANDON_S = 0.05, 0.5
"""Time at the end of the grace time for reporting the logs that were not sent: a fraction of the
grace time, and its maximum, seconds.
"""
PEER_SAVES_S = 2.0
"""Time for which a preempted node without rank 0 continues to train if no daemon is connected, so
that rank 0 can finish its step and save, seconds. The job of the main scheduler waits that long.
"""
LINGER_MS = 500
"""Time in which messages to the daemon are still sent after the end, ms."""

log = logging.getLogger("malletrain.agent")


class NodeAgent:
    """One run of the agent on its lease."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self.directory = private_directory(config.run_dir, config.node, os.environ)
        self._memory = private_folder(config.node)
        self._data = folder_for_job(self._memory, DATA_FOLDER)
        self._sockets = socket_directory(self.directory)
        self._workers = WorkerSocket(str(self._sockets / "workers.sock"))
        self._launcher_endpoint = f"ipc://{self._sockets / 'launcher.sock'}"
        self._launchers = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._launchers.linger = 0
        self._launchers.bind(self._launcher_endpoint)
        self._launcher_id: bytes | None = None
        callbacks = self._hello, self._from_daemon, self._on_welcome, self._warm_bytes
        self._link = DaemonLink(config, *callbacks, self._snapshot_bytes)
        self._prober, self._stacks = Prober(self._link.send), StackReader(self._link.send)
        self._logs = LogForwarder(config.node, self._link.send)
        self._fitness = NodeFitness(config, self.directory, self._link.send)
        marks = {env.NODE: config.node, env.LEASE: config.lease}
        reach = self._link.send, self._memory
        self._commands = NodeCommands(self._link.send)
        own = self._commands.pids
        self._servers = NodeForkServers(self._sockets, os.environ, marks, *reach, own)
        self._run: NodeJob | None = None
        """The job on this node; None if there is none."""
        self._hello_assignment: messages.Assignment | None = None
        """State of the job in the last Hello."""
        self._next: Assign | None = None
        """Assignment of the next job, while the current one is being released."""
        self._count = 0
        """Number of jobs started."""
        self._gone_at: float | None = None
        """Time at which the preempted lease ends; None if it is not preempted."""
        self._exiting = False
        self._logs_until: float | None = None
        """Time until which logs are sent, after a Goodbye; None before it."""
        self._over = asyncio.Event()

    async def run(self) -> int:
        """Serve until the daemon sends Goodbye or the lease ends. Return the exit code."""
        become_subreaper()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signum, self._on_signal, signum)
        loop.add_reader(self._workers, self._from_workers)
        tasks = [
            asyncio.create_task(work)
            for work in (
                self._run_link(),
                self._receive_from_launchers(),
                self._run_steps(),
                self._watch_memory(),
            )
        ]
        over = asyncio.create_task(self._over.wait())
        try:
            done, _ = await asyncio.wait([over, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises the exception of the task
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

    async def _run_link(self) -> None:
        """Connect to the daemon when it is known whether the node is fit for jobs."""
        await self._fitness.wait_for_first_checks()
        await self._link.run()

    def _hello(self) -> Hello:
        config = self._config
        # The end of the workers is reported after the Welcome, because the daemon stops a job that
        # has ended.
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
            shipping=self._logs.unfinished_jobs(),
            networks=networks(),
            cores=self._cores(),
            sick=self._fitness.sick,
            warm=self._servers.settled(),
            version=__version__,
        )

    def _cores(self) -> int:
        """Return the number of cores that the processes of a job may use here."""
        slot = self._config.slot
        return allowed_cores({env.SLOT_CPUS: str(slot.cpus)} if slot else {})

    def _snapshot_bytes(self) -> int:
        return max(0, bytes_below(self._memory) - bytes_below(self._data))

    def _warm_bytes(self) -> int:
        return self._servers.memory_bytes()

    def _on_welcome(self, welcome: Welcome) -> None:
        self._logs.limit_bytes = welcome.log_limit_bytes
        self._logs.reconnected()
        self._commands.end_all("The connection between the daemon and the node was interrupted.")
        self._fitness.reconnected()
        if self._run is not None:
            self._run.reconnected()
        now = self._run.assignment() if self._run else None
        if now is not None and now != self._hello_assignment:  # it has changed since the Hello
            self._link.send(Phase(now))

    def _from_daemon(self, message: Any) -> None:
        try:
            self._handle(message)
        except Exception:  # a defect of the agent must not end the training
            log.exception("could not handle a %s of the daemon", type(message).__name__)

    def _handle(self, message: Any) -> None:
        match message:
            case Assign():
                self._assign(message)
            case (
                Round() | Drain() | messages.Abort() | messages.ExpectLoss() | messages.ShowStacks()
            ):
                self._to_job(message)
            case messages.AdviseBatch():
                self._to_job(message)
            case TaskItems() | TaskAck() | TaskStop():
                self._to_job(message)
            case _ if isinstance(message, CommandMessage):
                self._commands.handle(message, self._run)
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
                # A daemon that no longer knows the lease repeats it at every message.
                until = time.monotonic() + (message.within_s or LOG_TIME_S)
                self._logs_until = min(until, self._logs_until or until)
                self._shut_down(self._run.stop_grace_s if self._run else 0.0)
            case messages.LogAck():
                self._logs.acknowledged(message)
            case messages.Error():
                log.warning("the daemon refused a message: %s", message.sentence)
            case _:
                log.warning("ignored an unexpected %s", type(message).__name__)

    def _to_job(self, message: Any) -> None:
        if self._run is None or self._run.job != message.job:
            kind = type(message).__name__
            log.warning("ignored a %s for job %s, which is not here", kind, message.job)
        elif isinstance(message, messages.ExpectLoss):
            self._run.flags.expect_loss(message.in_s)
        elif isinstance(message, messages.AdviseBatch):
            self._run.flags.advise_batch(message.size)
        elif isinstance(message, messages.ShowStacks):
            ranks = self._run.reports.ranks(message.generation)
            self._stacks.read(message, self.directory / f"job-{self._count}", ranks)
        elif isinstance(message, Round):
            self._run.round(message)
        elif isinstance(message, messages.Abort | TaskItems | TaskAck | TaskStop):
            self._run.forward(message)
        else:
            self._run.drain(message)

    def _assign(self, message: Assign) -> None:
        if self._exiting or self._gone_at is not None:
            return  # the daemon knows that the lease ends, or is about to know it
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
        host, slot = message.host or self._config.host, self._config.slot
        place = JobPlace(
            directory=self.directory / f"job-{self._count}",
            memory=folder_for_job(self._memory, f"job-{self._count}"),
            data=self._data,
            launcher_endpoint=self._launcher_endpoint,
            worker_socket=self._workers.path,
            host=host,
            interface=interface_of(host, networks()),
            node=self._config.node,
            lease=self._config.lease,
            environment=os.environ,
            daemon=self._link.daemon,
            chosen=bool(message.host),
            cpus=slot.cpus if slot else 0,
            memory_bytes=slot.memory_bytes if slot else None,
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

    async def _receive_from_launchers(self) -> None:
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

    async def _run_steps(self) -> None:
        next_flush = next_logs = 0.0
        while True:
            await asyncio.sleep(STEP_S)
            now = time.monotonic()
            self._fitness.step(now)
            self._commands.step()
            self._servers.step(busy=self._run is not None)
            if self._run is not None:
                self._run.step(self._link.connected)
                if now >= next_flush:
                    next_flush = now + FLUSH_INTERVAL_S
                    self._run.reports.flush_due(now)
                if self._run.ended:
                    self._on_job_end()
            else:
                self._servers.reap()
            if now >= next_logs and self._link.connected:
                next_logs = now + SEND_INTERVAL_S
                self._logs.send_due()
            if (
                self._gone_at is not None
                and not self._exiting
                and (self._is_waiting_futile(now) or now >= self._gone_at - self._margin())
            ):
                log.warning("the lease ends and the daemon has not moved the job; stopping it here")
                self._shut_down(self._margin() * 0.8)
            if self._exiting and self._run is None:
                self._end_when_logs_are_sent(now)

    async def _watch_memory(self) -> None:
        """End a job that uses more memory than its slot has. Does nothing if the lease has the
        whole node, or if the main scheduler limits its memory.
        """
        watch = watch_of(self._config.slot)
        while watch.most is not None:
            await asyncio.sleep(CHECK_EVERY_S)
            used = await asyncio.to_thread(lease_bytes, self._memory, watch.most)
            sentence = watch.verdict(used)
            if sentence and self._run is not None:
                log.warning("job %s is ended here: %s", self._run.job, sentence)
                self._run.end_here(sentence)
        await asyncio.Event().wait()

    def _end_when_logs_are_sent(self, now: float) -> None:
        """End the agent, which has no processes left, when the daemon has all logs or the time for
        sending them is over. A preempted agent without a daemon ends at once.
        """
        limits = [] if self._logs_until is None else [self._logs_until]
        if self._gone_at is not None:
            abandon_s = min(MAX_ABANDON_S, ABANDON_FRACTION * self._config.grace_s)
            limits.append(self._gone_at - abandon_s)
        is_futile = self._gone_at is not None and not self._link.connected
        if not self._logs.files or is_futile or now >= min(limits, default=now):
            self._logs.abandon()
            reached(FaultPoint.AGENT_LEAVES)
            self._over.set()

    def _on_job_end(self) -> None:
        if self._run is not None:
            self._commands.end_all(f"Job {self._run.job} has left the node.")
        self._run, following, self._next = None, self._next, None
        if self._gone_at is not None:
            self._exiting = True
        if following is not None and not self._exiting:
            self._start(following)

    def _is_waiting_futile(self, now: float) -> bool:
        """Return whether waiting cannot save anything of the job on this preempted node, for which
        no daemon is connected.
        """
        run, preempted_at = self._run, (self._gone_at or now) - self._config.grace_s
        if run is None or self._link.connected:
            return False
        return not run.unsaved or (not run.has_rank_0 and now >= preempted_at + PEER_SAVES_S)

    def _margin(self) -> float:
        """Return the time before the end of the lease at which the agent stops the workers itself,
        seconds.
        """
        stop = self._run.stop_grace_s if self._run else 0.0
        return min(stop + 1.0, self._config.grace_s / 2)

    # --- the end ---

    def _on_signal(self, signum: int) -> None:
        if self._gone_at is not None:
            return
        name = signal.Signals(signum).name
        self._gone_at = time.monotonic() + self._config.grace_s
        self._servers.leave()
        reached(FaultPoint.AGENT_NOTICED)
        log.info("%s: leaving within %g s", name, self._config.grace_s)
        if not self._link.send(messages.Leaving(self._config.grace_s)):
            self._link.send_hello()
        if self._run is None:
            self._shut_down(0.0)
        elif not self._link.connected:
            self._run.save_alone(0.8 * (self._config.grace_s - self._margin()))

    def _shut_down(self, grace_s: float) -> None:
        self._exiting, self._next = True, None
        self._servers.leave()
        if self._run is not None:
            self._run.release(grace_s)
