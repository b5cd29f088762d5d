"""A training sample: a part of a field, and its random numbers. Everything random about a sample is
derived from (seed, number of the sample), so that it is the same on every node and after every
interruption.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from windsr import WindsrError
from windsr.fields import Fields
from windsr.grids import block_mean, interpolate
from windsr.presets import Preset

MIN_DIVISOR_MS = 0.5
"""Minimum divisor of relative wind, m/s."""


@dataclass(frozen=True)
class Scales:
    """Divisors from the training days: mean and standard deviation of wind (m/s), standard
    deviation of the residual of bicubic interpolation (m/s), standard deviation of terrain (m),
    highest wind (m/s).
    """

    wind_mean: float
    wind_std: float
    residual_std: float
    terrain_std: float
    wind_max: float

    def to_dict(self) -> dict[str, float]:
        """Return the scales as plain numbers."""
        return asdict(self)


def scales_of(fields: Fields, preset: Preset) -> Scales:
    """Return the scales of a set of fields for a method of this preset. With relative wind, the
    first three are shares of the coarse field's mean.
    """
    factor = preset.factor
    rows, columns = (n // factor * factor for n in fields.terrain.shape)
    wind = torch.from_numpy(np.ascontiguousarray(fields.wind[:, None, :rows, :columns]))
    low = block_mean(wind, factor)
    residual = wind - interpolate(low, factor, preset.constrained)
    unit = unit_of(low, preset.relative)
    seen, residual = wind / unit, residual / unit
    least = 1e-3
    return Scales(
        float(seen.mean()), max(float(seen.std()), least), max(float(residual.std()), least),
        max(float(fields.terrain.std()), 1.0), float(wind.max()),
    )  # fmt: skip


def unit_of(low: torch.Tensor, relative: bool) -> torch.Tensor:
    """Return the divisor of the wind, [n, 1, 1, 1] m/s: the mean of each coarse field, or 1."""
    if not relative:
        return low.new_ones((len(low), 1, 1, 1))
    return low.mean(dim=(1, 2, 3), keepdim=True).clamp_min(MIN_DIVISOR_MS)


class TrainingPatches(Dataset[dict[str, Any]]):
    """``length`` samples of a training: a random field, place and orientation (8 rotations and
    reflections), and the noise and noise level of diffusion.

    Raises:
        WindsrError: the fields are smaller than a patch.
    """

    def __init__(self, fields: Fields, preset: Preset, length: int, seed: int) -> None:
        rows, columns = fields.terrain.shape
        if min(rows, columns) < preset.patch or not len(fields.times):
            raise WindsrError(
                f"{fields.source}: {len(fields.times)} fields of {rows} × {columns} points; "
                f"preset {preset.name!r} trains on patches of "
                f"{preset.patch} × {preset.patch}."
            )
        self._wind, self._terrain = fields.wind, fields.terrain
        self._preset, self._length, self._seed = preset, length, seed

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return truth and terrain [1, H, W] (m/s, m), noise [1, H, W] (normal), and the level, 0
        to noise_levels − 1.
        """
        rng = np.random.default_rng([self._seed, number])
        size = self._preset.patch
        field = rng.integers(len(self._wind))
        row, column = (int(rng.integers(n - size + 1)) for n in self._terrain.shape)
        turn, mirror = int(rng.integers(4)), bool(rng.integers(2))

        def piece(array: np.ndarray) -> torch.Tensor:
            cut = np.rot90(array[row : row + size, column : column + size], turn)
            return torch.from_numpy(np.ascontiguousarray(cut[:, ::-1] if mirror else cut))[None]

        return {
            "truth": piece(self._wind[field]),
            "terrain": piece(self._terrain),
            "level": int(rng.integers(self._preset.noise_levels)),
            "noise": torch.from_numpy(rng.standard_normal((1, size, size), dtype=np.float32)),
        }
