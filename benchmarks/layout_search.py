"""How often the search for a node's layout finds a good one, in simulated searches with known
answers.

    python -m benchmarks.layout_search [--searches 400] [--layouts 8] [--json]

Each search (``jpa/layout.py``) is over layouts whose true throughputs are drawn between 50 and 100
samples/s; the first is the default. A batch lasts 0.5 s or three steps, the first second or two
steps of a visit are dropped, a change of the layout costs 2.5 s, and the search ends after 60 s.
The same seeds are searched with the relative deviation of a batch estimated from all layouts
together (``pooled``, as the product does) and from each layout alone (``own``, Welch's intervals).

The noise of a batch: ``normal`` with a relative deviation of 2 to 20 %; ``unequal``, where each
layout's deviation is 0.5 to 2 times 10 %; ``heavy``, Student's t with three degrees of freedom;
``stalls``, where each tenth batch is 10 to 70 % slower; ``load``, where other work slows everything
by 40 % for about 10 of each 30 s.

``good``: fraction of the searches whose choice reaches 0.95 of the best. ``mean``: mean of choice ÷
best. ``worse``: fraction whose choice is below 0.98 of the default. ``abandoned``: fraction of
searches over the same layouts that leave a default 5 % faster than all others. ``time_s``: mean
duration.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jpa.layout import LayoutSearch, NodeLayout, SearchConfig

SWITCH_S = 2.5
MIN_RATE = 0.05
"""Lower bound on the factor of a batch."""


@dataclass(frozen=True)
class Noise:
    """Noise of batches."""

    name: str
    deviation: float
    """Relative standard deviation, except of stalls and load."""
    unequal: bool = False
    """Whether each layout has a deviation of its own."""
    degrees: int = 0
    """Degrees of freedom of Student's t; 0: normal."""
    stalls: bool = False
    """Whether some batches are slow."""
    load: bool = False
    """Whether other work slows all layouts at times."""


NOISES = (
    *(Noise("normal", deviation) for deviation in (0.02, 0.05, 0.1, 0.2)),
    Noise("unequal", 0.1, unequal=True),
    Noise("heavy", 0.1, degrees=3),
    Noise("stalls", 0.05, stalls=True),
    Noise("load", 0.05, load=True),
)
STEPS_S = (0.05, 0.4)


class World:
    """The node of one simulated search.

    Args:
        rates: layout → its true throughput, samples/s.
        noise: noise of batches.
        step_s: duration of a step, seconds.
        seed: seed of the random numbers.
    """

    def __init__(
        self, rates: Mapping[NodeLayout, float], noise: Noise, step_s: float, seed: int
    ) -> None:
        self._random = random.Random(seed)
        self._rates = rates
        self._noise = noise
        self.batch_s = max(0.5, 3 * step_s)
        self.visit_s = max(1.0, 2 * step_s)
        """Time that is dropped at the beginning of a visit, seconds."""
        draw = self._random.uniform
        self._factors = {x: draw(0.5, 2.0) if noise.unequal else 1.0 for x in rates}
        self._is_loaded = False

    def advance(self, seconds: float) -> float:
        """Let time pass, and return it."""
        mean_s = 10.0 if self._is_loaded else 20.0
        if self._random.random() < seconds / mean_s:
            self._is_loaded = not self._is_loaded
        return seconds

    def batch(self, layout: NodeLayout) -> float:
        """Return the measured throughput of a batch, samples/s."""
        noise, draw = self._noise, self._random
        error = draw.gauss(0.0, 1.0)
        if noise.degrees:
            squares = sum(draw.gauss(0.0, 1.0) ** 2 for _ in range(noise.degrees))
            # Student's t, scaled to variance 1.
            error *= math.sqrt(noise.degrees / squares) / math.sqrt(
                noise.degrees / (noise.degrees - 2)
            )
        factor = 1.0 + noise.deviation * self._factors[layout] * error
        if noise.stalls and draw.random() < 0.1:
            factor *= draw.uniform(0.3, 0.9)
        if noise.load and self._is_loaded:
            factor *= 0.6
        return self._rates[layout] * max(MIN_RATE, factor)


def search(world: World, rates: Mapping[NodeLayout, float], config: SearchConfig) -> LayoutSearch:
    """Return the search at its end."""
    state = LayoutSearch.of(rates, config).spent(world.advance(world.visit_s))
    layout = state.layout
    while state.outcome is None:
        state = state.measured(world.batch(layout), 1).spent(world.advance(world.batch_s))
        if state.outcome is None and state.layout != layout:
            layout = state.layout
            state = state.spent(world.advance(SWITCH_S + world.visit_s))
    return state


def some_rates(seed: int, layouts: int) -> dict[NodeLayout, float]:
    """Return random throughputs of ``count`` layouts."""
    draw = random.Random(1000 + seed)
    return {NodeLayout(n + 1, 1): draw.uniform(50.0, 100.0) for n in range(layouts)}


def cell(
    noise: Noise, step_s: float, config: SearchConfig, searches: int, layouts: int
) -> dict[str, Any]:
    """Return the figures of searches with one kind of noise."""
    good = worse = abandoned = 0
    ratios, times_s = [], []
    for seed in range(searches):
        rates = some_rates(seed, layouts)
        best, default = max(rates.values()), next(iter(rates))
        end = search(World(rates, noise, step_s, seed), rates, config)
        choice = rates[end.layout]
        good += choice >= 0.95 * best
        worse += choice < 0.98 * rates[default]
        ratios.append(choice / best)
        times_s.append(min(end.seconds, config.max_seconds))
        slower = {x: 100.0 if x == default else min(rate, 95.0) for x, rate in rates.items()}
        abandoned += search(World(slower, noise, step_s, seed), slower, config).layout != default
    return {
        "noise": noise.name,
        "deviation": noise.deviation,
        "step_s": step_s,
        "good": round(good / searches, 3),
        "mean": round(statistics.fmean(ratios), 3),
        "worse": round(worse / searches, 3),
        "abandoned": round(abandoned / searches, 3),
        "time_s": round(statistics.fmean(times_s), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--searches", type=int, default=400, help="of each kind of noise")
    parser.add_argument("--layouts", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    ways: dict[str, SearchConfig] = {
        "pooled": SearchConfig(),
        "own": SearchConfig(pooled=False, min_batches=4),
    }
    rows = [
        {"way": way, **cell(noise, step_s, config, args.searches, args.layouts)}
        for step_s in STEPS_S
        for noise in NOISES
        for way, config in ways.items()
    ]
    if args.json:
        print(json.dumps({"benchmark": "layout_search", "searches": args.searches, "rows": rows}))
        return
    print("  ".join(f"{name:>9}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value!s:>9}" for value in row.values()))


if __name__ == "__main__":
    main()
