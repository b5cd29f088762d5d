"""Scores of fine fields: PSNR, SSIM, MAE, RMSE, CRPS of an ensemble, and the distribution of wind
by class of terrain. No I/O.
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
"""Class of terrain → its range of heights, m."""
CDF_STEP = 0.25
"""Step between the wind speeds at which distributions are given, m/s."""


def psnr(truth: NDArray[np.floating], made: NDArray[np.floating], data_range: float) -> float:
    """Return the peak signal-to-noise ratio, dB, averaged over the fields [n, H, W].
    ``data_range``: the peak, m/s.
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
    """Return the structural similarity of the fields [n, H, W], averaged over them (Wang et al.
    2004: Gaussian window of 11 pixels, sigma 1.5).
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
    """Return the continuous ranked probability score of an ensemble [n, k, H, W], m/s; lower is
    better. For one member it is the mean absolute error. For few members it is the fair estimate
    (Ferro 2014, Q. J. R. Meteorol. Soc. 140, eq. 14).
    """
    k = members.shape[1]
    skill = np.abs(members - truth[:, None]).mean()
    if k == 1:
        return float(skill)
    ordered = np.sort(members, axis=1)
    weights = (2 * np.arange(1, k + 1) - k - 1).reshape(
        1, k, 1, 1
    )  # the sum over pairs of |a − b| is the sum of the sorted values with these weights
    return float(skill - (ordered * weights).sum(axis=1).mean() / (k * (k - 1)))


def scores(
    truth: NDArray[np.floating], members: NDArray[np.floating], data_range: float
) -> dict[str, float]:
    """Return the scores of fine fields.

    Args:
        truth: [n, H, W] m/s.
        members: [n, k, H, W] m/s.
        data_range: the peak for PSNR and SSIM, m/s.

    Returns:
        psnr, ssim, mae, rmse and bias of the ensemble's mean; psnr_member and ssim_member of its
        first member; crps; spread, the mean standard deviation between the members (0 for one).
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
    """Return class of terrain → where it is, without the classes that do not occur in
    ``terrain``.
    """
    where = {name: (terrain >= low) & (terrain < high) for name, (low, high) in CLASSES.items()}
    return {name: mask for name, mask in where.items() if mask.any()}


def cdf(values: NDArray[np.floating], at: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the share of ``values`` that are at most each of ``at``."""
    return np.searchsorted(np.sort(values.ravel()), at, side="right") / max(values.size, 1)


def cdfs(
    fields: Mapping[str, NDArray[np.floating]], terrain: NDArray[np.floating] | None
) -> dict[str, dict[str, Any]]:
    """Return the distributions of wind by class of terrain: ``at`` (m/s), the distribution of each
    field, and its largest distance from that of ``truth`` (Kolmogorov-Smirnov) if there is one.

    Args:
        fields: name → [n, H, W] m/s.
        terrain: [n, H, W] or [H, W] m; None: all places are one class.
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
