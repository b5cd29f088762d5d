"""The jobs of the demo, their work, the trace and the configuration. Pure; starts nothing.

Pace of the work: a virtual node stands for an accelerator, so every worker sleeps a fixed time per
sample (``--sample-delay``), and more nodes are faster although all share one machine. Therefore a
job's work in node-seconds is known before it starts. It is chosen as a fraction of the node-seconds
in the trace (:func:`share`), so that the jobs run for most of the trace. After the trace all nodes
stay idle, so that jobs also complete on a slow machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scavenger.trace.trace import Trace

TRAINING_SAMPLES = 1437
"""Images per epoch of the digits example (1,797 less 360 for the test)."""
SAMPLES_PER_S = 450.0
"""Throughput of one virtual node, samples/s."""
GRACE_S = 3.0
NOTICE, NOTICE_CHAOS = 0.8, 0.5
"""Fraction of preemptions that are announced."""


@dataclass(frozen=True)
class DemoJob:
    """One training job: ``share`` of the total work, ``min``:``max`` nodes, and the arguments that
    distinguish its network from the others'.
    """

    name: str
    share: float
    min_nodes: int
    max_nodes: int
    batch_size: int
    hidden: int
    lr: float

    def epochs(self, node_seconds: float) -> int:
        """Return the number of epochs that take its share of ``node_seconds``; at least 4, so that
        the network learns with any trace.
        """
        return max(4, round(self.share * node_seconds * SAMPLES_PER_S / TRAINING_SAMPLES))

    def nodes(self, machine: int) -> str:
        """Return ``--nodes`` on a machine of that many nodes."""
        return f"{min(self.min_nodes, machine)}:{min(self.max_nodes, machine)}"

    def arguments(self, node_seconds: float, seed: int) -> list[str]:
        """Return the arguments of the script that decide what is learnt: the same for the
        undisturbed run."""
        words = {
            "--epochs": self.epochs(node_seconds),
            "--batch-size": self.batch_size,
            "--hidden": self.hidden,
            "--lr": self.lr,
            "--seed": seed,
        }
        return [str(word) for pair in words.items() for word in pair]


JOBS = (
    DemoJob("digits-wide", 0.40, 1, 4, batch_size=128, hidden=256, lr=0.05),
    DemoJob("digits-small", 0.30, 1, 3, batch_size=96, hidden=64, lr=0.05),
    DemoJob("digits-pair", 0.30, 2, 4, batch_size=128, hidden=128, lr=0.08),
)


def share(start_s: float) -> float:
    """Return the work of all jobs divided by the node-seconds of the trace, on a machine that
    needs ``start_s`` seconds to load PyTorch. The rest is the cost of leasing, rescaling and
    preemption, mostly the time that a new node needs to load PyTorch.
    """
    return min(0.75, max(0.3, 0.8 - 0.035 * start_s))


def pacing_arguments() -> list[str]:
    """Return the arguments of the script that only make it slower."""
    return ["--sample-delay", f"{1 / SAMPLES_PER_S:.6f}"]


def config_text(state_dir: Path, cluster_dir: Path, port: int, nodes: int) -> str:
    """Return the daemon's configuration. Its times are for a machine with gaps of minutes,
    shortened by the same factor as the trace.
    """

    def quoted(path: Path) -> str:
        return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'

    return f"""\
# Written by 'malletrain demo'. The times are short because the trace is played fast.
[daemon]
state_dir = {quoted(state_dir)}
listen = "tcp://127.0.0.1:{port}"
metrics_listen = "off"
heartbeat = "1 s"
agent_timeout = "5 s"
adopt_wait = "3 s"

[scheduler]
kind = "local"
poll_interval = "500 ms"

[scheduler.local]
nodes = {nodes}
directory = {quoted(cluster_dir)}
grace = "{GRACE_S:g} s"
autostart = false

[jobs]
drain_timeout = "4 s"
join_timeout = "30 s"
stop_grace = "2 s"
starvation = "40 s"
turns_apart = 1.0

[allocation]
t_fwd = "30 s"
debounce = "500 ms"
min_interval = "4 s"
rescale_up = "2 s"
rescale_down = "2 s"
start = "4 s"
release_after = "10 s"

[profiling]
when_worth = false
min_time = "2.5 s"
max_time = "8 s"
precision = 0.1
silence = "15 s"
lease_patience = "3 s"
patience = "15 s"
donor_quiet = "15 s"
max_profile = "45 s"
observe_every = "8 s"
"""


def offered_node_seconds(idle: Sequence[tuple[float, float]], end: float) -> float:
    """Return the idle node-seconds until ``end`` of a step function: (time, idle nodes) from each
    time on."""
    total = 0.0
    for k, (moment, count) in enumerate(idle):
        until = idle[k + 1][0] if k + 1 < len(idle) else end
        total += max(0.0, min(until, end) - moment) * count
    return total


def with_calm_start(trace: Trace, calm_s: float) -> Trace:
    """Return ``trace`` after a beginning of ``calm_s`` seconds in which all its nodes are idle."""
    if calm_s <= 0:
        return trace
    later = trace.time > 0
    taken = np.flatnonzero(~trace.idle_at(0.0))
    every = np.arange(len(trace.names))
    return Trace.validated(
        np.concatenate(
            [np.zeros(len(every)), np.full(len(taken), calm_s), trace.time[later] + calm_s]
        ),
        np.concatenate([every, taken, trace.node[later]]),
        np.concatenate(
            [np.ones(len(every), np.bool_), np.zeros(len(taken), np.bool_), trace.idle[later]]
        ),
        trace.names,
        trace.duration_s + calm_s,
    )
