"""What this node does for one job, from Assign to Released: one launcher, its rounds, drains,
failures, and the end.

    starting ──▶ ready ──Round──▶ running ──▶ succeeded | failed ──Round──▶ running …
    any ──launcher gone──▶ exited

Decides only what is local: when a wait for a round or a drain has timed out, and when SIGKILL must
follow SIGTERM. Everything is level-triggered: :meth:`NodeJob.assignment` is the current state, and
sending it again has no effect.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable

from malletrain.agent.fork_servers import Launched, NodeForkServers
from malletrain.agent.launch import JobPlace
from malletrain.agent.logs import LogForwarder, tail
from malletrain.agent.reports import BEGINS_ANEW, DrainServed, WorkerReports
from malletrain.agent.start import UnfitNode, start_launcher
from malletrain.agent.worker_failures import stock_failures, unfit, with_tails
from malletrain.launch.fabric import round_for_launcher
from malletrain.protocol import messages
from malletrain.protocol.failures import UNFIT
from malletrain.protocol.flags import FlagsWriter
from malletrain.protocol.log_names import SERVICE_LOG, rank_log_name
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
)
from malletrain.protocol.phases import TRAINS, AssignmentPhase

log = logging.getLogger("malletrain.agent")

LOBBY_PATIENCE = 3.0
"""The daemon watches over its rounds within the join timeout; only a wait of several times that
means that it has forgotten this node.
"""

OWN_DRAIN = 2**53 - 1  # a number that no daemon reaches, and that a message may hold


class NodeJob:
    """One job on this node. ``send`` reaches the daemon (False: it is away), ``tell`` the launcher;
    ``hear`` takes in what workers have said and was not read yet.
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
        self.phase = AssignmentPhase.STARTING
        self.generation = 0
        self.failures: tuple[Failure, ...] = ()
        self.address = ""
        self.reports = WorkerReports(assign.job, send)
        self.ended = False
        """No process of the job is left and the daemon was told."""
        self.drain_wait = False
        """The workers of the round have served a drain: what they would do now would be lost."""
        self._assign, self._place, self._servers = assign, place, servers
        self._logs, self._send, self._tell, self._hear = logs, send, tell, hear
        self._rounds: dict[int, Round] = {}
        self._store: StoreUp | None = None
        self._drain: tuple[Drain, float] | None = None
        self._tail = ""
        self._last_failures: tuple[Failure, ...] = ()
        """Why the launcher is about to end."""
        self._some_ended = False
        """A worker of several has ended with code 0."""
        self._waited_s = 0.0
        self._stepped = time.monotonic()
        self._kill_at: float | None = None
        self._complained = False
        place.directory.mkdir(mode=0o700)
        self._log_dir = place.directory / "logs"
        self._log_dir.mkdir()
        self._launcher_log = place.directory / "launcher.log"
        self._logs.add(self.job, 0, "launcher", self._launcher_log)
        self._is_service = assign.spec.mode == "service"
        if self._is_service:
            self._logs.add(self.job, 0, "service", self._log_dir / SERVICE_LOG)
        self.flags = FlagsWriter(str(place.directory / "flags"))
        self._process: Launched | None = None
        self._start()

    # --- what it is ---

    def assignment(self, ended: bool = True) -> Assignment:
        """What this node holds of the job, for the daemon; without ``ended`` as long as it ran."""
        ends = (AssignmentPhase.FINISHING, AssignmentPhase.SUCCEEDED, AssignmentPhase.FAILED)
        if not ended and self.phase in ends:
            return Assignment(self.job, AssignmentPhase.RUNNING, self.generation, (), self.address)
        entered = self._rounds.get(self.generation)
        size = entered.group_size if entered and self.phase is AssignmentPhase.SUCCEEDED else 0
        return Assignment(self.job, self.phase, self.generation, self.failures, self.address, size)

    @property
    def _in_lobby(self) -> bool:
        """Whether the launcher waits for a round."""
        return self.phase in (AssignmentPhase.READY, AssignmentPhase.FAILED)

    @property
    def releasing(self) -> bool:
        """Whether the job is on its way out."""
        return self._kill_at is not None

    @property
    def stop_grace_s(self) -> float:
        """Seconds between SIGTERM and SIGKILL of a worker."""
        return self._assign.stop_grace_s

    # --- what the daemon says ---

    def assigned_again(self, assign: Assign) -> None:
        """The daemon wants this job here: start the launcher again if it is gone, else say how
        things stand.
        """
        if self.phase is AssignmentPhase.EXITED:
            self._assign = assign
            self._start()
        self._report()

    def round(self, message: Round) -> None:
        """Membership of a round. The newest counts; the launcher gets it when it listens."""
        store = self._store
        if store is not None and store.generation == message.generation and not message.store_host:
            self._send(store)  # said before, and lost on the way
            return
        newest = self._pending()
        newest_generation = newest.generation if newest else self.generation
        if self.releasing or message.generation <= newest_generation:
            return
        message = self._rounds[message.generation] = round_for_launcher(
            message, self._assign.spec.env
        )
        self._waited_s = 0.0
        if self._assign.spec.mode == "live":
            self._no_drain()  # its workers go to it themselves, and not while they wait for an end
        if self._process is None and self.phase is AssignmentPhase.SUCCEEDED:
            self._start()  # torchrun left when its workers were done; they are needed again
        self._tell(message)

    def reconnected(self) -> None:
        """What was said last may not have arrived: the others of a round wait for its store."""
        self.reports.reconnected()
        if self._store is not None and self._store.generation >= self.generation:
            self._send(self._store)

    def drain(self, message: Drain) -> None:
        """Have the worker here take a snapshot and wait; answered by Drained."""
        if message.number == 0:
            self._no_drain()
        elif self.phase not in TRAINS or message.generation != self.generation:
            why = f"The job's workers here do not run (they are {self.phase})."
            self._send(Drained(self.job, message.generation, False, why))
        elif self.generation not in self.reports.capable:
            if self._assign.spec.mode == "restart" and self.reports.trains_unsaved(self.generation):
                self._send(Notice(self.job, 0, "snapshot", BEGINS_ANEW))
            why = "No worker here takes snapshots on request."
            self._send(Drained(self.job, message.generation, False, why))
        else:
            self._drain = (message, time.monotonic() + message.timeout_s)
            self.flags.request_drain(message.number, message.heirs)

    def abort(self, message: Abort) -> None:
        """A member of the round is lost: the live workers here must not wait for it."""
        self._tell(message)

    @property
    def unsaved(self) -> bool:
        """Whether something may yet be saved: by a script that ends, or by workers here that have
        not served a drain, where rank 0 is elsewhere or can save on request.
        """
        if self.phase is AssignmentPhase.FINISHING:
            return True
        can = self._is_service or not self.has_rank_0 or self.generation in self.reports.capable
        return can and self.phase in TRAINS and not self.drain_wait

    @property
    def has_rank_0(self) -> bool:
        """Whether rank 0 of the round is on this node, as far as is known."""
        entered = self._rounds.get(self.generation)
        return entered is None or entered.group_rank == 0

    def save_alone(self, within_s: float) -> None:
        """The node goes and no daemon moves the job: save what the workers did, if possible."""
        drain = Drain(self.job, self.generation, OWN_DRAIN, max(0.0, within_s))
        if self._is_service:
            self._tell(drain)
        elif self.phase in TRAINS and self.generation in self.reports.capable:
            self.drain(drain)

    def release(self, grace_s: float) -> None:
        """Stop everything: SIGTERM now, SIGKILL after the grace."""
        deadline = time.monotonic() + max(0.0, grace_s)
        if self._kill_at is None:
            self._tell(Release(self.job, max(0.0, grace_s)))
            if self._process is not None:
                self._process.terminate()
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)

    # --- what the launcher and the workers say ---

    def from_launcher(self, message: LauncherMessage) -> None:
        """News of the launcher."""
        if isinstance(message, StoreUp):
            self._store = message
        elif isinstance(message, Drained):  # of a service's process
            self.drain_wait = message.saved
        if not isinstance(message, Phase):
            self._send(message)
            return
        assignment = message.assignment
        if self._process is None:
            return  # it is gone already, and what it said before is known by its end
        if assignment.phase is AssignmentPhase.EXITED:  # told once it is gone
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
            self._entered(self._rounds[assignment.generation])
        self.phase, self.generation, self.failures = (
            assignment.phase,
            assignment.generation,
            failures,
        )
        self.address, self._waited_s = assignment.address, 0.0
        self._some_ended = assignment.phase is AssignmentPhase.FINISHING
        self._report()
        if self._drain is not None and assignment.phase is not AssignmentPhase.RUNNING:
            # After the news of an end: a script that is done needs no drain.
            self._drain_failed("The workers ended before they could take a snapshot.")
        if self._in_lobby and (pending := self._pending()):
            self._tell(pending)

    def note_training(self) -> None:
        """The workers have reported: whether they train, or are in the code after an epoch or after
        their training.
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
        """A worker says that a drain is over."""
        if self._drain is not None and served.number == self._drain[0].number:
            self._drain = None
            self.drain_wait = served.saved
            self.reports.flush_metrics()
            drained = (served.generation, served.saved, served.sentence, served.number)
            self._send(Drained(self.job, *drained))

    # --- time ---

    def step(self, connected: bool) -> None:
        """Look after processes and time limits; called often. ``connected``: to the daemon."""
        now = time.monotonic()
        elapsed, self._stepped = now - self._stepped, now
        code = self._process.exit_code() if self._process else None
        if self._kill_at is not None:
            if self._process is None or code is not None or now >= self._kill_at:
                self._finish()
            return
        if code is not None:
            self._launcher_gone(code)
        between = self.phase is AssignmentPhase.BETWEEN_EPOCHS
        if self._drain is not None and between and self._drain[0].number != OWN_DRAIN:
            # It is served when that code has run. The daemon knows how long the nodes may stay.
            self._drain = (self._drain[0], now + self._drain[0].timeout_s)
        if self._drain is not None and now >= self._drain[1]:
            self._drain_failed(f"No snapshot within {self._drain[0].timeout_s:g} s.")
        if self._in_lobby and connected and not self._pending():
            self._waited_s += min(elapsed, 1.0)  # not the time for which this process was stopped
            limit_s = LOBBY_PATIENCE * self._assign.join_timeout_s
            if self._waited_s > limit_s:
                self._waited_s = 0.0
                late = f"no round of job {self.job} with this node within {limit_s:g} s."
                self._tell(Error(f"The daemon formed {late}"))

    # --- inside ---

    def _start(self) -> None:
        spec = self._assign.spec
        self.phase, self.failures = AssignmentPhase.STARTING, ()
        self._store, self._waited_s = None, 0.0
        pending = self._pending()
        self._rounds = {pending.generation: pending} if pending else {}
        self.generation, self.address, self._last_failures = 0, "", ()
        self._no_drain()
        if spec.mode == "live":  # what is printed before the first round
            for rank in range(spec.nproc_per_node):
                path = self._log_dir / rank_log_name(0, rank)
                self._logs.add(self.job, 0, f"rank{rank}", path)
        try:
            self._process = start_launcher(
                self._assign,
                self._place,
                self._servers,
                self.flags.path,
                self._log_dir,
                self._launcher_log,
            )
        except UnfitNode as error:
            self._process = None
            self._last_failures = unfit(f"malletrain: {error}", UNFIT, time.time())
            self._exited(str(error))
        except (OSError, ValueError) as error:  # ValueError: a zero byte in an argument
            self._process = None
            self._exited(f"The launcher cannot be started: {error}.")

    def _pending(self) -> Round | None:
        """The newest round, if the workers are not of it already."""
        newest = max(self._rounds, default=0)
        return self._rounds[newest] if newest > self.generation else None

    def _entered(self, entered: Round) -> None:
        """The launcher has taken a round; the workers of the one before are gone, those of this one
        are about to start.
        """
        self._no_drain()
        self._rounds = {g: r for g, r in self._rounds.items() if g >= entered.generation}
        self._logs.close(self.job, before=entered.generation)
        count = self._assign.spec.nproc_per_node
        first = entered.group_rank * count
        for rank in range(first, first + count):
            path = self._log_dir / rank_log_name(entered.generation, rank)
            self._logs.add(self.job, entered.generation, f"rank{rank}", path)

    def _no_drain(self) -> None:
        self._drain, self.drain_wait = None, False
        self.flags.request_drain(0)

    def _drain_failed(self, sentence: str) -> None:
        assert self._drain is not None
        generation = self._drain[0].generation
        self._no_drain()
        self._send(Drained(self.job, generation, False, sentence))

    def _stock_failures(self) -> tuple[Failure, ...]:
        entered = self._rounds.get(self.generation)
        group_rank = entered.group_rank if entered else 0
        return stock_failures(
            tail(self._launcher_log), group_rank, self._assign.spec.nproc_per_node, time.time()
        )

    def _launcher_gone(self, code: int) -> None:
        self._process = None
        self._servers.sweep(1.0)
        if code == 0 and self._assign.spec.launcher == "torchrun" and self.generation > 0:
            self.phase = AssignmentPhase.SUCCEEDED
            self._report()
            return
        signal = -code if code < 0 else code - 128
        how = f"with code {code}" if 0 <= code <= 128 else f"by signal {signal}"
        lines = tail(self._launcher_log)
        self._last_failures = self._last_failures or unfit(lines, code, time.time())
        self._exited(lines or f"The launcher ended {how} and said nothing.")

    def _exited(self, last_words: str) -> None:
        self.phase, self._tail = AssignmentPhase.EXITED, last_words
        self.failures = self._last_failures or self.failures
        self._logs.close(self.job, before=self.generation + 1)
        self._report()

    def _report(self) -> None:
        self._hear()
        self.reports.flush_metrics()
        last_words = self._tail if self.phase is AssignmentPhase.EXITED else ""
        self._send(Phase(self.assignment(), last_words))

    def _finish(self) -> None:
        """Kill what is left and say so once nothing is: a process that cannot be killed keeps the
        node ours.
        """
        self._servers.sweep(0.2)
        if self._process is not None:
            self._process.exit_code()
        if self._servers.anything_left():
            if not self._complained:
                self._complained = True
                why = "resist SIGKILL (uninterruptible sleep?); waiting for them"
                log.warning("processes of job %s %s", self.job, why)
            return
        if self._process is not None:
            self._process.forget()
        self._process = None
        self._hear()
        self.reports.flush_metrics()
        self._logs.close(self.job)
        self.flags.close()
        shutil.rmtree(self._place.directory / "torchrun", ignore_errors=True)
        if self._place.memory is not None:
            shutil.rmtree(self._place.memory, ignore_errors=True)
        self.ended = True
        self._send(Released(self.job))
