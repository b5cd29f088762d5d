"""Methods to learn a scaling curve, for ``benchmarks.profiling``: which size to visit next, and the
estimate afterwards.

The product's methods are ``inverse`` and ``inverse, every size``, which skips no size. The others
are alternatives. All except the Gaussian processes record measurements in the product's own curve,
so that they differ only in the order and choice of sizes.
"""

from __future__ import annotations

import math
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jpa import MeasuredCurve, Measurement, PlanConfig, ladder, new_plan, next_size

if TYPE_CHECKING:
    from sklearn.gaussian_process import GaussianProcessRegressor

MAX_STEPS = 8


class Method(ABC):
    """One profile of one job with sizes 1..largest: ``next`` returns the size to visit (None:
    done), ``learn`` takes a measurement.
    """

    def __init__(self, largest: int, rng: random.Random) -> None:
        self.largest = largest
        self.rng = rng
        self.curve = MeasuredCurve()

    @abstractmethod
    def next(self) -> int | None: ...

    def learn(self, m: Measurement) -> None:
        self.curve = self.curve.with_measurement(m.nodes, m.rate, m.half_width, 0.0)

    def believes(self, nodes: int) -> float:
        """Return the estimated throughput at ``nodes``, samples/s."""
        return self.curve.smoothed(nodes)[0]


class Inverse(Method):
    """The product: once up to the largest size, then down the ladder; sizes that are known well
    enough are skipped.
    """

    config = PlanConfig(max_steps=MAX_STEPS)

    def __init__(self, largest: int, rng: random.Random) -> None:
        super().__init__(largest, rng)
        self.plan = new_plan(1, largest, self.curve, config=self.config)

    def next(self) -> int | None:
        size = next_size(self.plan, self.curve, self.largest)
        if size is not None:
            self.plan = self.plan.with_requested(size)
        return size

    def learn(self, m: Measurement) -> None:
        super().learn(m)
        self.plan = self.plan.with_visited(m.nodes)


class InverseEveryRung(Inverse):
    """The same down the whole ladder, without skipping."""

    config = PlanConfig(max_steps=MAX_STEPS, skip_interpolated=False, tolerance=1e-9)


class Listed(Method):
    """A list of sizes fixed beforehand."""

    sizes: list[int]

    def next(self) -> int | None:
        return self.sizes.pop(0) if self.sizes else None


class Incremental(Listed):
    """From one node up the same ladder, as a user grows a job step by step."""

    def __init__(self, largest: int, rng: random.Random) -> None:
        super().__init__(largest, rng)
        self.sizes = list(reversed(ladder(1, largest, max_steps=MAX_STEPS)))


class Grid(Listed):
    """Evenly spaced sizes, in ascending order."""

    def __init__(self, largest: int, rng: random.Random) -> None:
        super().__init__(largest, rng)
        steps = min(MAX_STEPS, largest)
        self.sizes = sorted({round(1 + i * (largest - 1) / (steps - 1)) for i in range(steps)})


class Random(Listed):
    """Sizes drawn without replacement."""

    def __init__(self, largest: int, rng: random.Random) -> None:
        super().__init__(largest, rng)
        self.sizes = rng.sample(range(1, largest + 1), min(MAX_STEPS, largest))


class Gaussian(Method):
    """A Gaussian process on ln(throughput per node) over log2(nodes), Matérn 5/2; the two ends
    first, then the highest ``score``. It needs scikit-learn, whose import takes a second.
    """

    def __init__(self, largest: int, rng: random.Random) -> None:
        super().__init__(largest, rng)
        self.x: list[float] = []
        self.y: list[float] = []
        self.noise: list[float] = []
        self.visited: list[int] = []
        self.model: GaussianProcessRegressor | None = None

    def learn(self, m: Measurement) -> None:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern, WhiteKernel

        super().learn(m)
        self.visited.append(m.nodes)
        self.x.append(math.log2(m.nodes))
        self.y.append(math.log(max(m.rate, 1e-9) / m.nodes))
        self.noise.append(max(0.01, m.half_width / 1.96 / max(m.rate, 1e-9)) ** 2)
        level = float(np.mean(self.y))
        scale = max(0.05, float(np.std(self.y)))
        self.level, self.scale = level, scale
        kernel = 1.0 * Matern(
            length_scale=2.0, length_scale_bounds=(0.5, 20), nu=2.5
        ) + WhiteKernel(1e-4, (1e-6, 1e-2))
        model = GaussianProcessRegressor(
            kernel, alpha=np.array(self.noise) / scale**2, n_restarts_optimizer=1, random_state=0
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            self.model = model.fit(np.array(self.x)[:, None], (np.array(self.y) - level) / scale)

    def predict(self, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation of ln(throughput per node)."""
        assert self.model is not None
        mean, std = self.model.predict(
            np.log2(np.array(sizes, dtype=float))[:, None], return_std=True
        )
        return mean * self.scale + self.level, std * self.scale

    def believes(self, nodes: int) -> float:
        return (
            nodes * math.exp(float(self.predict([nodes])[0][0]))
            if self.model is not None
            else float(nodes)
        )

    def next(self) -> int | None:
        for end in (self.largest, 1):
            if end not in self.visited:
                return end
        open_sizes = [k for k in range(1, self.largest + 1) if k not in self.visited]
        if not open_sizes or len(self.visited) >= MAX_STEPS:
            return None
        scores = self.score(open_sizes)
        best = int(np.argmax(scores))
        return open_sizes[best] if scores[best] > 0 else None

    def score(self, sizes: Sequence[int]) -> np.ndarray:
        """Return the expected benefit of a visit to each size; 0 or less: not worth it."""
        raise NotImplementedError


class ExpectedImprovement(Gaussian):
    """EI of the throughput (Jones, Schonlau and Welch 1998), as in configuration tuners; ends when
    it is below 1 %.
    """

    def score(self, sizes: Sequence[int]) -> np.ndarray:
        from scipy.stats import norm

        mean, std = self.predict(sizes)
        ln_rate = mean + np.log(np.array(sizes, dtype=float))
        best = max(y + math.log(k) for y, k in zip(self.y, self.visited, strict=True))
        gain = ln_rate - best
        z = gain / np.maximum(std, 1e-12)
        improvement = gain * norm.cdf(z) + std * norm.pdf(z)
        return np.where(improvement > 0.01, improvement, 0.0)


class MostUncertain(Gaussian):
    """The size with the largest uncertainty; ends when all 95 % intervals are within 5 %."""

    def score(self, sizes: Sequence[int]) -> np.ndarray:
        std = self.predict(sizes)[1]
        return np.where(1.96 * std > 0.05, std, 0.0)


METHODS: dict[str, Callable[[int, random.Random], Method]] = {
    "inverse": Inverse,
    "inverse, every size": InverseEveryRung,
    "incremental": Incremental,
    "grid": Grid,
    "random": Random,
    "GP, expected improvement": ExpectedImprovement,
    "GP, most uncertain": MostUncertain,
}
