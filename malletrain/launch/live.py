"""The launcher of a job in live mode on one node: workers are started once and told of every round.

    starting ──workers warm──▶ ready ──Round──▶ (they join) ──▶ running ──Round──▶ …
    a worker fails ──▶ failed ──Round──▶ starting

Decides how the workers are started, watched and stopped, and serves the store of a round where this
node has rank 0; the store lives here because it must outlive any worker. Who is in a round is the
daemon's decision, when to switch the workers' own (:mod:`malletrain.elastic.run`). Compared with
the launcher of restart mode there is no TorchElastic: nothing of what it does is left to do.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from malletrain.launch.supervisor import rank_log_name
from malletrain.protocol.launcher_channel import LauncherEnd, LaunchOrder
from malletrain.protocol.messages import (
    Abort,
    Assignment,
    Error,
    Failure,
    Phase,
    Release,
    Round,
    StoreUp,
)
from malletrain.protocol.worker_channel import ENV_GENERATION

ENV_LIVE = "MALLETRAIN_LIVE"
ENV_LOG_DIR = "MALLETRAIN_LOG_DIR"
_TICK_S = 0.5
_LAST_LINES = 30


@dataclass
class _Worker:
    """One process. ``generation`` and ``rank`` are those of its newest round."""

    process: subprocess.Popen[bytes]
    local_rank: int
    pidfd: int
    generation: int = 0
    connection: socket.socket | None = None
    ready: bool = False
    unread: bytes = b""


@dataclass
class LiveLauncher:
    """The workers of one live job on this node. ``command``: that of one worker."""

    order: LaunchOrder
    command: list[str]
    _workers: list[_Worker] = field(default_factory=list)
    _round: Round | None = None
    _generation: int = 0
    _told: tuple[str, int] = ("", 0)
    _stores: dict[int, TCPStore] = field(default_factory=dict)
    _stop: str = ""

    def run(self) -> int:
        """Until the job leaves the node. Returns the exit code."""
        order = self.order
        self._agent = LauncherEnd(order.endpoint)
        path = f"{os.path.dirname(order.endpoint.removeprefix('ipc://'))}/l{os.getpid()}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(path)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._agent.also_wake_on(self._listener.fileno())
        self._path = path
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken)
        self._agent.also_wake_on(wake)
        self._start_workers()
        code = 0
        try:
            while not self._stop:
                for message in self._agent.receive(_TICK_S):
                    self._from_agent(message)
                if self._agent.agent_gone:
                    self._stop = "The agent on this node is gone."
                self._accept()
                for worker in self._workers:
                    self._listen(worker)
                code = self._look_after_workers()
        finally:
            self._stop_workers()
            self._agent.close()
        print(f"malletrain launcher: {self._stop}", flush=True)
        return code

    def _signalled(self, number: int, _: object) -> None:
        self._stop = self._stop or f"{signal.Signals(number).name}: the job leaves this node."

    # --- the agent ---

    def _from_agent(self, message: Any) -> None:
        if isinstance(message, Round) and message.job == self.order.job:
            if self._round is None or message.generation > self._round.generation:
                self._round = message
                self._pass_on(message)
        elif isinstance(message, Abort):
            self._tell_workers({"abort": message.generation})
        elif isinstance(message, Release):
            self._stop = "The job was released from this node."
        elif isinstance(message, Error):
            self._stop = message.sentence

    def _pass_on(self, message: Round) -> None:
        """Tell the workers of a round; serve its store if this is the node of rank 0."""
        if not self._workers:
            self._start_workers()
        if not message.store_host and message.generation not in self._stores:
            store = TCPStore(
                "127.0.0.1",
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=300),
            )
            self._stores[message.generation] = store
            self._agent.send(
                StoreUp(self.order.job, message.generation, self.order.host, store.port)
            )
        for worker in self._workers:
            self._invite(worker)

    def _invite(self, worker: _Worker) -> None:
        message = self._round
        if message is None or worker.connection is None or worker.generation >= message.generation:
            return
        worker.generation = message.generation
        count = self.order.spec.nproc_per_node
        own = self._stores.get(message.generation)
        self._tell(
            worker,
            {
                "round": message.generation,
                "rank": message.group_rank * count + worker.local_rank,
                "size": message.group_size * count,
                "host": "127.0.0.1" if own else message.store_host,
                "port": own.port if own else message.store_port,
            },
        )

    def _say(self, phase: str, generation: int, failures: tuple[Failure, ...] = ()) -> None:
        self._told = (phase, generation)
        self._agent.send(Phase(Assignment(self.order.job, phase, generation, failures)))

    # --- the workers ---

    def _start_workers(self) -> None:
        count = self.order.spec.nproc_per_node
        for local_rank in range(count):
            environment = {
                **os.environ,
                ENV_LIVE: self._path,
                ENV_LOG_DIR: self.order.log_dir,
                ENV_GENERATION: "0",
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(count),
                "RANK": str(local_rank),
                "WORLD_SIZE": str(count),
            }
            process = subprocess.Popen(self.command, env=environment, stdin=subprocess.DEVNULL)
            pidfd = os.pidfd_open(process.pid)
            self._agent.also_wake_on(pidfd)
            self._workers.append(_Worker(process, local_rank, pidfd))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            connection.settimeout(5.0)
            hello = json.loads(connection.makefile("rb").readline() or b"{}")
            worker = next(
                (
                    w
                    for w in self._workers
                    if w.local_rank == hello.get("local_rank") and w.connection is None
                ),
                None,
            )
            if worker is None:
                connection.close()
                continue
            connection.setblocking(False)
            worker.connection = connection
            self._agent.also_wake_on(connection.fileno())
            self._invite(worker)

    def _listen(self, worker: _Worker) -> None:
        while worker.connection is not None:
            try:
                data = worker.connection.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._hang_up(worker)
                return
            *lines, worker.unread = (worker.unread + data).split(b"\n")
            for line in lines:
                self._heard(worker, json.loads(line))

    def _heard(self, worker: _Worker, said: dict[str, Any]) -> None:
        if said["say"] == "ready":
            worker.ready = True
            if all(w.ready for w in self._workers) and self._told[0] in ("", "ready"):
                self._say("ready", 0)
        elif said["say"] == "running":
            self._joined(worker, said["generation"])
        elif said["say"] == "lost":
            newest = self._round.generation if self._round is not None else 0
            if said["generation"] == newest and self._told != ("lost", newest):
                self._say("lost", newest)

    _running: dict[int, int] = field(default_factory=dict)

    def _joined(self, worker: _Worker, generation: int) -> None:
        self._running[worker.local_rank] = generation
        if (
            all(self._running.get(w.local_rank) == generation for w in self._workers)
            and generation > self._generation
        ):
            self._generation = generation
            for old in [g for g in self._stores if g < generation]:
                del self._stores[old]
            self._say("running", generation)

    def _hang_up(self, worker: _Worker) -> None:
        if worker.connection is not None:
            self._agent.also_wake_on(worker.connection.fileno(), False)
            worker.connection.close()
            worker.connection = None

    def _tell_workers(self, message: dict[str, Any]) -> None:
        for worker in self._workers:
            self._tell(worker, message)

    def _tell(self, worker: _Worker, message: dict[str, Any]) -> None:
        if worker.connection is not None:
            try:
                worker.connection.send(json.dumps(message).encode() + b"\n")
            except OSError:
                pass  # it is gone, which is noticed elsewhere

    def _look_after_workers(self) -> int:
        """What became of the workers; the launcher's exit code, with ``_stop`` set, when they never
        came up.
        """
        ended = [(w, code) for w in self._workers if (code := w.process.poll()) is not None]
        for worker, _ in ended:
            self._watch_no_more(worker)
        bad = [(w, code) for w, code in ended if code]
        if bad:
            return self._failed(bad)
        if ended and len(ended) == len(self._workers):
            self._forget_workers()
            self._say("succeeded", self._generation)
        return 0

    def _failed(self, bad: list[tuple[_Worker, int]]) -> int:
        generation, count = self._generation, self.order.spec.nproc_per_node
        first = (self._round.group_rank if self._round else 0) * count if generation else 0
        failures = tuple(Failure(first + w.local_rank, code, time.time()) for w, code in bad)
        came_up = all(w.ready for w in self._workers)
        self._stop_workers()
        if not came_up and generation == 0:
            worker, code = bad[0]
            for line in _tail(
                os.path.join(self.order.log_dir, rank_log_name(0, worker.local_rank))
            ):
                print(line)
            self._stop = f"A worker ended with code {code} before it was ready."
            return 1
        self._say("failed", generation, failures)
        return 0

    def _watch_no_more(self, worker: _Worker) -> None:
        if worker.pidfd >= 0:
            self._agent.also_wake_on(worker.pidfd, False)
            os.close(worker.pidfd)
            worker.pidfd = -1

    def _forget_workers(self) -> None:
        for worker in self._workers:
            self._watch_no_more(worker)
            self._hang_up(worker)
        self._workers, self._running = [], {}

    def _stop_workers(self) -> None:
        """SIGTERM, and SIGKILL after the job's grace."""
        alive = [w.process for w in self._workers if w.process.poll() is None]
        for process in alive:
            process.terminate()
        deadline = time.monotonic() + self.order.stop_grace_s
        for process in alive:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._forget_workers()


def _tail(path: str) -> list[str]:
    try:
        with open(path, errors="replace") as file:
            return file.read().splitlines()[-_LAST_LINES:]
    except OSError:
        return []


if sys.platform != "linux":
    raise ImportError("Live mode needs Linux (pidfd_open).")
