"""The interface of live mode to the training script: the class :class:`Run`.

Decides how a script is written: what it passes in, how it loops, what it can query.
:func:`lr_linear` and :func:`lr_sqrt` are hooks for a global batch that changes with the scale; with
a fixed one (``ElasticSampler(global_batch_size=...)``, which is recommended) neither is needed.
:mod:`malletrain.elastic.membership` decides how the group changes, :mod:`malletrain.elastic.step`
when a step counts.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from malletrain.elastic.errors import ElasticError
from malletrain.elastic.group import library_collectives
from malletrain.elastic.membership import GroupMembership
from malletrain.elastic.parallel import Parallel, average_gradients
from malletrain.elastic.sharded.setup import Shards, sharded_training
from malletrain.elastic.sharded.training import ShardedTraining
from malletrain.elastic.state import keep_freed
from malletrain.elastic.step import Step, Steps
from malletrain.elastic.trained_objects import check_model
from malletrain.elastic.training import Training
from malletrain.protocol import env
from malletrain.training import report
from malletrain.training.sampler import ElasticSampler
from malletrain.training.step_times import waits_counted


class Run:
    """The state of a training script and its current round. The constructor waits for the first
    round and for the state.

    Args:
        snapshot: path of a snapshot file in a directory that all nodes share. A suspended job, or
            one that lost all its nodes, continues from it; without a snapshot such a job starts
            from the beginning. It is written in the background. True: the default path of the job
            (:class:`malletrain.Snapshot`).
        snapshot_every_s: seconds between snapshots.
        device: device on which the script trains; by default the GPU of this process if there is
            one, else the CPU.
        warmup: called once before this process is ready, while the other ranks still train: a
            forward and backward pass that warms up the device or compiles the model. Its effects on
            gradients, buffers and random numbers are undone. It must not call ``optimizer.step()``.
            Not for sharded models.
        build: for a sharded model: returns the model with its initial values. It is called on
            ``meta`` for every group, and once for the initial values.
        parallelize: for a sharded model: ``parallelize(model, mesh)`` applies ``fully_shard`` to
            parts of the model and to the model. The mesh has one dimension; with ``shard="node"``
            it has two, replicas and shards. The run chooses their names. One rank also calls it for
            rehearsals, while the other ranks train.
        shard: ranks over which the model is sharded: ``"all"``, or those of a ``"node"`` (HSDP).
        replicate_every: with ``shard="all"``: steps between copies of each rank's shards to the
            memory of the next node. After a loss the run continues from these copies. 0 for none.
        objects: the state, by name: modules, optimizers, schedulers, GradScaler, ElasticSampler,
            any object with ``state_dict()`` and ``load_state_dict()``, or a plain dict of numbers,
            texts and tensors. With a sharded model, ``optimizer`` is a function of the model that
            returns the optimizer, and ``scheduler``, if any, a function of the optimizer.

    Raises:
        TypeError: the arguments do not fit together, or the state of an object cannot be read.
        ElasticError: the model here differs from that of the peers.
        SnapshotError: snapshots exist, and none of them can be read.
    """

    def __init__(
        self,
        *,
        snapshot: str | os.PathLike[str] | bool | None = None,
        snapshot_every_s: float = 60.0,
        device: torch.device | str | None = None,
        warmup: Callable[[], None] | None = None,
        build: Callable[[], torch.nn.Module] | None = None,
        parallelize: Callable[[torch.nn.Module, Any], Any] | None = None,
        shard: str = "all",
        replicate_every: int = 0,
        **objects: Any,
    ) -> None:
        if not objects:
            raise TypeError(
                "elastic.Run: no state; pass objects by name, e.g. elastic.Run(model=model, "
                "optimizer=optimizer)."
            )
        if os.environ.get(env.LIVE):
            keep_freed()
        self.device = torch.device(device) if device is not None else _own_device()
        if build is None and parallelize is None:
            self._training = Training(objects, self.device, snapshot, snapshot_every_s)
        else:
            self._training = sharded_training(
                Shards(build, parallelize, shard, replicate_every),
                objects,
                self.device,
                snapshot,
                snapshot_every_s,
                warmup,
            )
        if warmup is not None:
            self._training.rehearse(warmup)
        self._hooks: list[Callable[[Run], None]] = []
        self._crashed = False
        self._watch_the_end()
        self.membership = GroupMembership(self._training, self._call_hooks)
        self._steps = Steps(self.membership)
        if isinstance(self._training, ShardedTraining):
            self._training.model.used = self._steps.note_exchange
        self.membership.join()

    # --- queries ---

    @property
    def rank(self) -> int:
        """Rank of this process in the round, from 0."""
        return self.membership.group.place.rank

    @property
    def world_size(self) -> int:
        """Number of processes in the round."""
        return self.membership.group.place.size

    @property
    def generation(self) -> int:
        """Number of the round. It increases with every change of the group."""
        return self.membership.group.place.generation

    @property
    def steps_done(self) -> int:
        """Number of steps of the whole run that count. It is equal on all ranks between steps."""
        return self._training.steps

    @property
    def samples_done(self) -> int:
        """Number of samples of those steps, over all ranks."""
        return self._training.samples

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to end the training loop (:meth:`request_stop`)."""
        return self._steps.stopping

    @property
    def model(self) -> torch.nn.Module:
        """The sharded model that ``build`` and ``parallelize`` made. It is the same object after a
        change of the group; its ``parameters()`` are those of the current group.
        """
        return self._sharded("model").model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the sharded model."""
        return self._sharded("optimizer").optimizer

    @property
    def scheduler(self) -> Any:
        """The learning rate scheduler of a run with a sharded model."""
        return self._sharded("scheduler").others["scheduler"]

    @property
    def _sharded_model(self) -> bool:
        return isinstance(self._training, ShardedTraining)

    def _sharded(self, name: str) -> ShardedTraining:
        if not isinstance(self._training, ShardedTraining):
            raise ElasticError(
                f"run.{name} is that of a sharded model: pass build and parallelize to elastic.Run."
            )
        return self._training

    @property
    def sampler(self) -> ElasticSampler | None:
        """The run's sampler; None if it has none."""
        return self._training.sampler

    @property
    def global_batch(self) -> int:
        """Number of samples of a full step over all ranks, from the sampler."""
        if self.sampler is None:
            raise ElasticError(
                "run.global_batch is the sampler's: pass an ElasticSampler to elastic.Run."
            )
        return self.sampler.global_batch_size

    @property
    def loss_weight(self) -> float:
        """Factor for a mean loss. With it, the averaged gradient is the exact mean over the global
        batch and over all micro-batches of a step, even if ranks have different numbers of samples.
        """
        return self._steps.now.weight() if self._steps.now is not None else 1.0

    @property
    def change_bytes(self) -> int:
        """Bytes of sharded state that this process received at the last change."""
        return self._sharded("change_bytes").moved_bytes

    @property
    def change_parts(self) -> dict[str, float]:
        """Duration of the last change of the group on this rank, seconds, by part
        (:data:`malletrain.elastic.membership.PARTS`).
        """
        return dict(self.membership.parts)

    def ddp(self, module: torch.nn.Module, **options: Any) -> Parallel:
        """Return ``module`` wrapped for all ranks. It replaces ``DistributedDataParallel(module)``
        in the script. ``options``: options of that class.
        """
        check_model(self._training, module, "run.ddp(model)")
        parallel = Parallel(module, self._steps.note_exchange, options)
        self.membership.parallels.append(parallel)
        parallel.rebuild(self.membership.group)
        return parallel

    def average_gradients(self, module: torch.nn.Module) -> None:
        """Average the gradients of ``module`` over all ranks, for scripts that cannot use
        :meth:`ddp`.
        """
        self._steps.note_exchange()
        average_gradients(self.membership.group, module)

    def on_change(self, hook: Callable[[Run], None]) -> Callable[[Run], None]:
        """Call ``hook(run)`` now and after every change of the group (learning rates:
        :func:`lr_linear`, :func:`lr_sqrt`).
        """
        self._hooks.append(hook)
        hook(self)
        return hook

    def _call_hooks(self) -> None:
        for hook in self._hooks:
            hook(self)

    # --- loops ---

    def step(self, samples: int | None = None) -> Step:
        """Return a context manager for one training step: ``with run.step():`` encloses all code
        from ``zero_grad()`` to ``optimizer.step()``.

        Args:
            samples: number of samples of this process in the step; needed only without an
                ElasticSampler.
        """
        return Step(self._steps, samples)

    def batches(self, loader: Iterable[Any], accumulate: int = 1) -> Iterator[Any]:
        """Yield the remaining batches of the current epoch.

        Train on every batch inside ``with run.step():``. With ``accumulate`` > 1 each item is a
        list of batches; iterate over it with ``step.micro(batches)``. After a change of the group,
        a new iteration of the loader starts at the position of the sampler, so that every sample is
        used once.

        Args:
            loader: a DataLoader whose ``batch_sampler`` is the run's sampler.
            accumulate: maximum number of batches per step.

        Raises:
            ElasticError: the run has no sampler, or the script did not train on a batch inside a
                step.
        """
        sampler, steps, membership = self.sampler, self._steps, self.membership
        if sampler is None:
            raise ElasticError(
                "run.batches() needs the position in the data: pass an ElasticSampler to "
                "elastic.Run, or use run.steps(n)."
            )
        if accumulate < 1:
            raise ElasticError(f"run.batches(): accumulate must be 1 or more, not {accumulate}.")
        if sampler.left_early:
            sampler.resume_epoch()
        sampler.close_epoch()  # for a script that loops without sampler.epochs()
        sampler.begin_batches()
        steps.loop_goes_on()
        membership.settle()
        finished = False
        # After a loss a sharded run may go back into the previous epoch. This loop then repeats the
        # steps of that epoch, and the code after the loop runs when they are done.
        while not (finished or sampler.between_epochs or self.stopping):
            changes, finished = membership.changes, True
            size = sampler.global_batch_size
            items = waits_counted(self._iterate(sampler, loader))
            while batches := list(islice(items, accumulate)):
                steps.planned = sampler.upcoming(len(batches))
                attempts = steps.attempts
                try:
                    yield batches[0] if accumulate == 1 else batches
                except GeneratorExit:  # break
                    if steps.attempts != attempts and not membership.group.broken:
                        steps.epoch_left()
                    raise
                if steps.attempts == attempts:
                    raise ElasticError(
                        "A batch was taken from run.batches() but not trained on inside `with "
                        "run.step():`."
                    )
                steps.loop_goes_on()
                # Between epochs the group changes only after a loss; otherwise it changes when the
                # next epoch begins.
                if not self.stopping and (membership.group.broken or not sampler.between_epochs):
                    membership.settle()
                if (
                    membership.changes != changes
                    or sampler.global_batch_size != size
                    or sampler.between_epochs
                    or self.stopping
                ):
                    finished = False
                    break
        if self.stopping:
            sampler.end()

    def _iterate(self, sampler: ElasticSampler, loader: Iterable[Any]) -> Iterator[Any]:
        """Start to iterate ``loader``. A DataLoader then draws a number from torch's generator. It
        must do so once per epoch: if the first step is repeated, the generator is reset.
        """
        training, random = self._training, torch.get_rng_state()
        items = iter(loader)
        if not sampler.position:
            if training.iterated_epoch == sampler.epoch:
                torch.set_rng_state(random)
            training.iterated_epoch = sampler.epoch
        return items

    def steps(self, total: int) -> Iterator[int]:
        """Yield the numbers of the remaining steps, for loops without an ElasticSampler. ``total``
        is the number of steps of the whole run, including those that were done before.
        """
        self.membership.settle()
        while self.steps_done < total and not self.stopping:
            attempts = self._steps.attempts
            yield self.steps_done
            if self._steps.attempts == attempts:
                raise ElasticError(
                    "run.steps() continues when a step is done: write the loop's body inside "
                    "`with run.step(samples=n):`."
                )
            self._steps.loop_goes_on()
            if not self.stopping:
                self.membership.settle()
        report.training_over()

    def request_stop(self) -> None:
        """End the training loops (:meth:`batches` and ``sampler.epochs()``, :meth:`steps`) on all
        ranks after the same step. Any rank can call it, inside or between steps.
        """
        self._steps.stop_requested = True

    def save(self) -> bool:
        """Write the snapshot now, and wait for it. Return whether this process wrote it.

        With a sharded model all ranks write together. If the other ranks are in a step, because
        this process has just joined and is at the top of the script, nothing is written now, and
        all ranks write when that step is done.
        """
        if self._sharded_model and not self._steps.all_call(save=True):
            self._steps.save_requested = True
            return False
        with library_collectives():
            return self._training.save()

    def digest(self) -> str:
        """Return a hash of the whole state. It is equal on all ranks between steps. With a sharded
        model all ranks must call it together.

        Raises:
            ElasticError: the model is sharded, and the other ranks do not make this call.
        """
        if self._sharded_model and not self._steps.all_call(digest=True):
            raise ElasticError(
                "run.digest() of a sharded model takes all ranks, and others are elsewhere in the "
                "script: call it on all of them after the training loop. Before it a process that "
                "joins a running training is alone."
            )
        with library_collectives():
            return self._training.digest()

    # --- the end ---

    def _watch_the_end(self) -> None:
        before = sys.excepthook

        def crashed(*args: Any) -> None:
            self._crashed = True
            before(*args)

        sys.excepthook = crashed
        atexit.register(self._finish)

    def _finish(self) -> None:
        if self._training.snapshot is not None:
            self._training.snapshot.wait()
        if not self._crashed:
            self.membership.leave_together()
            if self._training.snapshot is not None:
                self._training.snapshot.close_epoch_at_exit()
        report.flush()


