"""One training step: begun, counted or discarded.

Decides whether a step counts on this process: it does once it ends without an error, or once the
optimizer has made the only update that such a step makes. Whether it counts for all ranks is
settled when the group changes (:mod:`malletrain.elastic.state_policy`).

A step whose update a GradScaler has skipped, because gradients overflowed, counts like one with an
update: the scaler has changed its scale, and cannot undo that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch

from malletrain.elastic import same_on_all
from malletrain.elastic.errors import ElasticError, Interrupted, is_peer_loss
from malletrain.elastic.group import library_collectives
from malletrain.elastic.membership import GroupMembership
from malletrain.elastic.step_exchange import StepWishes
from malletrain.elastic.trained_objects import Optimizers
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.training import report


class Steps:
    """The steps of a run: the current one, and what all ranks are asked at the next."""

    def __init__(self, membership: GroupMembership) -> None:
        self.membership = membership
        self.training = membership.training
        self.now: Step | None = None
        """The current step; None between steps."""
        self.attempts = 0
        """Number of steps begun, including those that were discarded."""
        self.planned: list[tuple[int, int]] = []
        """(samples of this process, samples of all ranks) of each batch that the loop has and has
        not trained on yet.
        """
        self.stop_requested = False
        """This rank asks to end the loop."""
        self.stopping = False
        """All ranks have agreed to end the loop."""
        self.save_requested = False
        """This rank asks that all ranks save at the end of the next step."""
        self.exchanged = False
        """The group has exchanged gradients of the current step."""
        self.rate = same_on_all.UNKNOWN
        """Learning rates of the current or last update in this group
        (:func:`malletrain.elastic.same_on_all.rate_of`).
        """
        self._changed = same_on_all.ChangedObjects(*self.training.compared_objects())
        self._sound_exchanges = 0
        """Number of exchanges that were complete and successful at the last update."""
        self._changes = membership.changes
        self._save_at_close = False
        """All ranks have agreed to save when the epoch is over."""
        self._ended: bool | None = None
        """Whether all ranks have agreed to save after the last step; None if nothing is due."""
        if self.training.sampler is not None:
            self.training.sampler.on_epoch_closed(self._epoch_closed)
            self.training.sampler.before_epoch_closes(membership.end_epoch_together)
            self.training.sampler.change_size_at_steps(lambda: bool(self.planned))
        self._optimizers = Optimizers(self.training)
        for optimizer in self.training.optimizers:
            optimizer.register_step_pre_hook(self._before_update)
            optimizer.register_step_post_hook(self._after_update)
        for scaler in self.training.scalers:
            self._watch_scale(scaler)

    def note_exchange(self) -> None:
        """Record that the group is about to exchange gradients."""
        self.exchanged = True
        self.membership.group.exchanges += 1
        if self.now is not None and self.now.updates and torch.is_grad_enabled():
            self.training.another_update()

    def begin(self, step: Step) -> None:
        """Begin ``step``, and start the collective in which ranks ask each other once per step."""
        membership = self.membership
        self.now, self.exchanged, membership.stepping = step, False, True
        self.attempts += 1
        self.training.begin_step(len(self.planned))
        rate, self.rate = self.rate, same_on_all.UNKNOWN
        if membership.changes != self._changes:
            rate, self._changes = same_on_all.UNKNOWN, membership.changes
            self._changed.forget()
        sampler = self.training.sampler
        membership.group.begin_step(
            membership.ready_to_go,
            self.stop_requested,
            self.save_requested,
            rate,
            sampler.requested_batch_size if sampler is not None else None,
            self._changed.since_last(),
        )

    def check_changed(self) -> None:
        """Tell the user about objects that only some ranks have changed before this step. Raises
        ElasticError if these are modules.
        """
        most, least = self.membership.group.changed
        if most == least or same_on_all.UNKNOWN in (most, least):
            return
        modules, dicts = self._changed.names(most, least)
        if modules:
            raise ElasticError(same_on_all.module_error(modules))
        if dicts and self.membership.group.place.rank == 0:
            report.tell(same_on_all.dict_notice(dicts), once="dict of some ranks")

    def forget_changed(self) -> None:
        """Compare nothing with the time before this step, which is discarded."""
        self._changed.forget()

    def all_call(self, *, save: bool = False, digest: bool = False) -> bool:
        """Return whether all ranks make this call now, so that they can save or hash together. A
        joiner starts at the top of the script, which the other ranks have passed.

        Args:
            save: whether this call saves a snapshot.
            digest: whether this call computes a digest.
        """
        membership = self.membership
        if self.now is not None or not membership.group.several:
            return True
        wishes = StepWishes(membership.ready_to_go, self.stop_requested, save, digest)
        try:
            return membership.group.meet(wishes)
        except RuntimeError as error:
            if not (membership.live and is_peer_loss(error)):
                raise
            membership.give_up()
            return False

    def step_done(self, save: bool) -> None:
        """Note a step that counts. The snapshots that are due after it are taken when the loop goes
        on (:meth:`loop_goes_on`); at the end of an epoch, once the code after its steps has run.
        ``save``: all ranks have agreed to save.
        """
        if self.training.between_epochs:
            self._save_at_close = save
            report.between_epochs(True)
        else:
            self._ended = save

    def loop_goes_on(self) -> None:
        """Take the snapshots that are due after the last step, because the loop asks for the next
        one. A loop that is left by ``break`` does not: a run that resumed from before the ``break``
        would make one more step.
        """
        save, self._ended = self._ended, None
        if save is not None and not self.membership.change_due:
            self._save_snapshots(save)

    def epoch_left(self) -> None:
        """Note that the loop has left the batches of an epoch after the last step."""
        sampler = self.training.sampler
        if sampler is None or sampler.between_epochs:
            return
        sampler.leave_early()
        if sampler.left_early and self._ended is not None:
            self._save_at_close, self._ended = self._ended, None
            report.between_epochs(True)

    def _epoch_closed(self) -> None:
        self.training.epoch_closed()
        report.between_epochs(False)
        save, self._save_at_close = self._save_at_close, False
        if not self.membership.change_due:
            self._save_snapshots(save)

    def _save_snapshots(self, save: bool) -> None:
        try:
            with library_collectives():
                self.training.snapshot_step()
                if save:
                    self.training.save()
                    self.save_requested = False
        except RuntimeError as late:
            if not (self.membership.live and is_peer_loss(late)):
                raise
            self.membership.give_up()

    def _before_update(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.training.catching_up:
            return None
        if self.now is None:
            raise ElasticError("optimizer.step() was called outside of `with run.step():`.")
        self._optimizers.check(optimizer)
        self.rate = same_on_all.rate_of(optimizer, max(self.rate, 0.0))
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            if not self.now.updates:
                self.training.undo.before_update()
            self._check_gradients("optimizer.step()")
            return None
        self.training.before_closure(optimizer)
        return (args[0],), {**kwargs, "closure": self._over_all_ranks(closure)}

    def _watch_scale(self, scaler: Any) -> None:
        """Check the gradients before each ``scaler.update()``, as before an optimizer's update."""
        update = scaler.update

        @functools.wraps(update)
        def checked_update(*args: Any, **kwargs: Any) -> None:
            if self.now is not None and not self.training.catching_up:
                self._check_gradients("scaler.update()")
            update(*args, **kwargs)
            if self.now is not None:
                self.now.scaled = True

        scaler.update = checked_update

    def _over_all_ranks(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that returns the mean loss of all ranks. Optimizers choose their next
        action by the loss, and must choose the same on all ranks.
        """

        def closure_over_all_ranks() -> Any:
            self.exchanged = False
            loss = closure()
            self._check_gradients("optimizer.step(closure)")
            return loss if loss is None else self.membership.group.mean(loss)

        return closure_over_all_ranks

    def _check_gradients(self, call: str) -> None:
        """Raise ElasticError if gradients were not averaged over the ranks, and Interrupted if a
        peer is lost.
        """
        assert self.now is not None
        group = self.membership.group
        if group.several and not self.exchanged:
            raise ElasticError(
                f"{call} without averaged gradients: call the model as `net = run.ddp(model)`, "
                "`net(x)`, or call run.average_gradients(model) after backward()."
            )
        on_cuda = self.training.device.type == "cuda"
        unseen = on_cuda and self.membership.wrapped  # exchanges during a backward pass
        if self.now.updates and group.exchanges == self._sound_exchanges and not unseen:
            # Nothing was exchanged since the last update, so no exchange can have failed: a step
            # that has begun to change the model makes all its updates.
            return
        if on_cuda and group.several:
            # NCCL reports a loss only after its kernels have ended, and the optimizer must not use
            # gradients of a failed exchange.
            torch.cuda.current_stream(self.training.device).synchronize()
        if group.broken:
            raise Interrupted("A peer is lost.")
        self.training.before_update(group)

    def _after_update(self, *_: Any) -> None:
        self.training.updates += 1
        self._sound_exchanges = self.membership.group.exchanges
        if self.now is not None:
            self.now.updates += 1


class Step:
    """One training step, a context manager. Its body goes from the first batch to
    ``optimizer.step()``. When the body ends, the step counts.

    ``aborted`` is true after a step that was discarded because a peer was lost; the loop continues
    and repeats the step. The group changes between two steps, when the loop asks for the next one.
    ``rank``, ``world_size`` and ``generation`` are those of the group of this step.
    """

    def __init__(self, steps: Steps, samples: int | None) -> None:
        self._steps = steps
        self._samples = samples
        self._micro: int | None = None
        self._read_group()
        self.aborted = False
        self.updates = 0
        self.scaled = False
        """A GradScaler has set its scale for the next step."""

    def _read_group(self) -> None:
        place, planned = self._steps.membership.group.place, self._steps.planned
        self.rank, self.world_size, self.generation = place.rank, place.size, place.generation
        self.planned = planned
        self.samples = (
            self._samples
            if self._samples is not None
            else sum(own_samples for own_samples, _ in planned)
        )
        self.global_samples = (
            sum(all_samples for _, all_samples in planned) or self.samples * self.world_size
        )

    def micro(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the micro-batches of this step. Gradients are exchanged only with the last one."""
        batches = list(batches)
        for self._micro, batch in enumerate(batches):
            with contextlib.ExitStack() as stack:
                if self._micro + 1 < len(batches):
                    for parallel in self._steps.membership.parallels:
                        stack.enter_context(parallel.no_sync())
                yield batch

    def weight(self) -> float:
        """See :attr:`malletrain.elastic.Run.loss_weight`."""
        if not self.planned:
            return 1.0
        own_samples = (
            self.planned[self._micro or 0][0] if len(self.planned) > 1 else self.planned[0][0]
        )
        return own_samples * self.world_size / self.global_samples

    def __enter__(self) -> Step:
        steps = self._steps
        if steps.now is not None:
            raise ElasticError("run.step() inside another step: a step is one update of the model.")
        membership = steps.membership
        steps.loop_goes_on()
        membership.settle()
        self._read_group()
        steps.begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        steps, membership, training = self._steps, self._steps.membership, self._steps.training
        group = membership.group
        steps.now, steps.planned, membership.stepping = None, [], False
        lost = (
            error is not None
            and membership.live
            and isinstance(error, Exception)
            and (is_peer_loss(error) or group.broken)
        )
        if error is not None and not lost:
            return False
        updated = (self.updates or self.scaled) and (not lost or training.one_update_is_all)
        if updated or (error is None and not group.broken):
            reached(FaultPoint.WORKER_COMMITS)
            training.commit(self.samples, self.global_samples, len(self.planned), torn=lost)
            reached(FaultPoint.WORKER_COMMITTED)
        else:
            self.aborted = True
            steps.forget_changed()
            if not training.discard(self.samples):
                membership.start_again(
                    "A peer was lost in a step that had changed the model already, the first such "
                    "step of this process; it starts again. From the second on the state before "
                    "is copied."
                )
        save = False
        if not lost:
            try:
                answer = group.end_step()
                membership.change_due, steps.stopping, save = answer.go, answer.stop, answer.save
            except RuntimeError as late:
                if not (membership.live and is_peer_loss(late)):
                    raise
                lost = True
        if not lost:
            steps.check_changed()
        if not lost and group.rates_differ:  # before this goes into a snapshot
            raise ElasticError(same_on_all.rates_error(training.optimizers, self.rank))
        if not lost and group.batch_sizes_differ and training.sampler is not None:
            raise ElasticError(
                f"The ranks set different global batch sizes (rank {self.rank}: "
                f"{training.sampler.requested_batch_size}), so that they train on different parts "
                "of the data. Compute the size from what all ranks have in common: run.steps_done, "
                "the epoch, or a dict that you pass to elastic.Run."
            )
        if lost:
            membership.give_up()
        else:
            steps.step_done(save)
        return True
