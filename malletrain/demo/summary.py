"""The result of a demo: one object for JSON, one table for users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from malletrain.demo.account import Account
from malletrain.protocol.counting import counted
from malletrain.render.columns import Column, FittedTable
from malletrain.render.tables import state
from malletrain.render.text import count, plain

TOLERANCE = 0.01
"""Maximum difference of the accuracy from the undisturbed run (1 percentage point)."""


@dataclass(frozen=True)
class JobResult:
    """One job of the demo; accuracies are None if not known."""

    name: str
    state: str
    samples: float
    rescales: int
    accuracy: float | None
    undisturbed_accuracy: float | None

    @property
    def as_good(self) -> bool:
        """Whether the accuracy is within the tolerance of the undisturbed run."""
        if self.accuracy is None or self.undisturbed_accuracy is None:
            return False
        return abs(self.accuracy - self.undisturbed_accuracy) <= TOLERANCE + 1e-9


@dataclass(frozen=True)
class DemoResult:
    """The result of the whole demo. ``notes``: sentences for the reader."""

    jobs: tuple[JobResult, ...]
    rescales: int
    preemptions: int
    samples: float
    wall_s: float
    account: Account
    notes: tuple[str, ...] = ()

    @property
    def completed(self) -> bool:
        """Whether all jobs completed."""
        return bool(self.jobs) and all(j.state == "completed" for j in self.jobs)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "jobs": [asdict(j) for j in self.jobs],
            "rescales": self.rescales,
            "preemptions": self.preemptions,
            "node_seconds_offered": round(self.account.offered, 1),
            "node_seconds_harvested": round(self.account.harvested, 1),
            "samples": round(self.samples),
            "wall_s": round(self.wall_s, 1),
        }


def render(result: DemoResult, files: Sequence[tuple[str, str]] = ()) -> RenderableType:
    """Return the tables at the end of a demo. ``files``: (description, path)."""
    a = result.account
    whole = a.offered or 1.0
    sums = FittedTable(
        Column("NODE-SECONDS"),
        Column("", right=True),
        Column("SHARE", right=True),
        Column("", drop=1),
    )
    rows = (
        ("offered by the main scheduler", a.offered, ""),
        ("harvested: training", a.harvested, "green"),
        ("lost to rescaling", a.lost_to_rescaling, "yellow"),
        ("lost to preemption", a.lost_to_preemption, "red"),
        ("leased, no job on it", a.leased_unused, "dim"),
        ("not leased", a.not_leased, "dim"),
    )
    for label, value, style in rows:
        sums.add_row(
            Text(label, style),
            f"{value:,.0f}",
            f"{100 * value / whole:.0f} %",
            Text("█" * round(30 * value / whole), style),
        )
    jobs = FittedTable(
        Column("JOB", least=10, middle=True),
        Column("STATE", drop=1),
        Column("SAMPLES", right=True, drop=2),
        Column("RESCALES", right=True, drop=3),
        Column("ACCURACY", right=True),
        Column("UNDISTURBED", right=True),
        Column(""),
    )
    for j in result.jobs:
        verdict = (
            Text("as good", "green")
            if j.as_good
            else Text("differs" if j.accuracy and j.undisturbed_accuracy else "unknown", "red")
        )
        accuracies = (_percent(j.accuracy), _percent(j.undisturbed_accuracy))
        jobs.add_row(
            Text(plain(j.name)),
            state(j.state),
            count(j.samples),
            str(j.rescales),
            *accuracies,
            verdict,
        )
    line = Text(
        f"{counted(result.rescales, 'rescale')} and "
        f"{counted(result.preemptions, 'preemption')} survived; "
        f"{count(result.samples)} samples processed in {result.wall_s:.0f} s.", "bold",
    )  # fmt: skip
    parts: list[RenderableType] = [Text(), sums, Text(), jobs, Text(), line]
    parts += [Text(note, "yellow") for note in result.notes]
    if files:
        places = Table.grid(padding=(0, 2))
        for what, where in files:
            places.add_row(Text(what, "bold"), Text(where))
        parts += [Text(), places]
    return Group(*parts)


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.2f} %"
