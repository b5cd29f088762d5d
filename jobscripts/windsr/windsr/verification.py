"""Scores of an ensemble of fields besides its error: spread and skill, ranks, power by wavelength,
tails. No I/O.

All functions take truth [n, H, W] and members [n, k, H, W] in m/s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windsr.evaluate import crps

TAILS = (0.01, 0.99, 0.999)
"""Quantiles of wind at which tails are compared."""


def spread_skill(truth: NDArray[np.floating], members: NDArray[np.floating]) -> float:
    """Return the spread of the members divided by the error of their mean: 1 if the members are
    distributed like the truth, below 1 if they are too similar. NaN for one member.

    √((k + 1)/k · mean variance) / RMSE of the mean, which is 1 for k members and a truth from one
    distribution (Fortin et al. 2014, J. Hydrometeorol. 15, eq. 15).
    """
    k = members.shape[1]
    if k < 2:
        return float("nan")
    variance = members.var(axis=1, ddof=1, dtype=np.float64).mean()
    error = ((members.mean(axis=1, dtype=np.float64) - truth) ** 2).mean()
    return float(np.sqrt((k + 1) / k * variance / max(float(error), 1e-12)))


def rank_histogram(
    truth: NDArray[np.floating], members: NDArray[np.floating]
) -> NDArray[np.float64]:
    """Return the share of pixels by the rank of the truth among the members, k + 1 shares: equal if
    the members are distributed like the truth, high at both ends if they are too similar. Ties
    count half for each side.
    """
    k = members.shape[1]
    below = (members < truth[:, None]).sum(axis=1)
    same = (members == truth[:, None]).sum(axis=1)
    counts = np.zeros(k + 1)
    untied = same == 0
    counts += np.bincount(below[untied].ravel(), minlength=k + 1)
    for first, width in zip(below[~untied].ravel(), same[~untied].ravel(), strict=True):
        counts[first : first + width + 1] += 1 / (width + 1)
    return np.asarray(counts / counts.sum())


def spectrum(
    fields: NDArray[np.floating], spacing: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(wavelength in m, power in m²/s² per wave number), the mean over fields [n, H, W] of power by
    wave number, all directions together. The mean is taken off and a Hann window laid on, because
    the fields do not repeat.

    Wave numbers are counted in waves over the shorter side, from 1 to half its pixels.
    """
    rows, columns = fields.shape[-2:]
    short = min(rows, columns)
    window = np.outer(np.hanning(rows), np.hanning(columns))
    window /= np.sqrt((window**2).mean())
    rest = fields - fields.mean(axis=(-2, -1), keepdims=True)
    power = np.abs(np.fft.fft2(rest * window)) ** 2 / (rows * columns) ** 2
    ky, kx = np.meshgrid(np.fft.fftfreq(rows), np.fft.fftfreq(columns), indexing="ij")
    waves = np.rint(np.hypot(ky, kx) * short).astype(int)
    sums = np.array(
        [np.bincount(waves.ravel(), p.ravel(), short // 2 + 1)[1 : short // 2 + 1] for p in power]
    )
    numbers = np.arange(1, short // 2 + 1)
    return short * spacing / numbers, sums.mean(axis=0)


def fine_power(
    truth: NDArray[np.floating], made: NDArray[np.floating], spacing: float, factor: int
) -> float:
    """Return the power of ``made`` [n, H, W] divided by the truth's, at wavelengths below the
    resolution of the coarse grid (two of its cells).
    """
    wavelength, true = spectrum(truth, spacing)
    _, own = spectrum(made, spacing)
    fine = wavelength < 2 * factor * spacing
    return float(own[fine].sum() / true[fine].sum())


def tails(truth: NDArray[np.floating], made: NDArray[np.floating]) -> dict[str, float]:
    """Return quantile of :data:`TAILS` → its value in ``made`` minus that in the truth, m/s."""
    return {f"{q:g}": float(np.quantile(made, q) - np.quantile(truth, q)) for q in TAILS}


def ensemble_scores(
    truth: NDArray[np.floating], members: NDArray[np.floating], spacing: float, factor: int
) -> dict[str, Any]:
    """Return all scores: ``crps``, ``rmse`` and ``fine_power`` of the members' mean;
    ``rmse_member``, ``fine_power_member`` and ``tails`` of the first member; ``spread_skill``,
    ``ranks``.
    """
    mean, first = members.mean(axis=1), members[:, 0]
    return {
        "members": members.shape[1],
        "rmse": float(np.sqrt(((mean - truth) ** 2).mean())),
        "rmse_member": float(np.sqrt(((first - truth) ** 2).mean())),
        "crps": crps(truth, members),
        "spread_skill": spread_skill(truth, members),
        "ranks": rank_histogram(truth, members).tolist(),
        "fine_power": fine_power(truth, mean, spacing, factor),
        "fine_power_member": fine_power(truth, first, spacing, factor),
        "tails": tails(truth, first),
    }
