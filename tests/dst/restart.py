"""A launcher with its worker in restart mode, as :mod:`malletrain.launch.rendezvous` and
TorchElastic do it, told in states and times.
"""

from __future__ import annotations

from typing import Any

from malletrain.protocol import worker_channel as local
from malletrain.protocol.launcher_channel import RoundInbox
from malletrain.protocol.messages import Failure, Round, StoreUp
from malletrain.protocol.phases import AssignmentPhase
from tests.dst.launcher import CRASHED, PEER_LOST, VirtualLauncher
from tests.dst.training import Group
from tests.dst.truth import BATCH, STEP_S


class RestartLauncher(VirtualLauncher):
    """Workers are stopped and started for each round."""

    def _begin(self) -> None:
        self._inbox = RoundInbox()
        self._serves: set[int] = set()
        self._state = "starting"
        """starting | lobby | joining | starting-workers | waiting | training | done | stopping"""
        self._round: Round | None = None
        self._group: Group | None = None
        self._samples = 0.0
        self._steps = 0
        self._first = 0.0
        self._pid = 0
        self._after(self._rng.uniform(0.1, 1.2), self._connect)

    def _exit(self, code: int) -> None:
        if self._code is not None:
            return
        super()._exit(code)
        for generation in self._serves:
            group = self.truth.groups.get(generation)
            if group is not None and group.store is self:
                for member in list(group.members):
                    self._later(self._rng.uniform(0.0, 0.3), member.peer_lost, group)

    def _heard(self, message: Any) -> None:
        assert isinstance(message, Round), message
        self._inbox.add(message)
        if self._state not in ("starting", "stopping"):
            self._take_notice()

    def _connect(self) -> None:
        self._lobby(AssignmentPhase.READY)

    def _lobby(self, phase: AssignmentPhase, failures: tuple[Failure, ...] = ()) -> None:
        self._state = "lobby"
        if self._inbox.pending() is None:
            self._phase(phase, self._inbox.generation, failures)
        else:
            self._take_notice()

    # --- rounds ---

    def _take_notice(self) -> None:
        """A round waits: serve its store while the workers run, then stop them and join."""
        pending = self._inbox.pending()
        if pending is None:
            return
        if not pending.store_host:
            self._serve(pending)
        if self._state in ("starting-workers", "waiting", "training"):
            self._state = "stopping"
            self._next(self._rng.uniform(0.05, 0.5), self._stopped)
        else:
            self._join()

    def _serve(self, pending: Round) -> None:
        if pending.generation in self._serves:
            return
        self._serves.add(pending.generation)
        group = self._trainings.group(self.job, pending.generation, pending.group_size)
        group.store = self
        self._say(StoreUp(self.job, pending.generation, self.node.name, 29500))

    def _stopped(self) -> None:
        self._stop_worker()
        self._join()

    def _join(self) -> None:
        """Wait until the store of the newest round is reached."""
        pending = self._inbox.pending()
        if pending is None:
            return
        self._state = "joining"
        group = self._trainings.group(self.job, pending.generation, pending.group_size)
        if not pending.store_host:
            self._serve(pending)
        there = group.store is not None and group.store.alive
        if there and self._reaches(group.store):
            self._next(self._rng.uniform(0.01, 0.2), self._joined, pending, group)
        else:
            self._next(0.25, self._join)

    def _reaches(self, other: RestartLauncher) -> bool:
        return other is self or (self.node.up and other.node.up)

    def _joined(self, pending: Round, group: Group) -> None:
        if self._inbox.pending() is not pending:
            self._take_notice()
            return
        self._round, self._group = self._inbox.take(), group
        self._phase(AssignmentPhase.RUNNING, self._inbox.generation)
        self._state = "starting-workers"
        self._samples, self._steps, self._pid = 0.0, 0, self._pid + 1
        self._next(self._rng.uniform(0.2, 1.5), self._worker_up)

    # --- the worker ---

    def _sender(self) -> local.Sender:
        assert self._round is not None
        rank, generation = self._round.group_rank, self._round.generation
        return local.Sender(self.job, generation, rank, self.number * 1000 + self._pid)

    def _worker_up(self) -> None:
        assert self._group is not None
        assert self._round is not None
        self._state = "waiting"
        self._state = "training"
        self._trainings.up(self.job, self._group, self)

    def stepped(self, group: Group) -> None:
        """The group has made a step."""
        now = self._trainings.loop.wall()
        self._samples += BATCH
        self._steps += 1
        self._first = self._first if self._steps > 1 else now
        assert self._round is not None
        if self._steps == 1 and self._round.group_rank == 0:
            self._workers(local.Capable(self._sender()))
        self._workers(
            local.WorkerProgress(
                self._sender(), self._samples, self._steps, BATCH, self._first, now
            )
        )

    def _flagged(self, number: int) -> None:
        if self._code is None and self._group is not None and self._state == "training":
            if number:
                self._after(self._rng.uniform(0.0, STEP_S), self._drain, number, self._group)
            else:
                self._trainings.drain_over(self._group)

    def _drain(self, number: int, group: Group) -> None:
        if self._flags.number == number and group is self._group and group.training:
            self._trainings.drained(self.job, group)
            if group.halted:
                self._after(
                    self._rng.uniform(0.05, 0.5),
                    lambda: self._workers(local.DrainDone(self._sender(), number, True)),
                )

    def succeeded(self) -> None:
        """The training is over."""
        self._state = "done"
        self._after(self._rng.uniform(0.05, 0.4), self._well)

    def _well(self) -> None:
        if self._state == "done":
            self._group = None
            self._phase(AssignmentPhase.SUCCEEDED, self._inbox.generation)
            self._take_notice()

    def peer_lost(self, group: Group) -> None:
        """A member of the group is gone: the worker's collective fails."""
        if self._code is None and group is self._group and self._state == "training":
            self._failed(PEER_LOST)

    def crash(self) -> None:
        """The job's own script fails here."""
        if self._code is None and self._state == "training":
            self.truth.crashes += 1
            self._failed(CRASHED)

    def _failed(self, words: str) -> None:
        assert self._round is not None
        rank, now = self._round.group_rank, self._trainings.loop.wall()
        self._stop_worker()
        self._lobby(AssignmentPhase.FAILED, (Failure(rank, 1, now, words),))

    def _stop_worker(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._trainings.member_ended(self.job, group, self)
