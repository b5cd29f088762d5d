"""How good fine fields are: PSNR, SSIM, MAE, RMSE, CRPS of an ensemble, and the distribution of
wind by class of terrain. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

CLASSES = {
    "sea and coast": (-np.inf, 5.0),
    "low land": (5.0, 100.0),
    "hills": (100.0, 300.0),
    "mountains": (300.0, np.inf),
}
"""Terrain by height of the place, m: from, below."""
CDF_STEP = 0.25
"""m/s between the points at which distributions are given."""


def psnr(truth: NDArray[np.floating], made: NDArray[np.floating], data_range: float) -> float:
    """Mean over the fields [n, H, W] of the peak signal-to-noise ratio, dB. ``data_range``: m/s
    that count as the peak.
    """
    from skimage.metrics import peak_signal_noise_ratio

    return float(
        np.mean(
            [
                peak_signal_noise_ratio(t, m, data_range=data_range)
                for t, m in zip(truth, made, strict=True)
            ]
        )
    )


def ssim(truth: NDArray[np.floating], made: NDArray[np.floating], data_range: float) -> float:
    """Mean structural similarity (Wang et al. 2004: Gaussian window of 11 pixels, sigma 1.5) of the
    fields [n, H, W].
    """
    from skimage.metrics import structural_similarity

    how = {
        "gaussian_weights": True,
        "sigma": 1.5,
        "use_sample_covariance": False,
        "data_range": data_range,
    }
    return float(
        np.mean([structural_similarity(t, m, **how) for t, m in zip(truth, made, strict=True)])
    )


def crps(truth: NDArray[np.floating], members: NDArray[np.floating]) -> float:
    """Continuous ranked probability score of an ensemble [n, k, H, W], m/s, lower is better; the
    mean absolute error for one member.

    The fair estimate for few members (Ferro 2014, Q. J. R. Meteorol. Soc. 140, eq. 14).
    """
    k = members.shape[1]
    skill = np.abs(members - truth[:, None]).mean()
    if k == 1:
        return float(skill)
    ordered = np.sort(members, axis=1)
    weights = (2 * np.arange(1, k + 1) - k - 1).reshape(
        1, k, 1, 1
    )  # sum over pairs |a − b| = sum of ordered values by these weights
    return float(skill - (ordered * weights).sum(axis=1).mean() / (k * (k - 1)))


def scores(
    truth: NDArray[np.floating], members: NDArray[np.floating], data_range: float
) -> dict[str, float]:
    """Scores of fine fields.

    Args:
        truth: [n, H, W] m/s; ``members``: [n, k, H, W] m/s.
        data_range: m/s, the peak for PSNR and SSIM.

    Returns:
        psnr, ssim, mae, rmse and bias of the ensemble's mean; psnr_member, ssim_member of its first
        member alone; crps; spread, the mean standard deviation between the members (0 for one).
    """
    mean, first = members.mean(axis=1), members[:, 0]
    error = mean - truth
    result = {
        "psnr": psnr(truth, mean, data_range),
        "ssim": ssim(truth, mean, data_range),
        "mae": float(np.abs(error).mean()),
        "rmse": float(np.sqrt((error**2).mean())),
        "bias": float(error.mean()),
        "crps": crps(truth, members),
        "spread": float(members.std(axis=1, ddof=1).mean()) if members.shape[1] > 1 else 0.0,
    }
    if members.shape[1] > 1:
        result |= {
            "psnr_member": psnr(truth, first, data_range),
            "ssim_member": ssim(truth, first, data_range),
        }
    return result


def classes_of(terrain: NDArray[np.floating]) -> dict[str, NDArray[np.bool_]]:
    """Where each class of terrain is; classes with no place in ``terrain`` are left out."""
    where = {name: (terrain >= low) & (terrain < high) for name, (low, high) in CLASSES.items()}
    return {name: mask for name, mask in where.items() if mask.any()}


def cdf(values: NDArray[np.floating], at: NDArray[np.floating]) -> NDArray[np.float64]:
    """Share of ``values`` not above each of ``at``."""
    return np.searchsorted(np.sort(values.ravel()), at, side="right") / max(values.size, 1)


def cdfs(
    fields: Mapping[str, NDArray[np.floating]], terrain: NDArray[np.floating] | None
) -> dict[str, dict[str, Any]]:
    """By class of terrain: ``at`` (m/s), the distribution of each of ``fields`` [n, H, W], and its
    largest distance from ``truth``'s (Kolmogorov-Smirnov) where there is one. ``terrain``: [n, H,
    W] or [H, W] m; None: one class of all places.
    """
    highest = max(float(f.max()) for f in fields.values())
    at = np.arange(0.0, highest + CDF_STEP, CDF_STEP)
    shape = next(iter(fields.values())).shape
    table: dict[str, dict[str, Any]] = {}
    everywhere = {"all places": np.ones(shape, dtype=np.bool_)}
    classes = everywhere if terrain is None else classes_of(np.broadcast_to(terrain, shape))
    for name, mask in classes.items():
        curves = {key: cdf(field[mask], at) for key, field in fields.items()}
        entry: dict[str, Any] = {
            "at": at.tolist(),
            "share": float(mask.mean()),
            **{k: c.tolist() for k, c in curves.items()},
        }
        if "truth" in curves:
            entry["distance"] = {
                k: float(np.abs(c - curves["truth"]).max())
                for k, c in curves.items()
                if k != "truth"
            }
        table[name] = entry
    return table
