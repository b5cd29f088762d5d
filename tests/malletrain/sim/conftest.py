"""Small machines, and the public data where it is present."""

from __future__ import annotations

from pathlib import Path

import pytest

from allocator import ScalingCurve
from malletrain.sim.workloads import SimJob
from scavenger.trace.trace import Trace

DATA = Path(__file__).parents[3].parent / "shared" / "data"


def shared(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} is not here")
    return path


def trace_of(gaps, duration, nodes=None):
    """A trace from {node: [(idle from, to), ...]}."""
    names = sorted(gaps) if nodes is None else nodes
    rows = [(names.index(name), a, b) for name, spans in gaps.items() for a, b in spans]
    return Trace.from_gaps(
        [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows], names, duration
    )


def linear(largest=8, rate=10.0):
    return ScalingCurve.of({1: rate, largest: rate * largest})


def job(name="job", samples=1e9, most=8, rate=10.0, **more):
    curve = linear(most, rate)
    return SimJob(
        name,
        more.pop("min_nodes", 1),
        more.pop("max_nodes", most),
        samples,
        curve,
        stated_curve=curve,
        **more,
    )
