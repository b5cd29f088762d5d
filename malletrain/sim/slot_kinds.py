"""Kinds of slots in a simulation: which slot is of which kind, what it costs, and how much of each
kind was used. Decides no plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from malletrain.sim.model_jobs import SimRun
from malletrain.sim.workloads import SimJob, WorkloadError
from scavenger.trace.trace import Trace

DEFAULT = "default"
"""Kind of all nodes of a trace without kinds."""


@dataclass(frozen=True)
class SlotKinds:
    """Kinds of slots."""

    kind_of: Mapping[str, str] = field(default_factory=dict)
    """Slot → its kind; others are of kind :data:`DEFAULT`."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Kind → node-hours that an hour of one slot counts, above 0; others count 1."""

    def of(self, slot: str) -> str:
        """Return the kind of a slot."""
        return self.kind_of.get(slot, DEFAULT)

    def require(self, jobs: Iterable[SimJob], slots: Sequence[str]) -> None:
        """Raise WorkloadError if a job runs on a kind that the trace does not have.

        Args:
            jobs: jobs of the workload.
            slots: all slots of the trace.
        """
        kinds = {*map(self.of, slots)}
        for job in jobs:
            if job.node_class and job.node_class not in kinds:
                raise WorkloadError(
                    f"Job {job.name} runs on slots of kind {job.node_class}; the trace has "
                    f"{', '.join(sorted(kinds))}."
                )


@dataclass(frozen=True)
class KindResult:
    """The use of one kind of slots in a simulation.

    Attributes:
        kind: its name.
        slots: number of slots.
        price: node-hours that one hour of a slot counts.
        idle_slot_hours: hours of idle slots.
        harvested_fraction: fraction of these in which samples were processed.
        allocated_slot_hours: hours in which jobs had slots, pauses included.
        charged_node_hours: ``price`` times these.
    """

    kind: str
    slots: int
    price: float
    idle_slot_hours: float
    harvested_fraction: float
    allocated_slot_hours: float
    charged_node_hours: float


def use_by_kind(
    kinds: SlotKinds, trace: Trace, runs: Iterable[SimRun], end_s: float
) -> tuple[KindResult, ...]:
    """Return the use of each kind, in order of names.

    Args:
        kinds: kinds of slots.
        trace: idle slots over time.
        runs: jobs of the simulation.
        end_s: its end, seconds.
    """
    idle: defaultdict[str, float] = defaultdict(float)
    gaps = trace.window(0.0, end_s).gaps() if end_s > 0 else trace.gaps()
    for slot, length in zip(gaps.node.tolist(), gaps.length.tolist(), strict=True):
        idle[kinds.of(trace.names[slot])] += length
    trained: defaultdict[str, float] = defaultdict(float)
    allocated: defaultdict[str, float] = defaultdict(float)
    for run in runs:
        for kind, use in run.use.items():
            trained[kind] += use.trained_s
            allocated[kind] += use.allocated_s
    slots = Counter(map(kinds.of, trace.names))
    return tuple(
        KindResult(
            kind=kind,
            slots=slots[kind],
            price=(price := kinds.prices.get(kind, 1.0)),
            idle_slot_hours=idle[kind] / 3600.0,
            harvested_fraction=trained[kind] / idle[kind] if idle[kind] else 0.0,
            allocated_slot_hours=allocated[kind] / 3600.0,
            charged_node_hours=price * allocated[kind] / 3600.0,
        )
        for kind in sorted(slots)
    )
