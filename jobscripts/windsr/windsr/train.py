"""Training as a malleable job, in restart and live mode with one loop over
:class:`malletrain.elastic.Run`.

The result does not depend on the number of nodes or on the times at which they join and leave,
except for rounding: the global batch is fixed, and everything random about a sample is derived from
its number (:mod:`windsr.patches`).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import malletrain
import malletrain.elastic as elastic
from windsr import WindsrError, checkpoint
from windsr.fields import Fields
from windsr.folder_facts import agree, digest_of_nets, facts_of_fields, record
from windsr.methods import Method, make
from windsr.patches import TrainingPatches, scales_of
from windsr.presets import Preset

STEPS_PER_LOG = 50
"""Number of steps between two lines of the log."""
MODEL, SNAPSHOT, LOG, FACTS = "model.safetensors", "run.snap", "training.jsonl", "training.json"


@dataclass(frozen=True)
class TrainingRun:
    """One training: its method, its preset, and the folder of its files.

    Args:
        folder: gets the model, the snapshots and a log of the loss; all nodes must share it.
        steps: number of steps of the optimizer; by default the preset's.
        snapshot_every: interval of snapshots, seconds.
        mean: the model of a regression on which the method builds (``windsr-edm``).
        step_delay: pause in each step, seconds, to stretch a test or a demo.
    """

    method: str
    preset: Preset
    folder: Path
    terrain: bool = True
    seed: int = 0
    steps: int | None = None
    snapshot_every: float = 60.0
    workers: int = 0
    threads: int = 1
    step_delay: float = 0.0
    mean: Path | None = None


def average_of(decay: float) -> Callable[..., None]:
    """Return the update of the averaged weights for :class:`AveragedModel`. The decay grows to
    ``decay`` as min(decay, (1 + n)/(10 + n)).
    """

    def update(averages: Any, currents: Any, count: Any) -> None:
        n = float(count)
        torch._foreach_lerp_(averages, currents, 1 - min(decay, (1 + n) / (10 + n)))

    return update


def rate_at(preset: Preset, steps: int) -> Callable[[int], float]:
    """Return the factor on the learning rate at a step: a linear start, then half a cosine down to
    a hundredth.
    """
    warmup = max(1, min(preset.warmup, steps // 4))

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.01 + 0.99 * 0.5 * (
            1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))
        )

    return share


def device_here() -> torch.device:
    """Return this process's GPU if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device(
            "cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        )
    return torch.device("cpu")


def train(training: TrainingRun, fields: Fields, say: Callable[[str], None] = print) -> Path:
    """Train, or continue from the snapshot in the folder. Return the path of the model. Runs alone,
    under torchrun or under MalleTrain.

    Raises:
        WindsrError: the method has nothing to train, or lacks the regression on which it builds or
            a terrain, or the fields are too small.
    """
    preset = training.preset
    torch.set_num_threads(training.threads)
    torch.manual_seed(training.seed)
    steps = training.steps or preset.steps
    if training.terrain and not fields.has_terrain:
        raise WindsrError(
            f"{fields.source} has no terrain, which the model sees; train it with --no-terrain."
        )
    method = make(training.method, preset, scales_of(fields, preset), training.terrain)
    if training.mean is not None:
        method.build_on(checkpoint.load(training.mean)[0])
    if not method.nets:
        raise WindsrError(f"{method.name} has nothing to train.")
    method.prepare(fields)
    data = TrainingPatches(fields, preset, steps * preset.batch, training.seed)
    training.folder.mkdir(parents=True, exist_ok=True)
    _require_own_folder(training, method, fields)
    device = device_here()
    for net in (*method.nets.values(), *method.frozen.values()):
        net.to(device)
    average = AveragedModel(method.nets["net"], multi_avg_fn=average_of(preset.ema))
    optimizers = {
        name: torch.optim.AdamW(net.parameters(), lr=preset.lr, weight_decay=1e-4)
        for name, net in method.nets.items()
    }
    share = rate_at(preset, steps)
    schedules = {
        name: torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        for name, optimizer in optimizers.items()
    }
    scaler = torch.amp.GradScaler(device.type, enabled=preset.precision == "fp16")
    # In order: a sample is derived at random from its number, and a permutation of all samples of a
    # long training would take gigabytes.
    sampler = malletrain.ElasticSampler(
        len(data), global_batch_size=preset.batch, seed=training.seed, shuffle=False
    )
    objects: dict[str, Any] = {
        "average": average,
        "sampler": sampler,
        "scaler": scaler,
        **method.nets,
    }
    objects |= {f"optimizer_{name}": made for name, made in optimizers.items()}
    objects |= {f"schedule_{name}": made for name, made in schedules.items()}
    run = elastic.Run(
        snapshot=training.folder / SNAPSHOT,
        snapshot_every_s=training.snapshot_every,
        device=device,
        **objects,
    )
    # One network: DDP, which exchanges gradients during the backward pass. Several losses over
    # shared networks: one exchange after them.
    single = len(method.nets) == 1
    nets = {name: run.ddp(net) if single else net for name, net in method.nets.items()}
    loader = DataLoader(data, batch_sampler=sampler, num_workers=training.workers)
    if run.rank == 0:
        say(
            f"training {method.name} on {run.world_size} worker(s) from step {run.steps_done} "
            f"of {steps}"
        )
    losses_since = _Losses(method.nets)
    for _ in sampler.epochs(1):
        for batch in run.batches(loader):
            with run.step() as step:
                losses = update(run, method, nets, optimizers, schedules, scaler, batch, device)
                average.update_parameters(method.nets["net"])
                if training.step_delay:
                    time.sleep(training.step_delay)
            if step.aborted:
                continue
            losses_since.add(losses)
            if run.steps_done % STEPS_PER_LOG == 0 or run.steps_done == steps:
                if run.rank == 0:
                    _log(training.folder, run, losses_since, say)
                losses_since = _Losses(method.nets)
    run.save()
    path = training.folder / MODEL
    if run.rank == 0:
        facts: dict[str, str | float | int] = {
            "steps": run.steps_done,
            "samples": run.samples_done,
            "seed": training.seed,
            "data": fields.source,
            "height": fields.height,
            "spacing": fields.spacing,
            "days": ",".join(map(str, np.unique(fields.days))),
        }
        checkpoint.save(path, method, average.module, facts)
        say(f"wrote {path}")
    return path


