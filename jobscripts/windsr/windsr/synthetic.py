"""Synthetic fields that resemble wind over mountains, made from a seed, so that everything runs
without data.

Terrain is spectral noise: a sum of waves with random phases whose power falls with the wave number.
The wind is a mass-consistent flow, as in diagnostic wind models (Sherman 1978, "A mass-consistent
model for wind fields over complex terrain", J. Appl. Meteorol. 17, 312-319): a first guess, from
the weather and the exposure of each place, is changed as little as possible (least squares) until
mass is conserved. This is done in two dimensions for the layer between the ground and a lid: the
divergence of the mass flux q = h·u of the layer's depth h is zero. On a periodic domain the
smallest change is the projection q − ∇∇⁻²(∇·q), one division in Fourier space. This is no weather
model: it has no time steps, and fields of one day share their weather.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from windsr.fields import Fields

SEA_SHARE = 0.15
"""Share of the domain that is sea."""
EXPOSURE_DISTANCE_M = 20_000.0
"""Distance over which the mean terrain is taken, m. The height of a place relative to that mean is
its exposure.
"""
EXPOSURE_FACTOR = 0.8
"""Relative change of the first guess per unit of relative height."""
LAND_SPEED_FACTOR = 0.7
"""Wind at 10 m over land relative to that over the smoother sea."""
MIN_DEPTH_M, LID_M = 600.0, 2500.0
"""The layer is ``LID_M`` minus the terrain, at least ``MIN_DEPTH_M``, m."""


def _waves(
    rows: int, columns: int, spacing: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (ky, kx) of numpy's real FFT, rad/m. The waves at half the sampling rate are 0,
    because a derivative is not defined there.
    """
    ky = 2 * np.pi * np.fft.fftfreq(rows, spacing)
    kx = 2 * np.pi * np.fft.rfftfreq(columns, spacing)
    if rows % 2 == 0:
        ky[rows // 2] = 0.0
    if columns % 2 == 0:
        kx[-1] = 0.0
    grid = np.meshgrid(ky, kx, indexing="ij")
    return grid[0], grid[1]


def spectral_noise(
    rng: np.random.Generator,
    rows: int,
    columns: int,
    spacing: float,
    slope: float,
    longest_m: float,
) -> NDArray[np.float64]:
    """Return periodic noise, [rows, columns], with mean 0 and standard deviation 1. Its power falls
    as k^-``slope`` and is constant for waves longer than ``longest_m``.
    """
    ky = 2 * np.pi * np.fft.fftfreq(rows, spacing)[:, None]
    kx = 2 * np.pi * np.fft.rfftfreq(columns, spacing)[None]
    k = np.hypot(ky, kx)
    amplitude = np.maximum(k, 2 * np.pi / longest_m) ** (-slope / 2)
    amplitude[0, 0] = 0.0
    field = np.fft.irfft2(
        np.fft.rfft2(rng.standard_normal((rows, columns))) * amplitude, s=(rows, columns)
    )
    return np.asarray(field / field.std())


def terrain(
    rng: np.random.Generator, size: int, spacing: float, relief: float
) -> NDArray[np.float64]:
    """Return terrain, [size, size] m: sea at 0, and land above it. ``relief``: standard deviation
    before the sea is filled, m. The slope 3.2 is that of mountains.
    """
    height = (
        spectral_noise(rng, size, size, spacing, slope=3.2, longest_m=size * spacing / 2) * relief
    )
    return np.maximum(height - np.quantile(height, SEA_SHARE), 0.0)


def mass_consistent(
    qy: NDArray[np.float64], qx: NDArray[np.float64], spacing: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the flux without divergence that is closest to (qy, qx) in the mean square: q −
    ∇∇⁻²(∇·q), periodic.
    """
    ky, kx = _waves(qy.shape[0], qy.shape[1], spacing)
    fy, fx = np.fft.rfft2(qy), np.fft.rfft2(qx)
    k2 = ky**2 + kx**2
    along = np.divide(ky * fy + kx * fx, k2, out=np.zeros_like(fy), where=k2 > 0)
    return np.fft.irfft2(fy - ky * along, s=qy.shape), np.fft.irfft2(fx - kx * along, s=qy.shape)


def flow(
    rng: np.random.Generator,
    height: NDArray[np.float64],
    spacing: float,
    speed: float,
    direction: float,
    gusts: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mass flux (qy, qx) in m²/s over ``height`` (m), without divergence. Divided by
    :func:`depth` it is the wind.

    Args:
        height: terrain, m.
        spacing: distance of grid points, m.
        speed, direction: mean wind of the weather, m/s and radians.
        gusts: standard deviation of its larger eddies, m/s.
        rng: source of the random numbers.
    """
    rows, columns = height.shape
    ky = 2 * np.pi * np.fft.fftfreq(rows, spacing)[:, None]
    kx = 2 * np.pi * np.fft.rfftfreq(columns, spacing)[None]
    smooth = np.fft.irfft2(
        np.fft.rfft2(height) * np.exp(-((ky**2 + kx**2) * EXPOSURE_DISTANCE_M**2) / 8),
        s=height.shape,
    )
    relative = (height - smooth) / max(float((height - smooth).std()), 1.0)
    exposure = np.clip(1 + EXPOSURE_FACTOR * 0.5 * relative, 0.3, 2.0) * np.where(
        height > 0, LAND_SPEED_FACTOR, 1.0
    )
    h = depth(height)
    eddies = [
        gusts * spectral_noise(rng, rows, columns, spacing, slope=4.0, longest_m=rows * spacing / 2)
        for _ in range(2)
    ]
    qy = h * exposure * (speed * np.sin(direction) + eddies[0])
    qx = h * exposure * (speed * np.cos(direction) + eddies[1])
    return mass_consistent(qy, qx, spacing)


def depth(height: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the depth of the layer over terrain of ``height`` m, m."""
    return np.maximum(LID_M - height, MIN_DEPTH_M)


def generate(
    days: int = 4,
    hours: int = 8,
    size: int = 128,
    spacing: float = 2000.0,
    relief: float = 250.0,
    seed: int = 0,
) -> Fields:
    """Return ``days`` × ``hours`` fields of ``size`` × ``size`` points over one terrain. Each day
    has its own weather, which turns slowly.
    """
    rng = np.random.default_rng(seed)
    height = terrain(rng, size, spacing, relief)
    winds, times = [], []
    for day in range(days):
        speed, direction = 4 + 8 * rng.random(), 2 * np.pi * rng.random()
        turn = 0.1 * rng.standard_normal()
        for hour in range(hours):
            qy, qx = flow(
                rng,
                height,
                spacing,
                speed * (1 + 0.05 * rng.standard_normal()),
                direction + turn * hour,
                0.15 * speed,
            )
            winds.append(np.hypot(qy, qx) / depth(height))
            times.append(
                np.datetime64("2017-06-01T00", "s")
                + np.timedelta64(24 * day + hour * (24 // max(hours, 1)), "h")
            )
    axis = np.arange(size) * spacing
    return Fields(
        np.stack(winds).astype(np.float32),
        height.astype(np.float32),
        np.array(times),
        axis,
        axis.copy(),
        f"synthetic (days {days}, hours {hours}, size {size}, spacing {spacing:g} m, relief "
        f"{relief:g} m, seed {seed})",
    )
