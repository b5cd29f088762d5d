"""One job on this node, from Assign to Released: its launcher, its rounds, drains, failures, and
its end.

    starting ──▶ ready ──Round──▶ running ──▶ succeeded | failed ──Round──▶ running …
    any ──launcher ended──▶ exited

:class:`NodeJob` decides only what is local: when a wait for a round or a drain has timed out, and
when SIGKILL must follow SIGTERM. Everything is level-triggered: :meth:`NodeJob.assignment` is the
current state, and sending it again has no effect.

:mod:`malletrain.agent.failures` finds what failed on this node, and why.
"""

from __future__ import annotations

import logging
import shutil
import signal
import time
from collections.abc import Callable, Sequence

from malletrain.agent.failures import (
    killed,
    lacks_folder,
    signal_of,
    stock_failures,
    unfit,
    with_tails,
)
from malletrain.agent.fork_servers import Launched, NodeForkServers
from malletrain.agent.launch import JobPlace
from malletrain.agent.logs import LogForwarder, tail
from malletrain.agent.reports import NO_SNAPSHOTS_NOTICE, DrainServed, WorkerReports
from malletrain.agent.start import UnusableSoftware, command_of_owner, start_launcher
from malletrain.launch.worker_variables import round_for_launcher
from malletrain.protocol import messages
from malletrain.protocol.commands import Terminal
from malletrain.protocol.failures import UNFIT
from malletrain.protocol.flags import FlagsWriter
from malletrain.protocol.job_files import SERVICE_LOG, rank_log_name
from malletrain.protocol.messages import (
    Abort,
    Assign,
    Assignment,
    Drain,
    Drained,
    Error,
    Failure,
    LauncherMessage,
    Notice,
    Phase,
    Release,
    Released,
    Round,
    StoreUp,
    TaskAck,
    TaskItems,
    TaskQuery,
    TaskStop,
)
from malletrain.protocol.phases import HOLDING, TRAINS, AssignmentPhase

log = logging.getLogger("malletrain.agent")

LOBBY_TIMEOUT_FACTOR = 3.0
"""Maximum wait of a launcher for a round, as a multiple of the join timeout. The daemon itself
handles rounds that exceed the join timeout; a longer wait means that it has forgotten this node.
"""

LATE_FOLDER_STARTS = 5
"""Number of times that the launcher is started if the job's working directory is missing. Its file
system may be mounted when it is first used.
"""
LATE_FOLDER_POLL_S = 1.0
"""Time between two of these starts, seconds."""

OWN_DRAIN = 2**53 - 1
"""Number of a drain by the agent itself. It fits into a message, and no daemon reaches it."""


