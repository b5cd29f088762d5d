"""The trainings of benchmarks.batching. The duration of a step follows the law of :func:`step_s`,
so that it scales although all virtual nodes share one machine.

    train_batching.py ramp SIZES SAMPLES    global batch of each epoch (64,64,128), samples of one
    train_batching.py steady                the same throughput on each node, without an end
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import malletrain

OVERHEAD_S, SAMPLE_S, EXCHANGE_S = 0.005, 0.002, 0.06
"""Parts of a step, seconds: the constant part, one sample on one node, and the exchange of
gradients among very many nodes.
"""
STEADY_RATE = 150.0
"""Throughput of the steady training on one node, samples/s."""
STEADY_BATCH = 24


def step_s(nodes: int, batch: float) -> float:
    """Return the duration of a step, seconds. ``batch``: samples over all nodes."""
    return OVERHEAD_S + SAMPLE_S * batch / nodes + EXCHANGE_S * (nodes - 1) / nodes


def ramp(sizes: list[int], samples: int) -> None:
    """Train an epoch with each of ``sizes``. Rank 0 writes the position after each step, and the
    time at which the batch changes.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    state, changes = Path("state.json"), Path("changes.txt")
    sampler = malletrain.ElasticSampler(samples, global_batch_size=sizes[0], shuffle=False)
    if state.exists():
        sampler.load_state_dict(json.loads(state.read_text()))
    for epoch in sampler.epochs(len(sizes)):
        before = sampler.global_batch_size
        sampler.set_global_batch_size(sizes[epoch])
        if rank == 0 and sampler.global_batch_size != before:
            with changes.open("a") as file:
                print(time.time(), sampler.global_batch_size, file=file)
        for batch in sampler:
            ((_, size),) = sampler.upcoming(1)
            time.sleep(step_s(world, size))
            sampler.advance()
            malletrain.report(len(batch))
            if rank == 0:
                written = state.with_suffix(".new")
                written.write_text(json.dumps(sampler.state_dict()))
                written.replace(state)


def steady() -> None:
    """Train until a file named ``stop`` exists."""
    while not Path("stop").exists():
        time.sleep(STEADY_BATCH / STEADY_RATE)
        malletrain.report(STEADY_BATCH)


if __name__ == "__main__":
    if sys.argv[1] == "ramp":
        ramp([int(size) for size in sys.argv[2].split(",")], int(sys.argv[3]))
    else:
        steady()
