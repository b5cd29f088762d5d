"""This process in the group, from round to round: told of a new one, checked in, switched over,
lost.

Decides when the group is left and formed anew. The order of things at a change: all members of the
new round check in while the old group trains; all ranks of the old group agree, in a collective
that travels along with every step, that this step is its last; the new group is formed; ranks that
have no state, or are a step behind, get it; training goes on. When a peer is lost whatever is under
way is given up.
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
from malletrain.elastic.invited import Invited
from malletrain.elastic.link import Place, connect
from malletrain.elastic.parallel import Parallel
from malletrain.elastic.state_policy import state_policy
from malletrain.elastic.training import Training
from malletrain.protocol import env
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.log_names import rank_log_name
from malletrain.training import open_files, report

LAST_RESORT_S = 10.0
LAST_RESORT_CODE = 75
"""EX_TEMPFAIL of sysexits.h."""
PARTS = ("leave", "group", "state", "rebuild")
"""Of a change: until the old group is left (after a loss: until the new one is known), formed anew,
state shared, models wrapped again.
"""


class GroupMembership:
    """The rounds of this process. ``changed`` is called after every change of the group, in the
    training thread.
    """

    def __init__(self, training: Training, changed: Callable[[], None]) -> None:
        self.training = training
        self.parallels: list[Parallel] = []
        self.changes = 0
        self.parts: dict[str, float] = {}
        """Seconds of each of PARTS at the last change."""
        self.change_due = False
        """The last step was the last of its group."""
        self.stepping = False
        """A step is under way."""
        self._trainer = threading.get_ident()
        self._policy = state_policy(training)
        self._changed = changed
        self._group: Group | None = None
        self._check_in: CheckIn | None = None
        self._store: RoundStore | None = None
        """Of the group, in live mode."""
        self._aborted: set[int] = set()
        self._joining = False
        self._signature = training.state.signature()
        self._link = connect()
        self._link.on_round = self._round_came
        self._link.on_abort = self._abort_came
        if self.live:
            self._policy.rehearse()
        self._link.start()
        self._link.say("ready")

    @property
    def live(self) -> bool:
        """Whether other rounds can follow."""
        return self._link.live

    @property
    def group(self) -> Group:
        """The group of the newest round that was entered."""
        assert self._group is not None
        return self._group

    @property
    def ready_to_go(self) -> bool:
        """Whether everybody of a newer round has checked in."""
        check_in = self._check_in
        return (
            check_in is not None
            and check_in.everyone
            and check_in.place.generation > self.group.place.generation
        )

    # --- news, in the listening thread ---

    def _round_came(self, place: Place) -> None:
        if self._check_in is not None:
            self._check_in.void = True
        self._check_in = CheckIn(
            place,
            self._signature,
            self.training,
            lambda: self._say_lost(place.generation),
            self._policy.holding(),
            self._policy.order,
            lambda: self._policy.joins,
        )

    def _abort_came(self, generation: int) -> None:
        self._aborted.add(generation)
        group = self._group
        if group is not None and group.place.generation == generation:
            group.abort()
            self._watch_for_hang()

    def _watch_for_hang(self) -> None:
        timer = threading.Timer(LAST_RESORT_S, self._last_resort, (self.changes,))
        timer.daemon = True
        timer.start()

    def _last_resort(self, changes: int) -> None:
        """The training thread waits for something that cannot be given up: better to be started
        again than to hang. Code between two steps, such as an evaluation, may take its time, unless
        it is in a collective.
        """
        if self.changes != changes or self.change_due or self._joining:
            return
        if not self.stepping and not _in_collective(self._trainer):
            self._watch_for_hang()
        else:
            start_again(
                f"The step could not be given up within {LAST_RESORT_S:g} s after a peer was "
                "lost; this process starts again. Collectives "
                "of the script's own cannot be given up: use as few as possible."
            )

    def _void(self, place: Place) -> bool:
        newest = self._link.newest()
        return place.generation in self._aborted or (
            newest is not None and newest.generation > place.generation
        )

    def _say_lost(self, generation: int) -> None:
        """Whoever has state and cannot go on with the group says so: if nobody was lost, nothing
        else would bring a new round.
        """
        if self.training.has_state:
            self._link.say("lost", generation)

    # --- changes, in the training thread ---

    def give_up(self) -> None:
        """The group is broken: have the peers notice too, and change it before the next step."""
        group = self.group
        group.broken = self.change_due = True
        group.abort()
        self._say_lost(group.place.generation)

    def settle(self) -> None:
        """Change the group, if the last step was the last of the one before; a process that is to
        leave waits here for its end.
        """
        if self.change_due:
            self.change_due = False
            if self._may_leave():
                self.join()

    def _may_leave(self) -> bool:
        """Have those that stay hold what leavers have; False when there is no next round yet, after
        all.
        """
        old = self._group
        if old is None or old.broken or not (self.live and self._policy.sharded):
            return True
        try:
            with library_collectives():
                return self._policy.hand_over(
                    old, lambda generation: self._invited(old, generation)
                )
        except RuntimeError as error:
            if not is_peer_loss(error):
                raise
            self.give_up()
            self.change_due = False
            return True

    def _invited(self, old: Group, awaited: int) -> Invited:
        """What is known of the rounds after ``old``. Waits for everyone to be there only where the
        newest of them is ``awaited``: another may have come to nothing, and who is not a member of
        its successor does not hear of that.
        """
        check_in = self._check_in
        if check_in is None or check_in.place.generation <= old.place.generation:
            return Invited()
        generation, void = check_in.place.generation, False
        if generation == awaited:
            try:
                check_in.store(lambda: old.broken or self._void(check_in.place))
            except Interrupted:
                void = True
        ranked = check_in.ranked
        return Invited(generation, (ranked.rank, ranked.size) if check_in.everyone else None, void)

    @property
    def wrapped(self) -> bool:
        """Whether gradients are exchanged by torch itself."""
        return bool(self.parallels) or self._policy.sharded

    def join(self) -> None:
        """Become part of the next round, however many attempts that takes.

        Raises UnfitModel, StateError or SnapshotError, and under torchrun what the collectives
        raise.
        """
        report.flush()
        self._joining = True
        # Many objects are made at once here, which has the interpreter look for circles among all
        # that there are: 0.2 s of a change.
        collects = gc.isenabled()
        gc.disable()
        try:
            self._join()
        finally:
            if collects:
                gc.enable()
        self.changes, self._joining = self.changes + 1, False
        self._changed()

    def _join(self) -> None:
        old = self._group
        tried = old.place.generation if old is not None else 0
        newest = self._link.newest()
        if newest is None or newest.generation <= tried:
            open_files.flush()  # this process may be ended while it waits
        while True:
            place = self._link.wait_round(tried)
            tried = place.generation
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
                self._say_lost(place.generation)
        if old is not None:
            old.close()

    def _enter(self, place: Place, old: Group | None) -> None:
        marks = [time.time()]
        store = check_in = None
        if self.live:
            check_in = self._check_in
            assert check_in is not None
            if check_in.place != place:
                raise Interrupted("This round is void; a newer one has just come.")
            if self._policy.joins:
                check_in.rehearse(self._policy.rehearse_at, lambda: self._void(place))
            store = check_in.store(lambda: self._void(place))
        if old is not None:
            old.leave()
        marks.append(time.time())
        joins = not self.training.has_state
        policy, cuda = self._policy, self.training.device.type == "cuda"
        ranked = place if check_in is None else check_in.ranked
        self._store = store
        self._group = group = Group(ranked, store, cuda, policy.backend, policy.sharded)
        if self._void(place):
            raise Interrupted("This round is void; a newer one follows.")
        report.entered(place.generation, place.rank, place.size)
        marks.append(time.time())
        reached(FaultPoint.WORKER_SHARES)
        policy.share(group)
        reached(FaultPoint.WORKER_SHARED)
        if joins and self.training.between_epochs:
            # They have lost a peer there. They go on with code of which this process has not run
            # the steps.
            start_again(
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

    def leave_together(self) -> None:
        """At the end of the script, wait for the end of it on all ranks: whoever went first would
        look like a loss to those that have not read the last step yet. Where a peer is lost before
        the end of its script, this process does not end well: what that peer was writing would be
        missing from a job that is completed.
        """
        while self.live and self._group is not None and self._group.several:
            group, saves = self._group, False
            self.stepping, self.change_due = True, False  # it may be given up
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
                    start_again(
                        "A peer was lost before it came to the end of its script, so that it has "
                        "not written all of its results. This process starts again: the training "
                        "goes on from the last snapshot, and the code after it runs once more."
                    )
                self.stepping = False
                self.give_up()
                self.settle()

    def _note_end(self) -> None:
        """Have the others know that the script has ended here, should this process be lost."""
        open_files.flush()
        if self._store is not None:
            self._store.add("ended", 1)

    def _all_have_ended(self) -> bool:
        """Whether the script has ended on all ranks of the group, as far as can be known: the store
        is lost with the node of rank 0.
        """
        try:
            return self._store is not None and self._store.add("ended", 0) == self.group.place.size
        except RuntimeError:
            return False


def _in_collective(thread: int) -> bool:
    """Whether ``thread`` is in a call of torch.distributed."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 (the one way to see a thread)
    return frame is not None and frame.f_globals.get("__name__", "").startswith("torch.distributed")


def start_again(sentence: str) -> NoReturn:
    """End this process, whose state is of no use to the others; it is started again and gets
    theirs. ``sentence``: why, for the log.
    """
    report.tell(sentence)
    report.flush()
    open_files.flush()
    os._exit(LAST_RESORT_CODE)


def _write_to_log_of(place: Place) -> None:
    """From now on this process's output belongs to the log of its rank in this round, where
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
