"""The training run of a script in live mode: its state, its steps, its group as that changes.

Decides when a step counts, when the group is left and formed anew, and who gives the state to whom. The order of things at a change:
nodes join while the others train; all ranks of the old group agree, in a collective that travels along with every step, that this step is
its last; the new group is formed; ranks that have no state, or are a step behind, get it from one that is furthest; training goes on.
When a peer is lost the step under way is discarded on the ranks that did not finish it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from malletrain import progress
from malletrain._tether import rank_log_name
from malletrain.elastic import transfer
from malletrain.elastic.background import BackgroundSnapshot
from malletrain.elastic.group import CheckIn, Group, Interrupted, is_peer_loss
from malletrain.elastic.link import ENV_LOG_DIR, Place, connect
from malletrain.elastic.parallel import Parallel
from malletrain.elastic.state import Holder
from malletrain.elastic.undo import StepStart
from malletrain.sampler import ElasticSampler
from malletrain.snapshot import unwrapped

LAST_RESORT_S = 10.0
LAST_RESORT_CODE = 75
"""EX_TEMPFAIL of sysexits.h."""


class ElasticError(RuntimeError):
    """The script uses the run in a way that cannot work; the message says how to."""


class Run:
    """The state of a training script and the round it is in. Waits, when made, for the first round and the state that belongs to it.

    Args:
        snapshot: path of a snapshot file in a folder that all nodes share: what a suspended job, or one that lost all its nodes, goes on
            from. Written in the background. Without it such a job begins anew.
        snapshot_every_s: seconds between snapshots.
        device: where the script trains; by default the GPU of this process if there is one, else the CPU.
        warmup: called once before this process says that it is ready, while the others still train: a forward and backward pass that
            warms up the device or compiles the model. What it does to gradients, buffers and random numbers is undone; it must not
            call ``optimizer.step()``.
        objects: the state, by name: modules, optimizers, schedulers, GradScaler, ElasticSampler, anything with ``state_dict()`` and
            ``load_state_dict()``, or a plain dict of numbers, texts and tensors.

    Raises:
        TypeError: for an object whose state cannot be taken.
        ElasticError: when the model here differs from the peers'.
        SnapshotError: when snapshots exist and none is good.
    """

    def __init__(
        self,
        *,
        snapshot: str | os.PathLike[str] | None = None,
        snapshot_every_s: float = 60.0,
        device: torch.device | str | None = None,
        warmup: Callable[[], None] | None = None,
        **objects: Any,
    ) -> None:
        if not objects:
            raise TypeError("elastic.Run: no state; pass objects by name, e.g. elastic.Run(model=model, optimizer=optimizer).")
        self.device = torch.device(device) if device is not None else _own_device()
        self.steps_done = 0
        self.samples_done = 0
        self.stopping = False
        self._updates = 0
        self._state = Holder(objects, self.device)
        self._undo = StepStart(self._state.modules().values())
        plain = [unwrapped(value) for value in objects.values()]
        self._scalers = [value for value in plain if hasattr(value, "_per_optimizer_states")]
        self.sampler: ElasticSampler | None = next((value for value in plain if isinstance(value, ElasticSampler)), None)
        optimizers = [value for value in plain if isinstance(value, torch.optim.Optimizer)]
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_update)
            optimizer.register_step_post_hook(self._after_update)
        self._parallels: list[Parallel] = []
        self._hooks: list[Callable[[Run], None]] = []
        self._counters: dict[str, Any] = {}
        self._snapshot: BackgroundSnapshot | None = None
        if snapshot is not None:
            self._snapshot = BackgroundSnapshot(snapshot, snapshot_every_s, run=self._counters, **objects)
        self._group: Group | None = None
        self._check_in: CheckIn | None = None
        self._has_state = False
        self._torn = False
        self._aborted = 0
        self._lost_share = 0
        self._exchanged = False
        self._step: Step | None = None
        self._changes = 0
        self._planned: list[tuple[int, int]] = []
        self._attempts = 0
        self._stop_wanted = False
        self._change_due = False
        self._joining = False
        self._crashed = False
        self._signature = self._state.signature()
        if warmup is not None:
            self._undo.keep()
            warmup()
            self._undo.restore(self._scalers)
        self._link = connect()
        self._link.on_round = self._round_came
        self._link.on_abort = self._abort_came
        self._link.start()
        self._link.say("ready")
        self._watch_the_end()
        self._join()

    # --- what the script asks ---

    @property
    def rank(self) -> int:
        """This process's number in the round, from 0."""
        return self._place.rank

    @property
    def world_size(self) -> int:
        """Processes in the round."""
        return self._place.size

    @property
    def generation(self) -> int:
        """Number of the round; grows with every change."""
        return self._place.generation

    @property
    def global_batch(self) -> int:
        """Samples of a full step over all ranks, by the sampler."""
        if self.sampler is None:
            raise ElasticError("run.global_batch is the sampler's: pass an ElasticSampler to elastic.Run.")
        return self.sampler.global_batch_size

    @property
    def loss_weight(self) -> float:
        """Multiply a mean loss by this: then the averaged gradient is the exact mean over the global batch, also when shares are uneven,
        and over all micro-batches of a step."""
        return self._step.weight() if self._step is not None else 1.0

    def ddp(self, module: torch.nn.Module, **options: Any) -> Parallel:
        """``module`` over all ranks; write it where the script had ``DistributedDataParallel(module)``. Options are those of that class."""
        made = Parallel(module, self._note_exchange, options)
        self._parallels.append(made)
        made.rebuild(self._current)
        return made

    def average_gradients(self, module: torch.nn.Module) -> None:
        """Average the gradients of ``module`` over all ranks in one go, for scripts that cannot use :meth:`ddp`."""
        self._note_exchange()
        if not self._current.several:
            return
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for grad in grads:
            by_kind.setdefault((grad.dtype, grad.device), []).append(grad)
        for same in by_kind.values():
            flat = torch._utils._flatten_dense_tensors(same)
            if flat.is_cuda:
                dist.all_reduce(flat)
                flat.div_(self.world_size)
            else:
                self._current.average(flat).wait()
            for grad, part in zip(same, torch._utils._unflatten_dense_tensors(flat, same), strict=True):
                grad.copy_(part)

    def on_change(self, hook: Callable[[Run], None]) -> Callable[[Run], None]:
        """Call ``hook(run)`` now and after every change of the group (learning rates: :func:`lr_linear`, :func:`lr_sqrt`)."""
        self._hooks.append(hook)
        hook(self)
        return hook

    def step(self, samples: int | None = None) -> Step:
        """``with run.step():`` around everything from ``zero_grad()`` to ``optimizer.step()`` of one training step.

        Args:
            samples: what this process trains on in the step; needed only without an ElasticSampler.
        """
        return Step(self, samples)

    def batches(self, loader: Iterable[Any], accumulate: int = 1) -> Iterator[Any]:
        """What is left of the present epoch, from ``loader`` (a DataLoader whose ``batch_sampler`` is the run's sampler).

        Every batch must be trained on inside ``with run.step():``. With ``accumulate`` > 1 each item is a list of up to so many batches;
        go through it with ``step.micro(batches)``. After a change of the group the loader is begun anew where the sampler stands, so that
        every sample is used once.

        Raises:
            ElasticError: without a sampler in the run, or when a batch was not trained on inside a step.
        """
        sampler = self.sampler
        if sampler is None:
            raise ElasticError("run.batches() needs the position in the data: pass an ElasticSampler to elastic.Run, or use run.steps(n).")
        if accumulate < 1:
            raise ElasticError(f"run.batches(): accumulate must be 1 or more, not {accumulate}.")
        self._settle()
        epoch, finished = sampler.epoch, False
        while sampler.epoch == epoch and not finished and not self.stopping:
            changes, finished = self._changes, True
            items = iter(loader)
            while taken := list(islice(items, accumulate)):
                self._planned = sampler.upcoming(len(taken))
                attempts = self._attempts
                yield taken[0] if accumulate == 1 else taken
                if self._attempts == attempts:
                    raise ElasticError("A batch was taken from run.batches() but not trained on inside `with run.step():`.")
                if not self.stopping:
                    self._settle()
                if self._changes != changes or sampler.epoch != epoch or self.stopping:
                    finished = False
                    break

    def steps(self, total: int) -> Iterator[int]:
        """Numbers of the steps up to ``total`` (of the whole run, whatever was done before), for loops without an ElasticSampler."""
        self._settle()
        while self.steps_done < total and not self.stopping:
            attempts = self._attempts
            yield self.steps_done
            if self._attempts == attempts:
                raise ElasticError("run.steps() goes on when a step is done: write the loop's body inside `with run.step(samples=n):`.")
            if not self.stopping:
                self._settle()

    def request_stop(self) -> None:
        """End :meth:`batches` and :meth:`steps` on all ranks after the same step; any rank may ask, inside or between steps."""
        self._stop_wanted = True

    def save(self) -> bool:
        """Write the snapshot now, and wait for it. Returns whether this process wrote it."""
        self._update_counters()
        return self._snapshot is not None and self._snapshot.save()

    def digest(self) -> str:
        """A hash of the whole state; equal on all ranks between steps."""
        return self._state.digest()

    # --- a step ---

    @property
    def _current(self) -> Group:
        assert self._group is not None
        return self._group

    @property
    def _place(self) -> Place:
        return self._current.place

    def _note_exchange(self) -> None:
        self._exchanged = True

    def _ready_to_go(self) -> bool:
        check_in = self._check_in
        return check_in is not None and check_in.everyone and check_in.place.generation > self.generation

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        if self._step is None:
            raise ElasticError("optimizer.step() was called outside of `with run.step():`.")
        if self._current.several and not self._exchanged:
            raise ElasticError(
                "optimizer.step() without averaged gradients: call the model as `net = run.ddp(model)`, `net(x)`, or call "
                "run.average_gradients(model) after backward()."
            )
        if self.device.type == "cuda" and self._current.several:
            # NCCL tells nothing of a loss before its kernels have ended: gradients must be known to be good before they are used.
            torch.cuda.current_stream(self.device).synchronize()
        if self._current.broken:
            raise Interrupted("A peer is lost.")

    def _after_update(self, *_: Any) -> None:
        self._updates += 1
        if self._step is not None:
            self._step.updates += 1

    def _commit(self, step: Step) -> None:
        self.steps_done += 1
        if self.sampler is not None and step.planned:
            self.sampler.advance(len(step.planned))
        self.samples_done += step.global_samples
        if step.samples:
            progress.report(step.samples)

    def _discard(self) -> None:
        self._undo.restore(self._scalers)

    # --- rounds ---

    def _round_came(self, place: Place) -> None:
        if self._check_in is not None:
            self._check_in.void = True
        self._check_in = CheckIn(place, self._signature)

    def _abort_came(self, generation: int) -> None:
        self._aborted = max(self._aborted, generation)
        group = self._group
        if group is not None and group.place.generation <= generation:
            group.abort()
            timer = threading.Timer(LAST_RESORT_S, self._last_resort, (self._changes,))
            timer.daemon = True
            timer.start()

    def _last_resort(self, changes: int) -> None:
        """The training thread waits for something that cannot be given up: better to be started again than to hang."""
        if self._changes == changes and not self._change_due and not self._joining:
            progress.tell(
                f"The step could not be given up within {LAST_RESORT_S:g} s after a peer was lost; this process starts again. Collectives "
                "of the script's own cannot be given up: use as few as possible."
            )
            os._exit(LAST_RESORT_CODE)

    def _void(self, place: Place) -> bool:
        newest = self._link.newest()
        return self._aborted >= place.generation or (newest is not None and newest.generation > place.generation)

    def _settle(self) -> None:
        """Change the group, if the last step was the last of the one before; a process that is to leave waits here for its end."""
        if self._change_due:
            self._change_due = False
            self._join()

    def _join(self) -> None:
        """Become part of the next round, however many attempts that takes."""
        progress.flush()
        self._joining = True
        tried = self._group.place.generation if self._group is not None else 0
        old = self._group
        while True:
            place = self._link.wait_round(tried)
            tried = place.generation
            try:
                self._enter(place, old)
                break
            except Exception as error:
                if not self._link.live or not is_peer_loss(error):
                    raise
                if self._group is not None:
                    self._group.broken = True
                    self._group.leave()
        if old is not None:
            old.close()
        self._changes, self._joining = self._changes + 1, False
        for hook in self._hooks:
            hook(self)

    def _enter(self, place: Place, old: Group | None) -> None:
        began = time.time()
        store = None
        if self._link.live:
            assert self._check_in is not None
            store = self._check_in.store(lambda: self._void(place))
        if old is not None:
            old.leave()
        self._group = group = Group(place, store, self.device.type == "cuda")
        if self._void(place):
            raise Interrupted("This round is void; a newer one follows.")
        progress.entered(place.generation, place.rank, place.size)
        grouped = time.time()
        self._share_state(group)
        if self.sampler is not None:
            self.sampler.resize(place.rank, place.size)
        for parallel in self._parallels:
            parallel.rebuild(group)
        if self._link.live:
            _write_to_log_of(place)
        progress.mark("restoring", grouped)
        progress.mark("restored")
        progress.mark("switch", began)
        self._link.say("running", place.generation)

    def _share_state(self, group: Group) -> None:
        """Have every rank hold the state of the one that is furthest."""
        place = group.place
        mine = torch.tensor([int(self._has_state), self._updates, self.steps_done, int(not self._torn)])
        table = [mine.tolist()]
        if group.several:
            rows = [torch.empty_like(mine) for _ in range(place.size)]
            group.wait(dist.all_gather(rows, mine, async_op=True))
            table = [row.tolist() for row in rows]
        source = max(range(place.size), key=lambda rank: (*table[rank], -rank))
        if not table[source][0]:
            source = 0
            if place.rank == 0:
                self._restore_snapshot()
        needy = [rank for rank in range(place.size) if rank != source and (not table[rank][0] or table[rank] != table[source])]
        chain = [source, *needy]
        if needy and place.rank in chain:
            self._move_state(group, chain, behind=table[source][2] - self.steps_done)
        self._has_state, self._torn, self._lost_share = True, False, 0

    def _move_state(self, group: Group, chain: list[int], behind: int) -> None:
        if group.place.rank == chain[0]:
            packed, tensors = self._state.pack({"steps": self.steps_done, "samples": self.samples_done, "updates": self._updates})
            transfer.send_bytes(group, chain, packed)
            transfer.move(group, chain, tensors)
            return
        packed = transfer.send_bytes(group, chain, b"")
        share, had = self._lost_share, self._has_state
        self._has_state = False  # until all of it has arrived
        skeleton, tensors = self._state.destinations(packed)
        transfer.move(group, chain, tensors)
        counters = self._state.put_back(skeleton, tensors)
        self.steps_done, self.samples_done, self._updates = counters["steps"], counters["samples"], counters["updates"]
        if had and behind == 1 and share:
            progress.report(share)  # the step given up here counts after all: somebody had finished it

    def _restore_snapshot(self) -> None:
        if self._snapshot is not None and self._snapshot.restore():
            self.steps_done = int(self._counters.get("steps", 0))
            self.samples_done = int(self._counters.get("samples", 0))
            self._updates = int(self._counters.get("updates", 0))

    def _update_counters(self) -> None:
        self._counters.update(steps=self.steps_done, samples=self.samples_done, updates=self._updates)

    # --- the end ---

    def _watch_the_end(self) -> None:
        before = sys.excepthook

        def crashed(*args: Any) -> None:
            self._crashed = True
            before(*args)

        sys.excepthook = crashed
        atexit.register(self._finish)

    def _finish(self) -> None:
        """Leave together: whoever went first would look like a loss to those that have not read the last step yet."""
        if self._snapshot is not None:
            self._snapshot.wait()
        group = self._group
        while self._link.live and not self._crashed and group is not None and group.several:
            try:
                group.begin_step(False, False)
                group.end_step()
                break
            except RuntimeError as error:
                if not is_peer_loss(error):
                    raise
                group.broken = True
                self._join()
                group = self._group
        progress.flush()


