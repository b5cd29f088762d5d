"""The code of the workers of these tests, with small models and fields. Module-level, so that a
fork can find it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from windsr import queue, synthetic
from windsr import train as windsr_train
from windsr.fields import Fields
from windsr.methods import Draw, Method, make
from windsr.patches import scales_of
from windsr.presets import PRESETS
from windsr.train import TrainingRun, train

TINY = PRESETS["tiny"]


def small() -> Fields:
    """6 fields of 40 × 40 points on 3 days."""
    return synthetic.generate(days=3, hours=2, size=40, seed=1)


def untrained(name: str) -> Method:
    """A method with random weights, the same every time."""
    torch.manual_seed(4)
    return make(name, TINY, scales_of(small(), TINY), True)


def training(folder: str, method: str, options: dict[str, Any]) -> None:
    train(
        TrainingRun(method, TINY, Path(folder), **options),
        small(),
        lambda text: print(text, flush=True),
    )


STEPS = "steps"


def until_told(folder: str | Path, gate: int) -> None:
    """Wait for the file ``go-GATE``."""
    while not Path(folder, f"go-{gate}").exists():
        time.sleep(0.005)


def training_noted(
    folder: str, method: str, gates: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Write down each step that is tried: its number and on how many nodes. Before the steps
    ``gates`` it waits until it is told to go on.
    """
    update = windsr_train.update

    def noting(run: Any, *rest: Any) -> dict[str, float]:
        if run.steps_done in gates:
            until_told(folder, run.steps_done)
        losses = update(run, *rest)
        with (Path(folder) / STEPS).open("a") as file:
            file.write(f"{run.steps_done} {run.world_size}\n")
        return losses

    windsr_train.update = noting
    training(folder, method, options)


HELD = "held"


def training_held(folder: str, method: str, options: dict[str, Any]) -> None:
    """Train three steps, report that by a file, and wait to be killed."""
    update = windsr_train.update

    def holding(run: Any, *rest: Any) -> dict[str, float]:
        if run.steps_done >= 3:
            (Path(folder) / HELD).touch()
            signal.pause()
        return update(run, *rest)

    windsr_train.update = holding
    training(folder, method, options)


def results(folder: Path) -> list[str]:
    """The names of the patches that are made."""
    return sorted(p.name for p in (folder / queue.PATCHES).glob("[0-9]*.npy"))


class Noting(queue.PatchQueue):
    """Records in a file of its process the results that this process wrote. At each number of
    results in ``gates`` it waits until it is told to continue.
    """

    gates: tuple[int, ...] = ()

    def keep(self, number: int, members: Any) -> bool:
        made = len(results(self.sampling.folder))
        for gate in self.gates:
            if made >= gate:
                until_told(self.sampling.folder, gate)
        ours = super().keep(number, members)
        if ours:
            with (self.sampling.folder / f"stored-{os.getpid()}").open("a") as file:
                file.write(f"{number}\n")
        return ours


def sampling(folder: str, gates: tuple[int, ...], options: dict[str, Any]) -> None:
    queue.PatchQueue = Noting  # type: ignore[misc]
    Noting.gates = gates
    method = untrained("srcnn")
    work = queue.Sampling(
        Path(folder), Draw(), overlap=8, per_step=2, snapshot_every=0.0, **options
    )
    queue.sample(
        work,
        queue.from_fine(small(), TINY.factor),
        method,
        "untrained",
        lambda text: print(text, flush=True),
    )
