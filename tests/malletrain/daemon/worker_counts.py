"""Counts as workers report them, for tests of the monitor."""

from __future__ import annotations

import math

from malletrain.daemon.jobs.monitor import JobMonitor
from malletrain.protocol.messages import Progress


def job_monitor(*, total=0.0, before=0.0, generation=0):
    """The monitor of job j1."""
    return JobMonitor("j1", total, before, generation)


def progress(samples, last, *, generation=1, rank=0, pid=1, batch=10.0, first=100.0, steps=None):
    steps = steps or (max(1, round(samples / batch)) if math.isfinite(samples) else 1)
    return Progress("job", generation, rank, pid, samples, steps, batch, first, last)


def trained(monitor, generation, nodes, begin, seconds, rate=100.0, interval=0.5, ranks=1):
    """A round of ``nodes`` that trains evenly: ``rate`` samples/s over all ranks, reports every
    ``interval``.
    """
    monitor.forming(generation, tuple(f"n{i}" for i in range(nodes)), begin - 5.0)
    monitor.workers_running(generation, begin - 4.0)
    each = rate / ranks
    for i in range(round(seconds / interval) + 1):
        for rank in range(ranks):
            t = i * interval
            record = progress(
                each * interval * (i + 1),
                begin + t,
                generation=generation,
                rank=rank,
                first=begin,
                batch=each * interval,
                steps=i + 1,
            )
            monitor.progress(record)
    return begin + round(seconds / interval) * interval
