"""The run of a training script in live mode: what the script calls.

Decides how a script is written: what it hands over, how it loops, what it may ask. How the group
changes is :mod:`malletrain.elastic.membership`'s, when a step counts
:mod:`malletrain.elastic.step`'s.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from malletrain.elastic.belongs import check_model
from malletrain.elastic.errors import ElasticError
from malletrain.elastic.group import library_collectives
from malletrain.elastic.membership import GroupMembership
from malletrain.elastic.parallel import Parallel, average_gradients
from malletrain.elastic.rooms import keep_freed
from malletrain.elastic.sharded.setup import Shards, sharded_training
from malletrain.elastic.sharded.training import ShardedTraining
from malletrain.elastic.step import Step, Steps
from malletrain.elastic.training import Training
from malletrain.protocol import env
from malletrain.training import report
from malletrain.training.sampler import ElasticSampler


class Run:
    """The state of a training script and the round it is in. Waits, when made, for the first round
    and the state that belongs to it.

    Args:
        snapshot: path of a snapshot file in a folder that all nodes share: what a suspended job, or
            one that lost all its nodes, goes on from. Written in the background. True: the job's
            own default path (:class:`malletrain.Snapshot`). Without it such a job begins anew.
        snapshot_every_s: seconds between snapshots.
        device: where the script trains; by default the GPU of this process if there is one, else
            the CPU.
        warmup: called once before this process says that it is ready, while the others still train:
            a forward and backward pass that warms up the device or compiles the model. What it does
            to gradients, buffers and random numbers is undone; it must not call
            ``optimizer.step()``. Not for sharded models.
        build: of a sharded model: makes it, with the numbers that the run begins with. It is called
            on ``meta`` for every group, and once for these numbers.
        parallelize: of a sharded model: ``parallelize(model, mesh)`` applies ``fully_shard`` to its
            parts and to itself. The mesh has one dimension, or replicas and shards with
            ``shard="node"``; its names are the run's own. It is also called for rehearsals, by one
            rank alone, while the others train.
        shard: over what the model is sharded: ``"all"`` ranks, or those of a ``"node"`` (HSDP).
        replicate_every: with ``shard="all"``: steps between copies of each rank's shards in the
            memory of the next node, from which the run goes on after a loss; 0 for none.
        objects: the state, by name: modules, optimizers, schedulers, GradScaler, ElasticSampler,
            anything with ``state_dict()`` and ``load_state_dict()``, or a plain dict of numbers,
            texts and tensors. With a sharded model ``optimizer`` is a function that makes it of the
            model, and ``scheduler``, if any, one that makes it of the optimizer.

    Raises:
        TypeError: for arguments that do not fit each other, or an object whose state cannot be
            taken.
        ElasticError: when the model here differs from the peers'.
        SnapshotError: when snapshots exist and none is good.
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

    # --- what the script asks ---

    @property
    def rank(self) -> int:
        """This process's number in the round, from 0."""
        return self.membership.group.place.rank

    @property
    def world_size(self) -> int:
        """Processes in the round."""
        return self.membership.group.place.size

    @property
    def generation(self) -> int:
        """Number of the round; grows with every change."""
        return self.membership.group.place.generation

    @property
    def steps_done(self) -> int:
        """Steps of the whole run that count, the same on all ranks between steps."""
        return self._training.steps

    @property
    def samples_done(self) -> int:
        """Samples of those steps, over all ranks."""
        return self._training.samples

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to end (:meth:`request_stop`)."""
        return self._steps.stopping

    @property
    def model(self) -> torch.nn.Module:
        """The sharded model that ``build`` and ``parallelize`` made. It stays the same over changes
        of the group; its ``parameters()`` are those of the present group.
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
        """The run's sampler, if it was given one."""
        return self._training.sampler

    @property
    def global_batch(self) -> int:
        """Samples of a full step over all ranks, by the sampler."""
        if self.sampler is None:
            raise ElasticError(
                "run.global_batch is the sampler's: pass an ElasticSampler to elastic.Run."
            )
        return self.sampler.global_batch_size

    @property
    def loss_weight(self) -> float:
        """Multiply a mean loss by this: then the averaged gradient is the exact mean over the
        global batch, also when shares are uneven, and over all micro-batches of a step.
        """
        return self._steps.now.weight() if self._steps.now is not None else 1.0

    @property
    def change_bytes(self) -> int:
        """Bytes of a sharded state that this process received at the last change."""
        return self._sharded("change_bytes").moved_bytes

    @property
    def change_parts(self) -> dict[str, float]:
        """Seconds that the last change of the group took here, by part
        (:data:`malletrain.elastic.membership.PARTS`).
        """
        return dict(self.membership.parts)

    def ddp(self, module: torch.nn.Module, **options: Any) -> Parallel:
        """``module`` over all ranks; write it where the script had
        ``DistributedDataParallel(module)``. Options are those of that class.
        """
        check_model(self._training, module, "run.ddp(model)")
        made = Parallel(module, self._steps.note_exchange, options)
        self.membership.parallels.append(made)
        made.rebuild(self.membership.group)
        return made

    def average_gradients(self, module: torch.nn.Module) -> None:
        """Average the gradients of ``module`` over all ranks in one go, for scripts that cannot use
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
        """``with run.step():`` around everything from ``zero_grad()`` to ``optimizer.step()`` of
        one training step.

        Args:
            samples: what this process trains on in the step; needed only without an ElasticSampler.
        """
        return Step(self._steps, samples)

    def batches(self, loader: Iterable[Any], accumulate: int = 1) -> Iterator[Any]:
        """What is left of the present epoch, from ``loader`` (a DataLoader whose ``batch_sampler``
        is the run's sampler).

        Every batch must be trained on inside ``with run.step():``. With ``accumulate`` > 1 each
        item is a list of up to so many batches; go through it with ``step.micro(batches)``. After a
        change of the group the loader is begun anew where the sampler stands, so that every sample
        is used once.

        Raises:
            ElasticError: without a sampler in the run, or when a batch was not trained on inside a
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
        sampler.close_epoch()  # that of a script that loops without sampler.epochs()
        membership.settle()
        finished = False
        # After a loss a sharded run may go back into the epoch before: its steps come in this loop,
        # and the code after it runs once they are done.
        while not (finished or sampler.between_epochs or self.stopping):
            changes, finished = membership.changes, True
            items = self._iterate(sampler, loader)
            while taken := list(islice(items, accumulate)):
                steps.planned = sampler.upcoming(len(taken))
                attempts = steps.attempts
                yield taken[0] if accumulate == 1 else taken
                if steps.attempts == attempts:
                    raise ElasticError(
                        "A batch was taken from run.batches() but not trained on inside `with "
                        "run.step():`."
                    )
                # Between epochs the group changes only for a loss: else when the next one begins.
                if not self.stopping and (membership.group.broken or not sampler.between_epochs):
                    membership.settle()
                if membership.changes != changes or sampler.between_epochs or self.stopping:
                    finished = False
                    break
        if self.stopping:
            sampler.end()

    def _iterate(self, sampler: ElasticSampler, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate ``loader``. A DataLoader draws a number from torch's generator then: once an
        epoch, and not again where its first step is repeated.
        """
        training, random = self._training, torch.get_rng_state()
        items = iter(loader)
        if not sampler.position:
            if training.iterated_epoch == sampler.epoch:
                torch.set_rng_state(random)
            training.iterated_epoch = sampler.epoch
        return items

    def steps(self, total: int) -> Iterator[int]:
        """Numbers of the steps up to ``total`` (of the whole run, whatever was done before), for
        loops without an ElasticSampler.
        """
        self.membership.settle()
        while self.steps_done < total and not self.stopping:
            attempts = self._steps.attempts
            yield self.steps_done
            if self._steps.attempts == attempts:
                raise ElasticError(
                    "run.steps() goes on when a step is done: write the loop's body inside "
                    "`with run.step(samples=n):`."
                )
            if not self.stopping:
                self.membership.settle()
        report.training_over()

    def request_stop(self) -> None:
        """End the training loops (:meth:`batches` and ``sampler.epochs()``, :meth:`steps`) on all
        ranks after the same step; any rank may ask, inside or between steps.
        """
        self._steps.stop_requested = True

    def save(self) -> bool:
        """Write the snapshot now, and wait for it. Returns whether this process wrote it.

        With a sharded model all ranks write together. Where the others are in a step (this process
        has joined them and is at the top of the script) nothing is written now, and all write when
        that step is done.
        """
        if self._sharded_model and not self._steps.all_call(save=True):
            self._steps.save_requested = True
            return False
        with library_collectives():
            return self._training.save()

    def digest(self) -> str:
        """A hash of the whole state; equal on all ranks between steps. With a sharded model all
        ranks must call it together.

        Raises:
            ElasticError: with a sharded model, where the others do not call it.
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
        report.flush()


def _own_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device(
            "cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        )
    return torch.device("cpu")
