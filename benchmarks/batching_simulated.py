"""Jobs whose batch follows the gradient noise beside jobs with a fixed batch, in the simulator on a
machine's idle nodes (``python -m benchmarks.batching --trace FILE --node-list FILE``).

The same jobs run twice, with the plans of the product: at the script's batch, and at each scale
with the batch that has the highest goodput at a constant noise scale. Throughput is that of
malletrain.sim.workloads for ResNet-50 (:data:`FLOPS`, :data:`PARAMETERS`) with a global batch that
the nodes share. Progress is counted in samples of the script's batch: throughput times statistical
efficiency. A noise scale that changes during a training, and accuracy, are not simulated.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from allocator import ScalingCurve
from malletrain.core.goodput import BatchState, best_batch, goodput
from malletrain.sim.engine import Simulation
from malletrain.sim.model_jobs import CostModel
from malletrain.sim.settings import SimSettings
from malletrain.sim.workloads import NODE, TRAINING_COST, SimJob
from scavenger.trace.files import read, read_names
from scavenger.trace.trace import Trace

FLOPS, PARAMETERS = TRAINING_COST * 4.1e9, 25.6e6
"""Operations of training one sample, and parameters, of ResNet-50."""
BASE, MOST = 256, 8192
"""The script's global batch and the largest one, samples."""
LARGEST = 32
"""Maximum number of nodes of a job."""
SHOWN = (1, 4, 16)
ENDLESS = 1e12
"""Work of a job that does not end within the simulation, samples."""
COSTS = CostModel(up_s=1.1, down_s=0.34, start_s=3.8, mode="live", step_s=0.5)
"""Costs of a change of 400 MB in live mode on an H100, as in benchmarks.goodput."""


@dataclass(frozen=True)
class Row:
    """One noise scale; means over the draws."""

    noise_scale: float
    """Relative to the script's batch."""
    batches: tuple[int, ...]
    """The batch with the highest goodput on 1, 4 and 16 nodes."""
    progress: float
    """Samples of the script's batch that are processed, relative to the fixed batch."""
    spread: tuple[float, float]
    """Smallest and largest ratio of a draw."""


def rate(nodes: int, batch: int) -> float:
    """Return the throughput with a global batch that the nodes share, samples/s."""
    return replace(NODE, batch=max(1, round(batch / nodes))).rate(FLOPS, PARAMETERS, nodes)


def curves(state: BatchState) -> tuple[ScalingCurve, ScalingCurve]:
    """Return the throughput at the script's batch, and the goodput at the batch that follows the
    noise.
    """
    fixed = ScalingCurve.of((k, rate(k, BASE)) for k in range(1, LARGEST + 1))
    return fixed, goodput(fixed, state, gain)


def gain(nodes: int, ratio: float) -> float:
    """Return the throughput at ``ratio`` times the script's batch, relative to that at the script's
    batch.
    """
    return rate(nodes, round(BASE * ratio)) / rate(nodes, BASE)


def simulated(
    trace: Path, node_list: Path, *, nodes: int, count: int, hours: float, seeds: int
) -> list[Row]:
    """Return a row for each noise scale.

    Args:
        trace: idle nodes of a machine.
        node_list: names of all its nodes.
        nodes: number of its nodes, drawn at random.
        count: jobs at a time.
        hours: simulated time, from hour 60 on.
        seeds: number of draws.
    """
    begin_s = 60.0 * 3600.0
    window = read(trace, names=read_names(node_list)).window(begin_s, begin_s + hours * 3600.0)
    draws = [window.sample(nodes, seed) for seed in range(seeds)]
    fixed = None
    rows = []
    for noise in (0.0, 1.0, 4.0, 16.0, 64.0):
        state = BatchState(BASE, BASE, MOST, noise * BASE)
        fixed_curve, own_curve = curves(state)
        fixed = fixed or [progress(draw, fixed_curve, count) for draw in draws]
        own = (progress(draw, own_curve, count) for draw in draws)
        ratios = [a / b for a, b in zip(own, fixed, strict=True)]
        batches = tuple(best_batch(nodes, state, gain)[0] for nodes in SHOWN)
        rows.append(Row(noise, batches, *_summary(ratios)))
    return rows


def _summary(ratios: Iterable[float]) -> tuple[float, tuple[float, float]]:
    values = list(ratios)
    return statistics.fmean(values), (min(values), max(values))


def progress(trace: Trace, curve: ScalingCurve, count: int) -> float:
    """Return what ``count`` endless jobs with this curve process on a trace, samples."""
    jobs = [
        SimJob(f"job-{number:02}", 1, LARGEST, ENDLESS, curve, stated_curve=curve)
        for number in range(count)
    ]
    simulation = Simulation(trace, jobs, SimSettings(costs=COSTS, max_running=count))
    simulation.run()
    return sum(run.done for run in simulation.runs.values())
