"""The launcher of a job in live mode on one node: workers are started once and informed of every
round.

    starting ──workers warm──▶ ready ──Round──▶ (they join) ──▶ running ──Round──▶ …
    a worker fails ──▶ failed ──Round──▶ starting
    a worker does not confirm an abort ──▶ killed ──▶ failed

Decides how the workers are started, watched and stopped, and provides the store of a round to them.
The store is in the launcher of rank 0, because it must outlive every worker. The daemon decides
which nodes are in a round, and the workers decide when to switch
(:mod:`malletrain.elastic.membership`). Unlike the launcher of restart mode it does not use
TorchElastic, none of whose functions are needed here.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from malletrain.launch import worker_variables
from malletrain.launch.lines import LineConnection, ProcessLine
from malletrain.launch.loop import (
    TICK_S,
    Child,
    LaunchLoop,
    first_words,
    last_words,
    stop_all,
)
from malletrain.launch.node_samples import NodeSamples
from malletrain.launch.round_store import ReachedStore, ServedStore
from malletrain.launch.worker_variables import WorkerVariables
from malletrain.protocol import env
from malletrain.protocol.failures import SCRIPT_ENDED, UNFIT, first_error, without_noise
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.job_files import rank_log_name
from malletrain.protocol.launcher_channel import LaunchOrder
from malletrain.protocol.messages import (
    Abort,
    Assignment,
    Failure,
    Message,
    Phase,
    Round,
    RoundLayout,
    StoreUp,
)
from malletrain.protocol.phases import RESTART_CODE, AssignmentPhase

NOT_LIVE = (
    "This script does not use malletrain.elastic, which live mode needs: it ended without joining "
    "its job. Submit it without --live, or change it as docs/live-mode.md says."
)
UNRESPONSIVE_S = 15.0
"""Maximum time in which a worker must confirm the abort of a round that it has entered, seconds. A
worker that does not is stopped, or waits in C code with the interpreter lock. A worker that
confirms it and still hangs ends itself earlier
(:data:`malletrain.elastic.membership.LAST_RESORT_S`).
"""
UNRESPONSIVE_CAUSE = "It did not answer the request to give up a step that hung."
_TAIL_CHARACTERS, _CAUSE_CHARACTERS = 4000, 4000


def uses_elastic(script: Path) -> bool:
    """Return whether the text of a script names the library of live mode. (A module that the
    script imports may also use it.)
    """
    try:
        return "elastic" in script.read_text("utf-8", "replace")
    except OSError:
        return True  # the script existed a moment ago; an error of reading is not reported here


@dataclass
class _Worker:
    """One worker process."""

    child: Child
    """The process."""
    local_rank: int
    """Its local rank."""
    connection: LineConnection | None = None
    """Its connection; None before its ``hello``."""
    ready: bool = False
    """Whether it has reported that it is ready."""
    announced_round: int = 0
    """Number of the newest round that was sent to it."""
    running: int = 0
    """Number of the newest round that it has entered."""
    unresponsive_s: float | None = None
    """Time since an abort that it has not confirmed, seconds; None if there is no such abort."""
    abort_limit_s: float = 0.0
    """Maximum of that time, seconds."""
    cause: str = ""
    """Reason for which the launcher killed it; empty if it did not."""
    asked_restart: bool = False
    """Whether it has asked to be started again when it ends."""


class LiveLauncher:
    """The workers of one live job on this node."""

    def __init__(
        self,
        order: LaunchOrder,
        command: list[str],
        variables: WorkerVariables | None = None,
        samples: NodeSamples | None = None,
    ) -> None:
        """Start the workers.

        Args:
            order: the agent's order.
            command: command of one worker.
            variables: sets the variables of the workers that follow from the layout of the node;
                None: they stay.
            samples: serves the samples of data caches; None for none.
        """
        self.order = order
        self.command = command
        self._loop = LaunchLoop(order)
        self._variables, self._samples = variables, samples
        self._layout = order.spec.layout
        """Layout of the node for which the workers were started."""
        self._workers: list[_Worker] = []
        self._round: Round | None = None
        self._generation = 0
        self._places: dict[int, int] = {}
        """Group rank of this node in each round that a worker may be in, by round."""
        self._last_phase: tuple[AssignmentPhase | None, int] = (None, 0)
        self._stores: dict[int, ServedStore | ReachedStore] = {}
        self._checked_at = time.monotonic()
        self._start_workers()

    def run(self) -> int:
        """Run until the job leaves the node. Return the exit code."""
        return self._loop.run(self)

    # --- the agent ---

    def on_message(self, message: Message) -> None:
        """Handle a round, or the abort of one."""
        if isinstance(message, Round) and message.job == self.order.job:
            if self._round is None or message.generation > self._round.generation:
                self._round = message
                self._places[message.generation] = message.group_rank
                self._use_layout(message.layout or self.order.spec.layout)
                self._announce(message)
        elif isinstance(message, Abort):
            for worker in self._workers:
                if worker.connection is not None:
                    worker.connection.send({"abort": message.generation})
                    self._expect_answer(worker, message.generation)

    def _expect_answer(self, worker: _Worker, generation: int) -> None:
        """Limit the time in which a worker must confirm an abort. Earlier aborts that it has not
        confirmed do not extend the time.
        """
        limit_s = abort_limit_s(generation, worker.running, self.order.join_timeout_s)
        if worker.unresponsive_s is None or limit_s < worker.abort_limit_s:
            worker.unresponsive_s, worker.abort_limit_s = 0.0, limit_s

    def _use_layout(self, layout: RoundLayout) -> None:
        """Stop the workers if the node is used in another layout from now on. They have saved; new
        ones continue from the snapshot.
        """
        if layout == self._layout:
            return
        self.stop()
        self._layout, self._last_phase = layout, (None, 0)
        if self._variables is not None:
            self._variables.set(layout)

    def _announce(self, message: Round) -> None:
        """Send a round to the workers. Serve its store if this is the node of rank 0."""
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
        if self._samples is not None:
            self._samples.enter(message)
        for worker in self._workers:
            self._send_round(worker)

    def _send_round(self, worker: _Worker) -> None:
        message = self._round
        if (
            message is None
            or worker.connection is None
            or worker.announced_round >= message.generation
        ):
            return
        reached(FaultPoint.LAUNCHER_INVITES)
        worker.announced_round = message.generation
        count = self._layout.processes
        worker.connection.send(
            {
                "round": message.generation,
                "rank": message.group_rank * count + worker.local_rank,
                "size": message.group_size * count,
                "port": self._stores[message.generation].local_port,
                "network": worker_variables.network_variables(message.interface),
            }
        )

    def _report(
        self, phase: AssignmentPhase, generation: int, failures: tuple[Failure, ...] = ()
    ) -> None:
        self._last_phase = (phase, generation)
        data_address = self._samples.address if self._samples is not None else ""
        assignment = Assignment(
            self.order.job, phase, generation, failures, data_address=data_address
        )
        self._loop.agent.send(Phase(assignment))

    # --- the workers ---

    def _start_workers(self) -> None:
        count = self._layout.processes
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
        """Handle a worker's ``hello``, or a later line."""
        worker = next((w for w in self._workers if w.connection is connection), None)
        if worker is None:
            self._on_hello(connection, message)
            return
        worker.unresponsive_s = None
        if message.say == "ready":
            worker.ready = True
            if all(w.ready for w in self._workers) and self._last_phase[0] in (
                None,
                AssignmentPhase.READY,
            ):
                self._report(AssignmentPhase.READY, 0)
        elif message.say == "restart":
            worker.asked_restart = True
        elif message.say == "running":
            self._on_running(worker, message.generation)
        elif message.say == "lost":
            newest = self._round.generation if self._round is not None else 0
            if message.generation == newest and self._last_phase != (AssignmentPhase.LOST, newest):
                self._report(AssignmentPhase.LOST, newest)

    def _on_hello(self, connection: LineConnection, message: ProcessLine) -> None:
        for worker in self._workers:
            free = worker.connection is None or not worker.connection.open
            if message.say == "hello" and worker.local_rank == message.local_rank and free:
                worker.connection = connection
                self._send_round(worker)
                return
        self._loop.lines.hang_up(connection)

    def _on_running(self, worker: _Worker, generation: int) -> None:
        worker.running = generation
        if generation > self._generation and all(w.running == generation for w in self._workers):
            self._generation = generation
            for old in [g for g in self._stores if g < generation]:
                self._stores.pop(old).close()
            self._places = {g: place for g, place in self._places.items() if g >= generation}
            self._report(AssignmentPhase.RUNNING, generation)

    def check_processes(self) -> None:
        """Kill workers that do not respond, and report those that have ended."""
        self._kill_unresponsive()
        ended = [(w, code) for w in self._workers if (code := w.child.ended()) is not None]
        if ended:  # their last lines may have come since
            for connection, line in self._loop.lines.receive():
                self.on_line(connection, line)
        unconnected = [
            (w, code) for w, code in ended if w.connection is None and not w.announced_round
        ]
        if any(code for _, code in ended) or (unconnected and not self._generation):
            self._report_failures([(w, code) for w, code in ended if code] or unconnected)
        elif ended and len(ended) == len(self._workers):
            self.stop()
            self._report(AssignmentPhase.SUCCEEDED, self._generation)
        elif ended and self._last_phase == (AssignmentPhase.RUNNING, self._generation):
            self._report(AssignmentPhase.FINISHING, self._generation)

    def _kill_unresponsive(self) -> None:
        """Kill workers that do not confirm an abort. Only time in which this process was running
        counts.
        """
        now = time.monotonic()
        passed, self._checked_at = min(2 * TICK_S, now - self._checked_at), now
        for worker in self._workers:
            if worker.unresponsive_s is None:
                continue
            worker.unresponsive_s += passed
            if worker.unresponsive_s > worker.abort_limit_s and worker.child.ended() is None:
                print(
                    f"malletrain launcher: the worker {worker.local_rank} has not answered the "
                    f"request to give up its step for {worker.abort_limit_s:g} s, and is killed",
                    flush=True,
                )
                worker.unresponsive_s = None
                worker.cause = UNRESPONSIVE_CAUSE
                worker.child.process.kill()

    def _report_failures(self, failed_workers: list[tuple[_Worker, int]]) -> None:
        generation, count = self._generation, self._layout.processes
        came_up = all(w.ready for w in self._workers)
        self.stop()
        if not came_up and generation == 0:
            failures = tuple(self._early_failure(w, code) for w, code in failed_workers)
            print(failures[0].tail, flush=True)
            last = Assignment(self.order.job, AssignmentPhase.EXITED, 0, failures)
            code = failed_workers[0][1]
            self._loop.leave(Phase(last), f"A worker ended with code {code} before it was ready.")
            return
        failures = tuple(
            Failure(
                self._places.get(generation, 0) * count + w.local_rank,
                code,
                time.time(),
                self._last_words(w),
                w.cause or _own_end(w, code),
            )
            for w, code in failed_workers
        )
        self._report(AssignmentPhase.FAILED, generation, failures)

    def _last_words(self, worker: _Worker) -> str:
        """Return the end of a worker's output. A worker switches to the log of a round when it
        enters the round, which it may not have reported before it failed. Before its first round it
        has a separate log.
        """
        count = self._layout.processes
        for generation in (worker.announced_round, worker.running, 0):
            place = self._places.get(generation, 0)
            name = rank_log_name(generation, place * count + worker.local_rank)
            words = without_noise(last_words(os.path.join(self.order.log_dir, name)))
            if words:
                return words[-_TAIL_CHARACTERS:]
        return ""

    def _early_failure(self, worker: _Worker, code: int) -> Failure:
        """Return the failure of a worker that ended before it was ready: its first error, and a
        hint if the script does not use live mode.

        Args:
            worker: the worker.
            code: its exit code.
        """
        name = rank_log_name(0, worker.local_rank)
        output = first_words(os.path.join(self.order.log_dir, name))
        script = Path(self.order.spec.workdir) / self.order.spec.script
        foreign = worker.connection is None and not uses_elastic(script)
        hint = NOT_LIVE if foreign else "" if code else "It ended without joining its job."
        error = first_error(output) if code else ""
        if error and hint:
            error += " " if error.endswith((".", "!", "?")) else ". "
        cause, tail = error + hint or _own_end(worker, code), without_noise(output)
        if code == UNFIT:  # with a cause it would mean that the launcher lacks software
            cause, tail = "", f"{tail}\n{hint}" if hint else tail
        return Failure(
            *(worker.local_rank, code, time.time()),
            *(tail[-_TAIL_CHARACTERS:], cause[-_CAUSE_CHARACTERS:]),
        )

    def stop(self) -> None:
        """Stop all workers."""
        stop_all([w.child for w in self._workers], self.order.stop_grace_s)
        for worker in self._workers:
            if worker.connection is not None:
                self._loop.lines.hang_up(worker.connection)
        self._workers = []


def abort_limit_s(generation: int, running: int, join_timeout_s: float) -> float:
    """Return the maximum time in which a worker must confirm an abort, seconds. If it has not
    entered the round, the abort ends no step of it, so it may be in a long step of a round that is
    intact, or on its way into this one. It then has the time that a join may take.

    Args:
        generation: the round to be aborted.
        running: the newest round that the worker has entered.
        join_timeout_s: maximum time for all members to join a round, seconds.
    """
    return UNRESPONSIVE_S if generation <= running else max(UNRESPONSIVE_S, join_timeout_s)


def _own_end(worker: _Worker, code: int) -> str:
    """Return the cause of the end of a worker whose exit code alone would be taken for a request to
    start it again; empty for any other.
    """
    return SCRIPT_ENDED if code == RESTART_CODE and not worker.asked_restart else ""


if sys.platform != "linux":
    raise ImportError("Live mode needs Linux (pidfd_open).")
