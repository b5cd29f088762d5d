"""The scope of :mod:`benchmarks.windsr`, and the places of its files."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[1] / "jobscripts" / "windsr"
sys.path.insert(0, str(HOME))


@dataclass(frozen=True)
class Row:
    """A row of the table: a method, whether it sees the terrain, and whether it is as published."""

    name: str
    method: str
    terrain: bool = True
    published: bool = False


ROWS = {
    row.name: row
    for row in (
        Row("bicubic", "bicubic"),
        Row("srcnn", "srcnn"),
        Row("esrgan", "esrgan"),
        Row("unet without terrain", "unet", terrain=False),
        Row("unet", "unet"),
        Row("windsr-edm", "windsr-edm"),
        Row("windsr without terrain", "windsr", terrain=False),
        Row("windsr", "windsr"),
        Row("windsr as published", "windsr", published=True),
    )
}
"""``windsr as published`` predicts the field's noise, with SR3's schedule and absolute wind;
``windsr`` predicts the residual of interpolation; ``windsr-edm`` that of the row ``unet``.
"""
ASSIMILATED = ("bicubic", "srcnn", "unet", "windsr-edm")


@dataclass(frozen=True)
class Plan:
    """The scope of a preset of this benchmark.

    ``steps``: of every training except the GAN's, which has two thirds; ``batch``: None for the
    preset's; ``fields``: number of scored fields per test day, which are similar; ``members``: size
    of the ensembles; ``backgrounds`` per day and ``drawn`` members of the assimilation;
    ``stations``: share of the pixels with a station; ``days`` that are left out in turn; empty:
    every day; ``choose``: whether T1 and T2 are chosen on the other days, or are the defaults.
    """

    preset: str
    rows: tuple[str, ...]
    steps: int
    batch: int | None
    seeds: int
    fields: int
    members: int
    backgrounds: int
    drawn: int
    stations: float
    processes: int
    trace_s: float
    trace_nodes: int
    days: tuple[str, ...] = ()
    choose: bool = True


_SHORT = tuple(name for name in ROWS if ROWS[name].terrain)
PLANS = {
    "cpu": Plan("cpu", tuple(ROWS), 600, None, 3, 4, 32, 6, 8, 0.005, 2, 240.0, 3),
    "short": Plan("cpu", _SHORT, 100, 4, 1, 2, 16, 2, 2, 0.005, 2, 240.0, 3, choose=False),
    "gpu": Plan("gpu", tuple(ROWS), 20_000, None, 3, 12, 32, 12, 16, 0.005, 1, 600.0, 4),
    "tiny": Plan("tiny", tuple(ROWS), 4, None, 1, 1, 4, 1, 2, 0.02, 1, 20.0, 2),
}


@dataclass(frozen=True)
class Setting:
    """The places of all files."""

    plan: Plan
    out: Path
    data: Path | None

    def preset(self, row: Row) -> Any:
        """Return the preset with which a row is trained."""
        from windsr.presets import as_published, preset_of

        preset = preset_of(self.plan.preset)
        if self.plan.batch:
            preset = replace(preset, batch=self.plan.batch)
        return replace(as_published(preset), sample_steps=10) if row.published else preset

    def steps(self, row: Row) -> int:
        """Return the folder of a row's training."""
        return self.plan.steps * 2 // 3 if row.method == "esrgan" else self.plan.steps

    def fields(self) -> Any:
        """Return all fields."""
        return _fields(self.data, 64 if self.plan.preset == "tiny" else 200)

    def fold(self, day: str) -> tuple[Any, Any]:
        """Return (train, test) with one day left out, the test cut to whole coarse cells."""
        from windsr.fields import split_by_day
        from windsr.presets import preset_of
        from windsr.whole import cut

        train, test = split_by_day(self.fields(), [day])
        return train, cut(test, preset_of(self.plan.preset).factor)

    def days(self) -> list[str]:
        """Return every day of the fields."""
        import numpy as np

        every = [str(day) for day in np.unique(self.fields().days)]
        return [day for day in every if day in (self.plan.days or every)]

    def folder(self, row: str, day: str, seed: int) -> Path:
        """Return the settings of one training."""
        return self.out / f"{row.replace(' ', '-')}-{day}-{seed}"


@cache
def _fields(data: Path | None, size: int) -> Any:
    from windsr import readers, synthetic

    return readers.read(data) if data else synthetic.generate(size=size)