def _require_own_folder(training: TrainingRun, method: Method, fields: Fields) -> None:
    """Raise WindsrError if the snapshot in the folder is of another training: its weights would go
    on, or be called the model of this one.
    """
    facts = {
        "method": training.method,
        "preset": training.preset.name,
        "terrain": training.terrain,
        "seed": training.seed,
        "data": facts_of_fields(fields, training.terrain),
        "mean": digest_of_nets(method.frozen),
    }
    path = training.folder / FACTS
    if (training.folder / SNAPSHOT).exists():
        agree(path, facts, "the snapshot of another training")
    else:
        record(path, facts)


def update(
    run: elastic.Run,
    method: Method,
    nets: dict[str, Any],
    optimizers: dict[str, Any],
    schedules: dict[str, Any],
    scaler: Any,
    batch: dict[str, torch.Tensor],
    device: torch.device,
) -> dict[str, float]:
    """Make one step of all networks: all gradients before any update, so that a discarded step
    changes nothing.
    """
    batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
        method.preset.precision, torch.float32
    )
    with torch.autocast(device.type, precision, enabled=precision is not torch.float32):
        losses = method.losses(batch, nets)
    for number, (name, loss) in enumerate(losses.items()):
        weighted = scaler.scale(loss * run.loss_weight)
        if len(nets) == 1:
            weighted.backward()
        else:
            weighted.backward(
                inputs=list(method.nets[name].parameters()), retain_graph=number + 1 < len(losses)
            )
    if len(nets) > 1:
        for net in method.nets.values():
            run.average_gradients(net)
    for name, optimizer in optimizers.items():
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(method.nets[name].parameters(), 1.0)
        scaler.step(optimizer)
        schedules[name].step()
    scaler.update()
    return {name: float(loss.detach()) for name, loss in losses.items()}


class _Losses:
    """The losses of rank 0's share in the steps since the last line of the log."""

    def __init__(self, names: Iterable[str]) -> None:
        self._sums = dict.fromkeys(names, 0.0)
        self._steps = 0
        self._began = time.monotonic()

    def add(self, losses: Mapping[str, float]) -> None:
        """Add the losses of one step."""
        self._steps += 1
        for name, loss in losses.items():
            self._sums[name] += loss

    def means(self) -> dict[str, float]:
        """Return the mean losses. There must be at least one step."""
        return {name: total / self._steps for name, total in self._sums.items()}

    def seconds(self) -> float:
        """Return the time since the last line, seconds."""
        return time.monotonic() - self._began


def _log(folder: Path, run: elastic.Run, losses_since: _Losses, say: Callable[[str], None]) -> None:
    """Report the mean losses since the last line: to the log, MalleTrain and the screen."""
    losses, seconds = losses_since.means(), losses_since.seconds()
    record = {
        "step": run.steps_done,
        "nodes": run.world_size,
        "generation": run.generation,
        "seconds": round(seconds, 3),
        **losses,
    }
    with (folder / LOG).open("a") as file:
        file.write(json.dumps(record) + "\n")
    malletrain.metric("loss", losses["net"])
    say(
        f"step {run.steps_done}: loss {losses['net']:.4f}, {seconds:.1f} s on {run.world_size} "
        "worker(s)"
    )
