"""Examines the records of the workers of a soak: every guarantee of live mode that they can show.

A record is one counted step on one worker: its number, round, rank and size, the samples used, a
hash of the state after it. The expected samples are known beforehand, because the order of an epoch
is a function of the seed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from malletrain import ElasticSampler

SAMPLES, BATCH, SEED = 4800, 48, 3
"""Samples and batch of the soak's training (benchmarks/train_soak.py)."""
STEPS_PER_EPOCH = SAMPLES // BATCH

Record = dict[str, Any]


@lru_cache(maxsize=4096)
def _batch(step: int, rank: int, size: int) -> tuple[int, ...]:
    """Return the samples that ``rank`` of ``size`` trains on in step ``step`` (from 1)."""
    sampler = ElasticSampler(
        SAMPLES,
        global_batch_size=BATCH,
        seed=SEED,
        rank=rank,
        world_size=size,
        max_world_size=max(size, 8),
    )
    epoch, number = divmod(step - 1, STEPS_PER_EPOCH)
    sampler.set_position(epoch, number * BATCH)
    return tuple(next(iter(sampler)))


def records(folder: Path) -> list[Record]:
    """Return all complete records; ``worker`` is the name of its file."""
    records = []
    for path in folder.glob("steps-*"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # cut by SIGKILL
                records.append({**json.loads(line), "worker": path.name})
    return records


def histories(records: Iterable[Record]) -> tuple[dict[int, list[Record]], list[int]]:
    """Return (records of the final run of each step, number of repeated steps of each round that
    went back).
    """
    final: dict[int, list[Record]] = defaultdict(list)
    repeated: list[int] = []
    generation = newest = 0
    for record in sorted(records, key=lambda r: (r["generation"], r["step"])):
        step = record["step"]
        if record["generation"] > generation and step <= newest:
            # steps that only the lost workers had finished, or, if nobody was left, those since the
            # last
            repeated.append(newest - step + 1)
            for given_up in [s for s in final if s >= step]:
                del final[given_up]
        generation, newest = record["generation"], step
        final[step].append(record)
    return final, repeated


def _follows_a_snapshot(next_step: list[Record], by_worker: dict[str, list[int]]) -> bool:
    """Return whether all workers of ``next_step`` were new."""
    return bool(next_step) and all(min(by_worker[r["worker"]]) == r["step"] for r in next_step)


def examine(records: list[Record]) -> dict[str, Any]:
    """Return the figures of a soak; ``broken`` lists the broken guarantees."""
    final, repeated = histories(records)
    steps = sorted(final)
    drifted = [
        s
        for s in steps
        if len({r["digest"] for r in final[s]}) > 1 or len({r["samples"] for r in final[s]}) > 1
    ]
    wrong = [
        r
        for r in records
        if r["seen"] != list(_batch(r["step"], r["rank"], r["size"]))
        or r["epoch"] != (r["step"] - 1) // STEPS_PER_EPOCH
    ]
    # The ranks of one round share a step; the same step in two rounds would use its samples twice.
    split = [s for s in steps if len({(r["generation"], r["size"]) for r in final[s]}) > 1]
    twice = [s for s in steps if len({r["rank"] for r in final[s]}) < len(final[s])]
    by_worker: dict[str, list[int]] = defaultdict(list)
    for record in records:
        by_worker[record["worker"]].append(record["step"])
    # A worker may be killed between its snapshot and its line here: then only joiners continue,
    # from
    missing = [
        s
        for s in range(1, steps[-1] if steps else 0)
        if s not in final and not _follows_a_snapshot(final.get(s + 1, []), by_worker)
    ]
    leaps = [b - a for walked in by_worker.values() for a, b in itertools.pairwise(walked)]
    whole = [s for s in steps if {r["size"] for r in final[s]} == {len(final[s])}]
    promises = {
        "states drifted apart": len(drifted),
        "samples other than the step's": len(wrong),
        "steps counted in two rounds": len(split) + len(twice),
        "steps missing": len(missing),
        "survivors that went back": sum(leap < 1 for leap in leaps),
        "survivors that skipped more than the step in progress": sum(leap > 2 for leap in leaps),
    }
    return {
        "rounds_trained": len({r["generation"] for r in records}),
        "steps": len(steps),
        "steps_written_down_by_all_ranks": len(whole),
        "rounds_that_repeated_one_step": sum(n == 1 for n in repeated),
        "rounds_from_a_snapshot": sum(n > 1 for n in repeated),
        "steps_repeated_from_snapshots": sum(n for n in repeated if n > 1),
        "world_sizes": sorted({r["size"] for r in records}),
        "broken": {name: count for name, count in promises.items() if count},
    }