class NodeJob:
    """One job on this node.

    Args:
        assign: the assignment from the daemon.
        place: host, directory and sockets of the job on this node.
        servers: fork servers of the node.
        logs: forwards the logs of the job.
        send: sends a message to the daemon. Returns False if the daemon is away.
        tell: sends a message to the launcher.
        hear: reads the reports of workers that have arrived.
    """

    def __init__(
        self,
        assign: Assign,
        place: JobPlace,
        servers: NodeForkServers,
        logs: LogForwarder,
        send: Callable[[messages.Message], bool],
        tell: Callable[[messages.Message], None],
        hear: Callable[[], None],
    ) -> None:
        self.job = assign.job
        """Id of the job."""
        self.phase = AssignmentPhase.STARTING
        """Phase of the job on this node."""
        self.generation = 0
        """Number of the round that the launcher has joined; 0 before the first."""
        self.failures: tuple[Failure, ...] = ()
        """Failures of workers here in that round."""
        self.address = ""
        """Address that the launcher has reported, for the other nodes."""
        self._loading = False
        """The process of a service has joined and is not ready to serve."""
        self._start_s: float | None = None
        """Time from the start of the process of a service until it was ready, seconds."""
        self.data_address = ""
        """Address at which it serves the samples of data caches."""
        self.reports = WorkerReports(assign.job, send, tuned=bool(assign.spec.tuned))
        self.ended = False
        """No process of the job is left, and this has been reported to the daemon."""
        self.stop_wait = False
        """The workers of the round have served a drain and wait to be stopped."""
        self._assign, self._place, self._servers = assign, place, servers
        self._logs, self._send, self._tell, self._hear = logs, send, tell, hear
        self._rounds: dict[int, Round] = {}
        self._store: StoreUp | None = None
        self._drain: tuple[Drain, float] | None = None
        self._tail = ""
        self._last_failures: tuple[Failure, ...] = ()
        """Failures because of which the launcher is about to end."""
        self._some_ended = False
        """A worker of several has ended with code 0."""
        self._waited_s = 0.0
        """Time for which the launcher has waited for a round, seconds."""
        self._last_step_at = time.monotonic()
        self._starts_without_folder = 0
        """Number of starts that failed because the working directory is missing. Later tries on
        this node do not wait for it again.
        """
        self._start_at: float | None = None
        """Time at which the launcher is started again for that; None if it is not."""
        self._kill_at: float | None = None
        """Time at which the processes are killed; None unless the job is being released."""
        self._has_warned = False
        place.directory.mkdir(mode=0o700)
        self._log_dir = place.directory / "logs"
        self._log_dir.mkdir()
        self._launcher_log = place.directory / "launcher.log"
        self._logs.add(self.job, 0, "launcher", self._launcher_log)
        self._is_service = not assign.spec.trains
        """Whether its rounds are views of members."""
        self._is_farm = assign.spec.mode == "farm"
        if assign.spec.mode == "service":
            self._logs.add(self.job, 0, "service", self._log_dir / SERVICE_LOG)
        self.flags = FlagsWriter(str(place.directory / "flags"))
        self._process: Launched | None = None
        self._start()

    # --- state ---

    def assignment(self, ended: bool = True) -> Assignment:
        """Return the state of the job on this node, for the daemon. ``ended``: whether to report
        that workers have ended; if False, such a job is reported as running.
        """
        ends = (AssignmentPhase.FINISHING, AssignmentPhase.SUCCEEDED, AssignmentPhase.FAILED)
        phase, failures, size = self.phase, self.failures, 0
        if not ended and phase in ends:
            phase, failures = AssignmentPhase.RUNNING, ()
        elif phase is AssignmentPhase.SUCCEEDED and self.generation in self._rounds:
            size = self._rounds[self.generation].group_size
        state = (self.job, phase, self.generation, failures, self.address, size)
        return Assignment(*state, self._loading, self._start_s, self.data_address)

    @property
    def _in_lobby(self) -> bool:
        """Whether the launcher waits for a round."""
        return self.phase in (AssignmentPhase.READY, AssignmentPhase.FAILED)

    @property
    def releasing(self) -> bool:
        """Whether the job is being released from this node."""
        return self._kill_at is not None

    @property
    def stop_grace_s(self) -> float:
        """Time between SIGTERM and SIGKILL of a worker, seconds."""
        return self._assign.stop_grace_s

    def command_of_owner(
        self, command: Sequence[str], terminal: Terminal | None
    ) -> tuple[list[str], dict[str, str], str]:
        """Return (command, environment, working directory) of a command that the job's owner runs
        here. Raises UnusableSoftware or OSError if it cannot be run.
        """
        argv, environment = command_of_owner(
            self._assign, self._place, self.flags.path, command, terminal
        )
        return argv, environment, self._assign.spec.workdir

    # --- messages of the daemon ---

    def assigned_again(self, assign: Assign) -> None:
        """Handle a repeated assignment: start the launcher again if it has ended, and report the
        state.
        """
        if self.phase is AssignmentPhase.EXITED:
            self._assign = assign
            self._start()
        self._report()

    def round(self, message: Round) -> None:
        """Handle the membership of a round. The newest round counts. The launcher gets it now, and
        again when it waits for a round.
        """
        store = self._store
        if store is not None and store.generation == message.generation and not message.store_host:
            self._send(store)  # the earlier message was lost
            return
        newest = self._pending_round()
        newest_generation = newest.generation if newest else self.generation
        if self.releasing or message.generation <= newest_generation:
            return
        message = self._rounds[message.generation] = round_for_launcher(
            message, self._assign.spec.env
        )
        self._waited_s = 0.0
        if self._assign.spec.mode == "live":
            entered = self._rounds.get(self.generation)
            if entered is not None and message.layout != entered.layout:
                # Other workers go on from the snapshot for which these wait.
                self._add_first_logs(self._processes_in(message))
            else:
                # Live workers switch rounds themselves, but not while they wait in a drain.
                self._cancel_drain()
        if self._process is None and self.phase is AssignmentPhase.SUCCEEDED:
            self._start()  # torchrun ended with its workers, which are needed again
        self._tell(message)

    def reconnected(self) -> None:
        """Repeat the last reports after a reconnection, because they may have been lost. Other
        nodes may wait for the store of a round.
        """
        self.reports.reconnected()
        if self._is_farm:
            self._tell(TaskQuery(self.job))
        if self._store is not None and self._store.generation >= self.generation:
            self._send(self._store)

    def drain(self, message: Drain) -> None:
        """Make the workers here take a snapshot and wait. The answer is a Drained."""
        if message.number == 0:
            self._cancel_drain()
        elif self.phase not in TRAINS or message.generation != self.generation:
            reason = f"The job's workers here do not run (they are {self.phase})."
            self._send(Drained(self.job, message.generation, False, reason))
        elif self.generation not in self.reports.capable:
            if self._assign.spec.mode == "restart" and self.reports.trains_unsaved(self.generation):
                self._send(Notice(self.job, 0, "snapshot", NO_SNAPSHOTS_NOTICE))
            reason = "No worker here takes snapshots on request."
            self._send(Drained(self.job, message.generation, False, reason))
        else:
            self._drain = (message, time.monotonic() + message.timeout_s)
            self.flags.request_drain(message.number, message.heirs)

    def forward(self, message: Abort | TaskItems | TaskAck | TaskStop) -> None:
        """Forward a message to the launcher: that a member of the round is lost, so that live
        workers here do not wait for it, or one about the tasks of a farm.
        """
        self._tell(message)

    @property
    def unsaved(self) -> bool:
        """Whether work may still be saved: by a script that is finishing, or by workers that have
        not served a drain, if rank 0 is on another node or can save on request.
        """
        if self.phase is AssignmentPhase.FINISHING:
            return True
        can_save = (
            self._is_service or not self.has_rank_0 or self.generation in self.reports.capable
        )
        return can_save and self.phase in TRAINS and not self.stop_wait

    @property
    def has_rank_0(self) -> bool:
        """Whether rank 0 of the round is on this node; True if this is not known."""
        entered = self._rounds.get(self.generation)
        return entered is None or entered.group_rank == 0

    def save_alone(self, within_s: float) -> None:
        """Request a snapshot, if possible, because the node leaves and there is no daemon that
        moves the job. ``within_s``: time limit, seconds.
        """
        drain = Drain(self.job, self.generation, OWN_DRAIN, max(0.0, within_s))
        if self._is_service:
            self._tell(drain)
        elif self.phase in TRAINS and self.generation in self.reports.capable:
            self.drain(drain)

    def release(self, grace_s: float) -> None:
        """Stop the launcher and the workers: SIGTERM now, SIGKILL ``grace_s`` seconds later."""
        deadline = time.monotonic() + max(0.0, grace_s)
        if self._kill_at is None:
            self._tell(Release(self.job, max(0.0, grace_s)))
            if self._process is not None:
                self._process.terminate()
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)

    def end_here(self, sentence: str) -> None:
        """Kill the job's processes on this node, because they break a rule of the node. The job
        fails here with ``sentence`` as the cause.
        """
        if self._process is None or self.releasing:
            return
        failure = Failure(self._first_rank, -signal.SIGKILL, time.time(), cause=sentence)
        self._last_failures = (failure,)
        self._servers.sweep(1.0)  # the next step finds that the launcher has ended

    # --- messages of the launcher and the workers ---

    def from_launcher(self, message: LauncherMessage) -> None:
        """Handle a message of the launcher."""
        if isinstance(message, StoreUp):
            self._store = message
        elif isinstance(message, Drained):  # from the process of a service
            self.stop_wait = message.saved
        if not isinstance(message, Phase):
            self._send(message)
            return
        assignment = message.assignment
        if self._process is None:
            return  # the launcher has ended, and its end has been handled
        if assignment.phase is AssignmentPhase.EXITED:  # reported when the launcher has ended
            self._last_failures = assignment.failures
            self._tell(Release(self.job, 0.0))
            return
        if self.releasing or assignment.phase in (AssignmentPhase.STARTING, AssignmentPhase.EXITED):
            return
        failures: tuple[Failure, ...] = ()
        if self._is_service:
            failures = assignment.failures
        elif assignment.phase is AssignmentPhase.FAILED:
            failures = with_tails(
                assignment.failures or self._stock_failures(), self._log_dir, assignment.generation
            )
        elif assignment.phase is AssignmentPhase.RUNNING and assignment.generation in self._rounds:
            self._on_round_joined(self._rounds[assignment.generation])
        self.phase, self.generation = assignment.phase, assignment.generation
        self.failures = failures
        self.address, self._waited_s = assignment.address, 0.0
        self._loading, self._start_s = assignment.loading, assignment.start_s
        self.data_address = assignment.data_address
        self._some_ended = assignment.phase is AssignmentPhase.FINISHING
        self._report()
        if self._drain is not None and assignment.phase is not AssignmentPhase.RUNNING:
            # After the report above: if the script is done, the daemon needs no drain.
            self._drain_failed("The workers ended before they could take a snapshot.")
        if self._in_lobby and (pending := self._pending_round()):
            self._tell(pending)

    def note_training(self) -> None:
        """Update the phase after reports of workers: whether they train, or are in the code after
        an epoch or after their training.
        """
        if self.phase not in (*TRAINS, AssignmentPhase.FINISHING) or self.releasing:
            return
        if self._some_ended or self.reports.is_over(self.generation):
            phase = AssignmentPhase.FINISHING
        elif self.reports.is_between_epochs(self.generation):
            phase = AssignmentPhase.BETWEEN_EPOCHS
        else:
            phase = AssignmentPhase.RUNNING
        if phase is not self.phase:
            self.phase = phase
            self._report()

    def drain_served(self, served: DrainServed) -> None:
        """Handle the report of a worker that it has served a drain."""
        if self._drain is not None and served.number == self._drain[0].number:
            self._drain = None
            self.stop_wait = served.saved
            self.reports.flush_metrics()
            drained = (served.generation, served.saved, served.sentence, served.number)
            self._send(Drained(self.job, *drained))

    # --- time ---

    def step(self, connected: bool) -> None:
        """Check processes and time limits; called often. ``connected``: whether the daemon is
        connected.
        """
        now = time.monotonic()
        elapsed, self._last_step_at = now - self._last_step_at, now
        code = self._process.exit_code() if self._process else None
        if self._kill_at is not None:
            if self._process is None or code is not None or now >= self._kill_at:
                self._finish()
            return
        if code is not None:
            self._on_launcher_end(code)
        if self._start_at is not None and now >= self._start_at:
            self._start()
        between = self.phase is AssignmentPhase.BETWEEN_EPOCHS
        if self._drain is not None and between and self._drain[0].number != OWN_DRAIN:
            # The drain is served after the code between epochs. The daemon limits this time.
            self._drain = (self._drain[0], now + self._drain[0].timeout_s)
        if self._drain is not None and now >= self._drain[1]:
            self._drain_failed(f"No snapshot within {self._drain[0].timeout_s:g} s.")
        if self._in_lobby and connected and not self._pending_round():
            self._waited_s += min(elapsed, 1.0)  # excludes time in which this process was stopped
            limit_s = LOBBY_TIMEOUT_FACTOR * self._assign.join_timeout_s
            if self._waited_s > limit_s:
                self._waited_s = 0.0
                sentence = f"no round of job {self.job} with this node within {limit_s:g} s."
                self._tell(Error(f"The daemon formed {sentence}"))

    # --- inside ---

    def _start(self) -> None:
        spec, self._start_at = self._assign.spec, None
        self.phase, self.failures = AssignmentPhase.STARTING, ()
        self._store, self._waited_s = None, 0.0
        pending = self._pending_round()
        self._rounds = {pending.generation: pending} if pending else {}
        self.generation, self._last_failures = 0, ()
        self.address = self.data_address = ""
        self._loading, self._start_s = False, None
        self._cancel_drain()
        if spec.mode == "live":
            self._add_first_logs(spec.nproc_per_node)
        try:
            self._process = start_launcher(
                self._assign,
                self._place,
                self._servers,
                self.flags.path,
                self._log_dir,
                self._launcher_log,
            )
        except UnusableSoftware as error:
            self._process = None
            self._last_failures = unfit(f"malletrain: {error}", UNFIT, time.time())
            self._report_exit(str(error))
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in an argument
            self._process = None
            self._report_exit(f"The launcher cannot be started: {error}.")

    def _add_first_logs(self, processes: int) -> None:
        """Forward the logs that live workers have before their first round."""
        for rank in range(processes):
            path = self._log_dir / rank_log_name(0, rank)
            self._logs.add(self.job, 0, f"rank{rank}", path)

    def _pending_round(self) -> Round | None:
        """Return the newest round if the launcher has not joined it yet, else None."""
        newest = max(self._rounds, default=0)
        return self._rounds[newest] if newest > self.generation else None

    def _on_round_joined(self, entered: Round) -> None:
        """Handle that the launcher has joined a round. The workers of earlier rounds have ended,
        those of this round are about to start.
        """
        self._cancel_drain()
        self._rounds = {g: r for g, r in self._rounds.items() if g >= entered.generation}
        self._logs.mark_complete(self.job, before_generation=entered.generation)
        count = 0 if self._is_farm else self._processes_in(entered)
        first = entered.group_rank * count
        for rank in range(first, first + count):
            path = self._log_dir / rank_log_name(entered.generation, rank)
            self._logs.add(self.job, entered.generation, f"rank{rank}", path)

    def _cancel_drain(self) -> None:
        self._drain, self.stop_wait = None, False
        self.flags.request_drain(0)

    def _drain_failed(self, sentence: str) -> None:
        assert self._drain is not None
        generation = self._drain[0].generation
        self._cancel_drain()
        self._send(Drained(self.job, generation, False, sentence))

    def _stock_failures(self) -> tuple[Failure, ...]:
        entered = self._rounds.get(self.generation)
        group_rank = entered.group_rank if entered else 0
        processes = self._processes_in(entered)
        return stock_failures(tail(self._launcher_log), group_rank, processes, time.time())

    def _processes_in(self, entered: Round | None) -> int:
        """Return the number of worker processes on this node in a round."""
        if entered is not None and entered.layout is not None:
            return entered.layout.processes
        return self._assign.spec.nproc_per_node

    @property
    def _first_rank(self) -> int:
        """The lowest rank on this node; 0 if it is not known."""
        entered = self._rounds.get(self.generation)
        return entered.group_rank * self._processes_in(entered) if entered else 0

    def _on_launcher_end(self, code: int) -> None:
        self._process = None
        self._servers.sweep(1.0)
        if code == 0 and self._assign.spec.launcher == "torchrun" and self.generation > 0:
            self.phase = AssignmentPhase.SUCCEEDED
            self._report()
            return
        number, now, lines = signal_of(code), time.time(), tail(self._launcher_log)
        end = f"by signal {number}" if number else f"with code {code}"
        if not self._last_failures and self.phase in HOLDING:
            self._last_failures = killed(code, self._first_rank, now)
        elif not self._last_failures:
            lacking = lacks_folder(lines, code, self._assign.spec.workdir, now)
            self._starts_without_folder += bool(lacking)
            if lacking and self._starts_without_folder < LATE_FOLDER_STARTS:
                self._start_at = time.monotonic() + LATE_FOLDER_POLL_S
                return
            self._last_failures = unfit(lines, code, now) or lacking
        self._report_exit(lines or f"The launcher ended {end} and said nothing.")

    def _report_exit(self, last_words: str) -> None:
        self.phase, self._tail = AssignmentPhase.EXITED, last_words
        self.failures = self._last_failures or self.failures
        self._logs.mark_complete(self.job, before_generation=self.generation + 1)
        self._report()

    def _report(self) -> None:
        self._hear()
        self.reports.flush_metrics()
        last_words = self._tail if self.phase is AssignmentPhase.EXITED else ""
        self._send(Phase(self.assignment(), last_words))

    def _finish(self) -> None:
        """Kill the remaining processes, and report when none is left. While a process cannot be
        killed, the node is not released.
        """
        self._servers.sweep(0.2)
        if self._process is not None:
            self._process.exit_code()
        if self._servers.has_job_processes():
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "processes of job %s resist SIGKILL (uninterruptible sleep?); waiting for them",
                    self.job,
                )
            return
        if self._process is not None:
            self._process.forget()
        self._process = None
        self._hear()
        self.reports.flush_metrics()
        self._logs.mark_complete(self.job)
        self.flags.close()
        shutil.rmtree(self._place.directory / "torchrun", ignore_errors=True)
        if self._place.memory is not None:
            shutil.rmtree(self._place.memory, ignore_errors=True)
        self.ended = True
        self._send(Released(self.job))