class Step:
    """One training step. The body runs from the first batch to ``optimizer.step()``; leaving it makes the step count.

    ``aborted`` is true after a step that was discarded because a peer was lost; the loop goes on and repeats it. The group changes between
    two steps, when the loop asks for the next one. ``rank``, ``world_size`` and ``generation`` are those the step was done with.
    """

    def __init__(self, run: Run, samples: int | None) -> None:
        self._run = run
        self.rank, self.world_size, self.generation = run.rank, run.world_size, run.generation
        self.aborted = False
        self.updates = 0
        self.planned = run._planned
        self.samples = samples if samples is not None else sum(own for own, _ in self.planned)
        self.global_samples = sum(whole for _, whole in self.planned) or self.samples * self.world_size
        self._micro: int | None = None

    def micro(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The micro-batches of this step, one after the other; gradients are exchanged with the last one only."""
        batches = list(batches)
        for self._micro, batch in enumerate(batches):
            parallels = self._run._parallels if self._micro + 1 < len(batches) else []
            with _all(parallel.no_sync() for parallel in parallels):
                yield batch

    def weight(self) -> float:
        """See :attr:`Run.loss_weight`."""
        if not self.planned:
            return 1.0
        own = self.planned[self._micro or 0][0] if len(self.planned) > 1 else self.planned[0][0]
        return own * self.world_size / self.global_samples

    def __enter__(self) -> Step:
        run = self._run
        if run._step is not None:
            raise ElasticError("run.step() inside another step: a step is one update of the model.")
        run._settle()
        run._step, run._exchanged = self, False
        run._attempts += 1
        run._undo.keep()
        run._current.begin_step(run._ready_to_go(), run._stop_wanted)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        run, group = self._run, self._run._current
        run._step, run._planned = None, []
        if error is not None and not (run._link.live and isinstance(error, Exception) and (is_peer_loss(error) or group.broken)):
            return False
        if self.updates or (error is None and not group.broken):
            run._commit(self)
            run._torn = error is not None
        else:
            self.aborted = True
            run._lost_share = self.samples
            run._discard()
        if error is None:
            try:
                change, run.stopping = group.end_step()
            except RuntimeError as late:
                if not (run._link.live and is_peer_loss(late)):
                    raise
                group.broken = change = True
        else:
            group.broken = change = True
        if group.broken:
            run._link.say("lost", run.generation)
        run._change_due = change
        if not change and run._snapshot is not None:
            run._update_counters()
            run._snapshot.step()
        return True


def _all(contexts: Iterable[Any]) -> Any:
    from contextlib import ExitStack

    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack if stack else nullcontext()


def _own_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def _write_to_log_of(place: Place) -> None:
    """From now on this process's output belongs to the log of its rank in this round, where ``malletrain logs`` looks for it."""
    directory = os.environ.get(ENV_LOG_DIR)
    if not directory:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    path = os.path.join(directory, rank_log_name(place.generation, place.rank))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
