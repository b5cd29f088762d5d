"""What :mod:`benchmarks.windsr` measures, how much of it, and where its files are."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[1] / "jobscripts" / "windsr"
sys.path.insert(0, str(HOME))


@dataclass(frozen=True)
class Plan:
    """What a preset of this benchmark does. ``steps`` by method; ``stations``: share of the pixels
    that are observed.
    """

    preset: str
    steps: dict[str, int]
    seeds: int
    members: int
    stations: float
    processes: int
    trace_s: float
    trace_nodes: int


PLANS = {
    "cpu": Plan("cpu", {"windsr": 600, "srcnn": 600, "esrgan": 400}, 3, 4, 0.005, 2, 240.0, 3),
    "gpu": Plan(
        "gpu", {"windsr": 20_000, "srcnn": 20_000, "esrgan": 20_000}, 3, 16, 0.005, 1, 600.0, 4
    ),
    "tiny": Plan("tiny", {"windsr": 8, "srcnn": 8, "esrgan": 4}, 2, 2, 0.02, 1, 20.0, 2),
}
ROWS = (
    ("bicubic", False),
    ("srcnn", False),
    ("esrgan", False),
    ("windsr", False),
    ("windsr", True),
    ("srcnn", True),
)
"""(method, terrain): the paper's, and SRCNN with terrain, so that the gain by terrain and that by
diffusion can be told apart.
"""


@dataclass(frozen=True)
class Setting:
    """Where everything is."""

    plan: Plan
    out: Path
    data: Path | None

    def fields(self) -> tuple[Any, Any]:
        """(train, test) by day."""
        from windsr import readers, synthetic
        from windsr.fields import split_by_day

        return split_by_day(
            readers.read(self.data)
            if self.data
            else synthetic.generate(size=64 if self.plan.preset == "tiny" else 200)
        )

    def folder(self, method: str, terrain: bool, seed: int) -> Path:
        """Of one training."""
        return self.out / f"{method}-{'terrain' if terrain else 'plain'}-{seed}"