def _own_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device(
            "cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        )
    return torch.device("cpu")


Rule = Callable[[Any], None]


def lr_linear(optimizer: Any, base_batch: int) -> Rule:
    """Return a hook for :meth:`Run.on_change`: learning rate ∝ global batch (Goyal et al. 2017,
    section 2.1).

    Args:
        optimizer: a torch optimizer. The rates of its parameter groups keep their ratios.
        base_batch: global batch size for which the script's learning rate is meant.
    """
    return _rule(optimizer, base_batch, lambda ratio: ratio)


def lr_sqrt(optimizer: Any, base_batch: int) -> Rule:
    """As :func:`lr_linear`, with the square root of the ratio; for Adam (Malladi et al. 2022)."""
    return _rule(optimizer, base_batch, math.sqrt)


def _rule(optimizer: Any, base_batch: int, law: Callable[[float], float]) -> Rule:
    if base_batch < 1:
        raise ValueError(
            "base_batch is the global batch size the learning rate is meant for, from 1, not "
            f"{base_batch}."
        )

    def change(run: Any) -> None:
        new_factor = law(run.global_batch / base_batch)
        for group in optimizer.param_groups:
            # Only the ratio of the new factor to the old one is applied, so that changes by a
            # scheduler in between are kept.
            factor = new_factor / group.get("malletrain_lr_factor", 1.0)
            group["lr"] *= factor
            if "initial_lr" in group:  # most schedulers compute the rate from it
                group["initial_lr"] *= factor
            group["malletrain_lr_factor"] = new_factor

    return change
