"""The launcher of a job in live mode on one node: workers are started once and informed of every
round.

    starting ──workers warm──▶ ready ──Round──▶ (they join) ──▶ running ──Round──▶ …
    a worker fails ──▶ failed ──Round──▶ starting
    a worker does not answer that it is to give up a step ──▶ killed ──▶ failed

Decides how the workers are started, watched and stopped, and provides the store of a round to them;
the store lives in the launcher of rank 0, because it must outlive any worker. The daemon decides
who is in a round, and the workers when to switch (:mod:`malletrain.elastic.run`). Unlike the
launcher of restart mode it does not use TorchElastic, none of whose functions are needed here.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from malletrain.launch import fabric
from malletrain.launch.lines import LineConnection, ProcessLine
from malletrain.launch.loop import TICK_S, Child, LaunchLoop, first_words, last_words, stop_all
from malletrain.launch.round_store import ReachedStore, ServedStore
from malletrain.protocol import env
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.last_words import first_error, without_noise
from malletrain.protocol.launcher_channel import LaunchOrder
from malletrain.protocol.log_names import rank_log_name
from malletrain.protocol.messages import (
    Abort,
    Assignment,
    Failure,
    Message,
    Phase,
    Round,
    StoreUp,
)
from malletrain.protocol.phases import AssignmentPhase

NOT_LIVE = (
    "This script does not use malletrain.elastic, which live mode needs: it ended without joining "
    "its job. Submit it without --live, or change it as docs/live-mode.md says."
)
UNRESPONSIVE_S = 15.0
"""A worker that answers nothing for so long, when it is to give up a step, cannot do so: it stands
still, or waits in C with the interpreter's lock. One that answers ends by itself before.
"""
UNRESPONSIVE_CAUSE = "It did not answer that it was to give up a step that had hung."
_TAIL_CHARACTERS, _CAUSE_CHARACTERS = 4000, 4000


def uses_elastic(script: Path) -> bool:
    """Whether the text of a script names the library of live mode (it may also be used by what the
    script imports).
    """
    try:
        return "elastic" in script.read_text("utf-8", "replace")
    except OSError:
        return True  # it was found a moment ago: what cannot be read is no failure


@dataclass
class _Worker:
    """One process."""

    child: Child
    local_rank: int
    connection: LineConnection | None = None
    ready: bool = False
    announced_round: int = 0
    """The newest round that it was told of."""
    running: int = 0
    """The newest round that it has joined."""
    unresponsive_s: float | None = None
    """For how long it has not answered that it is to give up a step; None: it need not."""
    cause: str = ""
    """Why this process ended it."""


class LiveLauncher:
    """The workers of one live job on this node."""

    def __init__(self, order: LaunchOrder, command: list[str]) -> None:
        """Start them.

        Args:
            order: What the agent wants launched.
            command: That of one worker.
        """
        self.order = order
        self.command = command
        self._loop = LaunchLoop(order)
        self._workers: list[_Worker] = []
        self._round: Round | None = None
        self._generation = 0
        self._places: dict[int, int] = {}
        """Round → place of this node in it, of those that a worker may be in."""
        self._last_phase: tuple[AssignmentPhase | None, int] = (None, 0)
        self._stores: dict[int, ServedStore | ReachedStore] = {}
        self._looked = time.monotonic()
        self._start_workers()

    def run(self) -> int:
        """Until the job leaves the node. Returns the exit code."""
        return self._loop.run(self)

    # --- the agent ---

    def on_message(self, message: Message) -> None:
        """A round, or the end of one."""
        if isinstance(message, Round) and message.job == self.order.job:
            if self._round is None or message.generation > self._round.generation:
                self._round = message
                self._places[message.generation] = message.group_rank
                self._pass_on(message)
        elif isinstance(message, Abort):
            for worker in self._workers:
                if worker.connection is not None:
                    worker.connection.send({"abort": message.generation})
                    worker.unresponsive_s = worker.unresponsive_s or 0.0

    def _pass_on(self, message: Round) -> None:
        """Tell the workers of a round; serve its store if this is the node of rank 0."""
        if not self._workers:
            self._start_workers()
        job, generation = self.order.job, message.generation
        if not message.store_host and generation not in self._stores:
            host = message.address or self.order.host
            served = self._stores[generation] = ServedStore(job, generation, host)
            self._loop.agent.send(StoreUp(job, generation, served.host, served.port))
        elif message.store_host:
            self._stores[generation] = ReachedStore(
                job, generation, message.store_host, message.store_port
            )
        for worker in self._workers:
            self._invite(worker)

    def _invite(self, worker: _Worker) -> None:
        message = self._round
        if (
            message is None
            or worker.connection is None
            or worker.announced_round >= message.generation
        ):
            return
        reached(FaultPoint.LAUNCHER_INVITES)
        worker.announced_round = message.generation
        count = self.order.spec.nproc_per_node
        worker.connection.send(
            {
                "round": message.generation,
                "rank": message.group_rank * count + worker.local_rank,
                "size": message.group_size * count,
                "port": self._stores[message.generation].local_port,
                "network": fabric.for_all(message.interface),
            }
        )

    def _say(
        self, phase: AssignmentPhase, generation: int, failures: tuple[Failure, ...] = ()
    ) -> None:
        self._last_phase = (phase, generation)
        self._loop.agent.send(Phase(Assignment(self.order.job, phase, generation, failures)))

    # --- the workers ---

    def _start_workers(self) -> None:
        count = self.order.spec.nproc_per_node
        for local_rank in range(count):
            environment = {
                **os.environ,
                env.LIVE: self._loop.lines.path,
                env.LOG_DIR: self.order.log_dir,
                env.GENERATION: "0",
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(count),
                "RANK": str(local_rank),
                "WORLD_SIZE": str(count),
            }
            child = Child(self._loop, self.command, environment)
            self._workers.append(_Worker(child, local_rank))

    def on_line(self, connection: LineConnection, message: ProcessLine) -> None:
        """A greeting, or news of a worker that has greeted."""
        worker = next((w for w in self._workers if w.connection is connection), None)
        if worker is None:
            self._greeted(connection, message)
            return
        worker.unresponsive_s = None
        if message.say == "ready":
            worker.ready = True
            if all(w.ready for w in self._workers) and self._last_phase[0] in (
                None,
                AssignmentPhase.READY,
            ):
                self._say(AssignmentPhase.READY, 0)
        elif message.say == "running":
            self._joined(worker, message.generation)
        elif message.say == "lost":
            newest = self._round.generation if self._round is not None else 0
            if message.generation == newest and self._last_phase != (AssignmentPhase.LOST, newest):
                self._say(AssignmentPhase.LOST, newest)

    def _greeted(self, connection: LineConnection, message: ProcessLine) -> None:
        for worker in self._workers:
            free = worker.connection is None or not worker.connection.open
            if message.say == "hello" and worker.local_rank == message.local_rank and free:
                worker.connection = connection
                self._invite(worker)
                return
        self._loop.lines.hang_up(connection)

    def _joined(self, worker: _Worker, generation: int) -> None:
        worker.running = generation
        if generation > self._generation and all(w.running == generation for w in self._workers):
            self._generation = generation
            for old in [g for g in self._stores if g < generation]:
                self._stores.pop(old).close()
            self._places = {g: place for g, place in self._places.items() if g >= generation}
            self._say(AssignmentPhase.RUNNING, generation)

    def look_after(self) -> None:
        """What became of the workers."""
        self._kill_unresponsive()
        ended = [(w, code) for w in self._workers if (code := w.child.ended()) is not None]
        unconnected = [
            (w, code) for w, code in ended if w.connection is None and not w.announced_round
        ]
        if any(code for _, code in ended) or (unconnected and not self._generation):
            self._failed([(w, code) for w, code in ended if code] or unconnected)
        elif ended and len(ended) == len(self._workers):
            self.stop()
            self._say(AssignmentPhase.SUCCEEDED, self._generation)
        elif ended and self._last_phase == (AssignmentPhase.RUNNING, self._generation):
            self._say(AssignmentPhase.FINISHING, self._generation)

    def _kill_unresponsive(self) -> None:
        """Only what this process was awake for counts."""
        now = time.monotonic()
        passed, self._looked = min(2 * TICK_S, now - self._looked), now
        for worker in self._workers:
            if worker.unresponsive_s is None:
                continue
            worker.unresponsive_s += passed
            if worker.unresponsive_s > UNRESPONSIVE_S and worker.child.ended() is None:
                print(
                    f"malletrain launcher: the worker {worker.local_rank} has not answered for "
                    f"{UNRESPONSIVE_S:g} s that it is to give up its step, and is killed",
                    flush=True,
                )
                worker.unresponsive_s = None
                worker.cause = UNRESPONSIVE_CAUSE
                worker.child.process.kill()

    def _failed(self, bad: list[tuple[_Worker, int]]) -> None:
        generation, count = self._generation, self.order.spec.nproc_per_node
        came_up = all(w.ready for w in self._workers)
        self.stop()
        if not came_up and generation == 0:
            failures = tuple(self._early_failure(w, code) for w, code in bad)
            print(failures[0].tail, flush=True)
            last = Assignment(self.order.job, AssignmentPhase.EXITED, 0, failures)
            code = bad[0][1]
            self._loop.leave(Phase(last), f"A worker ended with code {code} before it was ready.")
            return
        failures = tuple(
            Failure(
                self._places.get(generation, 0) * count + w.local_rank,
                code,
                time.time(),
                self._last_words(w),
                w.cause,
            )
            for w, code in bad
        )
        self._say(AssignmentPhase.FAILED, generation, failures)

    def _last_words(self, worker: _Worker) -> str:
        """The end of what a worker printed. It moves to the log of a round as it enters it, which
        it may not have said any more; before its first round it has one of its own.
        """
        count = self.order.spec.nproc_per_node
        for generation in (worker.announced_round, worker.running, 0):
            place = self._places.get(generation, 0)
            name = rank_log_name(generation, place * count + worker.local_rank)
            words = without_noise(last_words(os.path.join(self.order.log_dir, name)))
            if words:
                return words[-_TAIL_CHARACTERS:]
        return ""

    def _early_failure(self, worker: _Worker, code: int) -> Failure:
        """Why a worker ended before it was ready: its first error, and whether the script is made
        for live mode at all.
        """
        name = rank_log_name(0, worker.local_rank)
        words = first_words(os.path.join(self.order.log_dir, name))
        script = Path(self.order.spec.workdir) / self.order.spec.script
        foreign = worker.connection is None and not uses_elastic(script)
        hint = NOT_LIVE if foreign else "" if code else "It ended without joining its job."
        cause = " ".join(part for part in (first_error(words) if code else "", hint) if part)
        tail = without_noise(words)[-_TAIL_CHARACTERS:]
        return Failure(worker.local_rank, code, time.time(), tail, cause[-_CAUSE_CHARACTERS:])

    def stop(self) -> None:
        """Stop all workers and forget them."""
        stop_all([w.child for w in self._workers], self.order.stop_grace_s)
        for worker in self._workers:
            if worker.connection is not None:
                self._loop.lines.hang_up(worker.connection)
        self._workers = []


if sys.platform != "linux":
    raise ImportError("Live mode needs Linux (pidfd_open).")
