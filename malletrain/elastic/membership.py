"""The membership of this process in successive rounds: check-in to a new round, change of the
group, loss of a peer.

Decides when a process leaves its group and forms the next one. A change has these stages:

1. All members of the new round check in while the old group trains.
2. All ranks of the old group agree that the current step is its last, in a collective that runs
   with every step.
3. The new group is formed.
4. Ranks that have no state, or are a step behind, receive it.
5. Training continues.

When a peer is lost, the operations in progress are aborted.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from malletrain.elastic.checkin import CheckIn, RoundStore
from malletrain.elastic.errors import Interrupted, is_peer_loss
from malletrain.elastic.group import Group, library_collectives
from malletrain.elastic.link import Place, connect
from malletrain.elastic.parallel import Parallel
from malletrain.elastic.state_policy import state_policy
from malletrain.elastic.step_exchange import Invited
from malletrain.elastic.training import Training
from malletrain.protocol import env
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.job_files import rank_log_name
from malletrain.protocol.phases import RESTART_CODE
from malletrain.training import drain, report, tracking

LAST_RESORT_S = 10.0
"""Time after a loss in which the training thread must have left its step, seconds. After it the
process is started again.
"""
PARTS = ("leave", "group", "state", "rebuild")
"""The parts of a change: leaving the old group (after a loss, until the new round is known),
forming the new group, sharing the state, wrapping the models again.
"""


class GroupMembership:
    """The membership of this process in its current round.

    Args:
        training: the objects of the run.
        changed: called in the training thread after every change of the group.
    """

    def __init__(self, training: Training, changed: Callable[[], None]) -> None:
        self.training = training
        self.parallels: list[Parallel] = []
        self.changes = 0
        """Number of rounds entered."""
        self.parts: dict[str, float] = {}
        """Duration of each of PARTS at the last change, seconds."""
        self.change_due = False
        """The last step was the last of its group."""
        self.stepping = False
        """A step is in progress."""
        self._training_thread = threading.get_ident()
        self._policy = state_policy(training)
        self._changed = changed
        self._group: Group | None = None
        self._check_in: CheckIn | None = None
        self._store: RoundStore | None = None
        """Store of the group's round in live mode, else None."""
        self._aborted: set[int] = set()
        self._joining = False
        self._signature = training.state.signature()
        self._link = connect()
        self._link.on_round = self._on_round
        self._link.on_abort = self._on_abort
        if self.live:
            self._policy.rehearse()
        self._link.start()
        self._link.say("ready")

    @property
    def live(self) -> bool:
        """Whether further rounds can follow."""
        return self._link.live

    @property
    def group(self) -> Group:
        """The group of the newest round that this process has entered."""
        assert self._group is not None
        return self._group

    @property
    def ready_to_go(self) -> bool:
        """Whether all members of a newer round have checked in."""
        check_in = self._check_in
        return (
            check_in is not None
            and check_in.everyone
            and check_in.place.generation > self.group.place.generation
        )

    # --- messages of the launcher, in the receiving thread ---

    def _on_round(self, place: Place) -> None:
        if self._check_in is not None:
            self._check_in.void = True
        self._check_in = CheckIn(
            place,
            self._signature,
            self.training,
            lambda: self._report_loss(place.generation),
            self._policy.holding(),
            self._policy.order,
            lambda: self._policy.joins,
        )

    def _on_abort(self, generation: int) -> None:
        self._aborted.add(generation)
        group = self._group
        if group is not None and group.place.generation == generation:
            group.abort()
            self._watch_for_hang()

    def _watch_for_hang(self) -> None:
        timer = threading.Timer(LAST_RESORT_S, self._start_again_if_hung, (self.changes,))
        timer.daemon = True
        timer.start()

    def _start_again_if_hung(self, changes: int) -> None:
        """Start this process again if its training thread hangs in an operation that cannot be
        aborted. Code between two steps, such as an evaluation, has no time limit unless it is in a
        collective.
        """
        if self.changes != changes or self.change_due or self._joining:
            return
        if not self.stepping and not _in_collective(self._training_thread):
            self._watch_for_hang()
        else:
            self.start_again(
                f"The step could not be given up within {LAST_RESORT_S:g} s after a peer was "
                "lost; this process starts again. Collectives "
                "of the script's own cannot be given up: use as few as possible."
            )

    def start_again(self, sentence: str) -> NoReturn:
        """End this process, whose state is of no use to its peers. It is started again and receives
        theirs.

        Args:
            sentence: the reason, for the log.
        """
        report.tell(sentence)
        report.flush()
        drain.flush()
        self._link.say("restart")  # a script may end with any exit code
        os._exit(RESTART_CODE)

    def _is_void(self, place: Place) -> bool:
        newest = self._link.newest()
        return place.generation in self._aborted or (
            newest is not None and newest.generation > place.generation
        )

    def _report_loss(self, generation: int) -> None:
        """Report that this process has state and cannot continue with its group. If no member was
        lost, there would be no new round without this report.
        """
        if self.training.has_state:
            self._link.say("lost", generation)

    # --- changes, in the training thread ---

    def give_up(self) -> None:
        """Abort the broken group, so that the peers notice as well, and change it before the next
        step.
        """
        group = self.group
        group.broken = self.change_due = True
        group.abort()
        self._report_loss(group.place.generation)

    def settle(self) -> None:
        """Change the group, if the last step was its last. A process that is to leave waits here
        until it is ended.
        """
        if self.change_due:
            self.change_due = False
            if self._hand_over():
                self.join()

    def _hand_over(self) -> bool:
        """Hand over the state of leavers. Return False if there is no complete next round yet, so
        that the group is not left.
        """
        old = self._group
        if old is None or old.broken or not (self.live and self._policy.sharded):
            return True
        try:
            with library_collectives():
                return self._policy.hand_over(
                    old, lambda generation: self._next_round(old, generation)
                )
        except RuntimeError as error:
            if not is_peer_loss(error):
                raise
            self.give_up()
            self.change_due = False
            return True

    def _next_round(self, old: Group, awaited: int) -> Invited:
        """Return what this process knows of the rounds after ``old``. Waits for all members of the
        newest one only if that is ``awaited``: another round may be void, and a process that is not
        a member of its successor is not informed of that.
        """
        check_in = self._check_in
        if check_in is None or check_in.place.generation <= old.place.generation:
            return Invited()
        generation, void = check_in.place.generation, False
        if generation == awaited:
            try:
                check_in.store(lambda: old.broken or self._is_void(check_in.place))
            except Interrupted:
                void = True
        ranked = check_in.ranked
        return Invited(generation, (ranked.rank, ranked.size) if check_in.everyone else None, void)

    @property
    def wrapped(self) -> bool:
        """Whether torch itself exchanges the gradients."""
        return bool(self.parallels) or self._policy.sharded

    def join(self) -> None:
        """Enter the next round, in as many attempts as needed.

        Raises UnfitModel, StateError or SnapshotError, and under torchrun what the collectives
        raise.
        """
        report.flush()
        self._joining = True
        # A change allocates many objects, which would start a full garbage collection: 0.2 s of a
        # change.
        gc_was_enabled = gc.isenabled()
        gc.disable()
        try:
            self._join()
        finally:
            if gc_was_enabled:
                gc.enable()
        self.changes, self._joining = self.changes + 1, False
        self._changed()

    def _join(self) -> None:
        old = self._group
        generation = old.place.generation if old is not None else 0
        while True:
            place = self._next_place(generation)
            generation = place.generation
            try:
                with library_collectives():
                    self._enter(place, old)
                break
            except Exception as error:
                if not self.live or not is_peer_loss(error):
                    raise
                if self._group is not None:
                    self._group.broken = True
                    self._group.leave()
                self._report_loss(place.generation)
        if old is not None:
            old.close()

    def _next_place(self, generation: int) -> Place:
        """Return the place of this process in the round after ``generation``. If it is not in that
        round, it waits, and is ended unless a later one has it.
        """
        newest = self._link.newest()
        if newest is not None and newest.generation > generation:
            return self._link.wait_round(generation)
        drain.flush()
        tracking.flush_rows()
        if self._group is None or self._group.broken:  # its state may be needed
            return self._link.wait_round(generation)
        with tracking.finish_wandb_on_sigterm():
            return self._link.wait_round(generation)

    def _enter(self, place: Place, old: Group | None) -> None:
        marks = [time.time()]
        store = check_in = None
        if self.live:
            check_in = self._check_in
            assert check_in is not None
            if check_in.place != place:
                raise Interrupted("This round is void; a newer one has just come.")
            if self._policy.joins:
                check_in.rehearse(self._policy.rehearse_at, lambda: self._is_void(place))
            store = check_in.store(lambda: self._is_void(place))
        if old is not None:
            old.leave()
        marks.append(time.time())
        joins = not self.training.has_state
        policy, cuda = self._policy, self.training.device.type == "cuda"
        ranked = place if check_in is None else check_in.ranked
        self._store = store
        exchange = -1 if check_in is None else check_in.exchange
        self._group = group = Group(ranked, store, cuda, policy.backend, policy.sharded, exchange)
        if self._is_void(place):
            raise Interrupted("This round is void; a newer one follows.")
        report.entered(place.generation, place.rank, place.size)
        marks.append(time.time())
        reached(FaultPoint.WORKER_SHARES)
        policy.share(group)
        reached(FaultPoint.WORKER_SHARED)
        self.training.copies_epoch_ends = self.live and group.several and not policy.sharded
        if joins and self.training.between_epochs:
            # The other ranks have lost a peer in this code. They continue with it, but this process
            # has not run the steps that come before it.
            self.start_again(
                "The others are in the code after the steps of an epoch; this process joins them "
                "when the next epoch begins."
            )
        marks.append(time.time())
        sampler = self.training.sampler
        if sampler is not None:
            sampler.resize(ranked.rank, ranked.size)
        for parallel in self.parallels:
            parallel.rebuild(group)
        if self.live:
            _write_to_log_of(place)
        marks.append(time.time())
        self.parts = dict(zip(PARTS, (b - a for a, b in itertools.pairwise(marks)), strict=True))
        for name, at in (("switch", marks[0]), ("restoring", marks[2]), ("restored", marks[3])):
            report.mark(name, at)
        self._link.say("running", place.generation)
        reached(FaultPoint.WORKER_ENTERED)

    def end_epoch_together(self) -> None:
        """Wait, after the code that follows the steps of an epoch, until all ranks have run it. If
        a peer is lost before, its part of that code may not have run: then the last step of the
        epoch is made again, and that code runs again on all ranks
        (:func:`malletrain.elastic.state_policy.reopens_epoch`).
        """
        if not self.live or not self.group.several or self._policy.sharded:
            return
        drain.flush()  # what a lost process had in buffers is not written again
        try:
            self.group.begin_step(False, False)
            self.group.end_step()
        except RuntimeError as error:
            if not is_peer_loss(error):
                raise
            self.training.epoch_run = True
            self.give_up()
            self.settle()

    def leave_together(self) -> None:
        """Wait at the end of the script until all ranks have reached it. A rank that exited first
        would look lost to peers that have not read the data of the last step yet. If a peer is lost
        before it reaches the end of its script, this process starts again: otherwise the job would
        be completed without the results that the peer was writing.
        """
        while self.live and self._group is not None and self._group.several:
            group, saves = self._group, False
            self.stepping, self.change_due = True, False  # this collective may be aborted
            try:
                self._note_end()
                group.begin_step(False, False)
                saves = group.end_step().save  # some rank alone has called run.save()
                if saves:
                    with library_collectives():
                        self.training.save()
                break
            except RuntimeError as error:
                if not is_peer_loss(error):
                    raise
                if saves or not self._all_have_ended():
                    self.start_again(
                        "A peer was lost before it came to the end of its script, so that it has "
                        "not written all of its results. This process starts again: the training "
                        "continues from the last snapshot, and the code after it runs again."
                    )
                self.stepping = False
                self.give_up()
                self.settle()

    def _note_end(self) -> None:
        """Record that the script has ended on this rank, for the case that this process is lost."""
        drain.flush()
        if self._store is not None:
            self._store.add("ended", 1)

    def _all_have_ended(self) -> bool:
        """Return whether the script is known to have ended on all ranks of the group. The store is
        lost with the node of rank 0; then the result is False.
        """
        try:
            return self._store is not None and self._store.add("ended", 0) == self.group.place.size
        except RuntimeError:
            return False


def _in_collective(thread: int) -> bool:
    """Return whether ``thread`` is in a call of torch.distributed."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 (no public way to see a thread)
    return frame is not None and frame.f_globals.get("__name__", "").startswith("torch.distributed")


def _write_to_log_of(place: Place) -> None:
    """Redirect the output of this process to the log of its rank in this round, where
    ``malletrain logs`` looks for it.
    """
    directory = os.environ.get(env.LOG_DIR)
    if not directory:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    path = os.path.join(directory, rank_log_name(place.generation, place.rank))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
